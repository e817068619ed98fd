"""Turns plans and results into plain data for pictures, pages and tables."""
