"""Minimum cuts of one network, and of one for every price."""
