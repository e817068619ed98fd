"""Capture of a forward graph from a module and example inputs, by torch.export or symbolic tracing."""
