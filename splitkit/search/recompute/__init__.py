"""Which values of forward backward computes again: bounds, descents and exact programs over a joint graph."""
