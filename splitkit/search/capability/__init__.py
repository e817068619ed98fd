"""Partitions of supported nodes: which of them a backend takes together, as torch's partitioner decides it."""
