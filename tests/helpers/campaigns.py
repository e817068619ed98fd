"""Long runs of what a short one covers: marked ``campaign``, and left out unless asked for (`pytest -m campaign`)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
"""What says nothing of a test: how long its examples take to draw."""


def few_and_many(few, many, *strategies):
    """Two tests of one body: with a few examples, always; and with many, as a campaign."""

    def tests(body):
        def of(count):
            return settings(max_examples=count, deadline=None, derandomize=True)(given(*strategies)(body))

        return of(few), pytest.mark.campaign(of(many))

    return tests


def few_of_many(few, many, *strategies):
    """A test by its own name, with a few examples always, and with many as a campaign."""

    def tests(body):
        def of(count):
            return settings(max_examples=count, deadline=None, derandomize=True, suppress_health_check=SLOW)(
                given(*strategies)(body)
            )

        runs = {few: of(few), many: of(many)}

        @pytest.mark.parametrize("examples", these_first([few], [many]))
        def test(examples):
            runs[examples]()

        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        return test

    return tests


def some_of_all(rows, columns, always, turns=1):
    """Pairs for `pytest.mark.parametrize`: each row with the columns named and with one (or some) of the others, in
    turn, so that each of these has its rows; all others as a campaign.
    """
    others = [column for column in columns if column not in always]
    for number, row in enumerate(rows):
        now = {*always, *(others[(turns * number + turn) % len(others)] for turn in range(turns))}
        for column in columns:
            yield pytest.param(row, column, marks=() if column in now else pytest.mark.campaign)


def every_third(values, first):
    """Values for `pytest.mark.parametrize`: every third from that number on always, the others as a campaign."""
    for number, value in enumerate(values):
        yield pytest.param(value, marks=() if number % 3 == first else pytest.mark.campaign)


def these_first(chosen, others):
    """Values for `pytest.mark.parametrize`: those chosen always, the others as a campaign."""
    return [*chosen, *(pytest.param(*_tuple(other), marks=pytest.mark.campaign) for other in others)]


def _tuple(value):
    return value if isinstance(value, tuple) else (value,)
