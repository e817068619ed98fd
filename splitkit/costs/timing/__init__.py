"""Measure costs on this machine, op by op, and cache them in a file."""
