"""Parses the texts on the command line: options, devices and policies. Nothing here imports torch at once."""
