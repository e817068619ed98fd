"""Translate facts and requests into a solver's arrays, and its answer back into a plan."""
