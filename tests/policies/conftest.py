"""Facts about a graph are found once for all tests of a file."""

from keptfacts import kept_facts  # noqa: F401
