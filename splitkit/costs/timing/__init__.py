"""Measure the costs of a graph on this machine, op by op."""
