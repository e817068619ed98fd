"""One browser for all tests of pages."""

from __future__ import annotations

import pytest
from browser import Browser
from capturedmodels import changed
from keptfacts import kept_facts  # noqa: F401


@pytest.fixture(scope="session")
def browser():
    with Browser() as found:
        yield found


@pytest.fixture(scope="session", autouse=True)
def _captured_graphs_are_as_they_were():
    yield
    assert changed() == []
