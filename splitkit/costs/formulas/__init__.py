"""Formulas for the FLOPs and bytes of each node, and an estimate of the kernels that a compiler fuses."""
