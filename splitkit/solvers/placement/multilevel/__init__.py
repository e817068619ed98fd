"""Multilevel placement of large graphs: coarsen, solve, and refine level by level."""
