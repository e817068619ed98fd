"""Capture a joint graph: forward, loss and backward of a model through AOTAutograd."""
