"""Convex sets, one after the other: the search over the ideals of a graph and what speeds it up."""
