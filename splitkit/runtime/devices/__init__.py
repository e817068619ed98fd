"""Runs a split in one process, each part on a device of its own."""
