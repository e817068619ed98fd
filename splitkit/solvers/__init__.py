"""Pure algorithms over arrays: numpy and scipy, no torch."""
