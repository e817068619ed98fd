"""Large graphs: contract, solve, refine level by level."""
