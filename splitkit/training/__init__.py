"""Joint graphs as data: the half of each node, what may be saved or recomputed, the order of nodes, and the peak."""
