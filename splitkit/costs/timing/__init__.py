"""Measure costs op by op, on this machine or from a trace of another."""
