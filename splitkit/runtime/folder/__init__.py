"""Stages, weights and training checkpoints on disk."""
