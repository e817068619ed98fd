"""Stages: convex sets of units, one after the other, found by dynamic programs, annealing and integer programs."""
