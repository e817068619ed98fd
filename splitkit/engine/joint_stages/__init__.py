"""Divide a joint graph into pipeline stages: a forward graph and one or two backward graphs for each."""
