"""Cuts along one given order of units: blocks of least load, and cuts that have a price."""
