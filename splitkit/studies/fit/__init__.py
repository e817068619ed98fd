"""Whether a model fits given devices, for inference or training, found on the ``meta`` device without its weights."""
