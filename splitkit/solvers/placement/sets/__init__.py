"""Arbitrary sets of units on each device, without convexity."""
