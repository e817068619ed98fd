"""Graphs from torch and back: export, symbolic trace, joint capture and ``torch.compile``, with their private API."""
