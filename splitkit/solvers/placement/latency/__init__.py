"""One sample as soon as possible."""
