"""From facts and demands to the arrays of a solver and back: placement, stages, memory, recompute."""
