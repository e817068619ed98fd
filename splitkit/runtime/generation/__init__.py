"""Generates text with a split decoder; the caches of its layers stay on the devices that compute them."""
