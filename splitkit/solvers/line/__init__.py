"""Cuts along one given order."""
