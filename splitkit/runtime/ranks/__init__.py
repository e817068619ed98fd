"""Runs a split on the ranks of a process group, as a pipeline under a schedule."""
