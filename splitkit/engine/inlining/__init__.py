"""The inverse of a split: its parts, as they are now, in one graph again."""
