"""Captures one step of a model that generates text, with its caches as inputs and outputs of the graph."""
