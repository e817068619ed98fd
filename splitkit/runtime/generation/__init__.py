"""Generates text on the ranks of a process group, each with one stage of a decoder and the caches of its layers."""
