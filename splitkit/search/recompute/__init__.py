"""The search for what backward recomputes: lower bounds, local search and exact programs over a joint graph."""
