"""Prints text on a terminal: tables that are never truncated, and progress bars."""
