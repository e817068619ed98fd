"""Joint graphs as data: which half a node is of, what may be saved or repeated, in which order, with which peak."""
