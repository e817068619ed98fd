"""The inverse of a split: put its parts, as they are now, into one graph again."""
