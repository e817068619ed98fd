"""Long runs of what a short one covers: marked ``campaign``, and left out unless asked for (`pytest -m campaign`)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings


def few_and_many(few, many, *strategies):
    """Two tests of one body: with a few examples, always; and with many, as a campaign."""

    def tests(body):
        def of(count):
            return settings(max_examples=count, deadline=None, derandomize=True)(given(*strategies)(body))

        return of(few), pytest.mark.campaign(of(many))

    return tests
