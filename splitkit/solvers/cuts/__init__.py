"""Minimum cuts of one network, and of a family of networks over a price."""
