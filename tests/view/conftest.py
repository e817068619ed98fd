"""One browser for all tests of pages."""

from __future__ import annotations

import pytest
from browser import Browser


@pytest.fixture(scope="session")
def browser():
    with Browser() as found:
        yield found
