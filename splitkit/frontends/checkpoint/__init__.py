"""Carry out plans with torch.utils.checkpoint, in eager mode."""
