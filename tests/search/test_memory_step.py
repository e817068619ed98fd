"""The cheapest start of each end is that of trying all, and few peaks are asked for."""

from __future__ import annotations

import numpy as np
from campaigns import few_of_many
from hypothesis import strategies as st

from splitkit.memory.segment import PeakBounds
from splitkit.search.memory_cuts import PartStarts


@st.composite
def peaks(draw):
    """Peaks of all stretches of a line, which rise and fall as they grow, and by how much they fall at most."""
    length = draw(st.integers(1, 24))
    amounts = st.lists(st.integers(0, 4), min_size=length, max_size=length)
    rises, ends, starts = (np.array([0, *draw(amounts)]).cumsum() for _ in range(3))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    wave = random.random(2)

    def peak(start, end):
        """Nodes of a stretch rise; some of what may fall at each end of it has."""
        return int(rises[end] - rises[start] + 20 - fallen(ends[end], wave[0]) + fallen(starts[start], wave[1]))

    return length, peak, PeakBounds(ends, starts)


def fallen(total, share):
    """A share of the sum, which grows by whole bytes and by no more than the sum."""
    return int(total * share)


@few_of_many(60, 400, peaks(), st.data())
def test_the_cheapest_start_is_that_of_trying_all(given, data):
    length, peak, falls = given
    first = data.draw(st.integers(1, length))
    window = range(first, data.draw(st.integers(first, length)) + 1)
    starts = data.draw(st.sets(st.integers(0, length - 1), min_size=1))
    costs = {start: data.draw(st.integers(0, 3)) for start in sorted(starts)}
    memory = data.draw(st.integers(0, 60))
    beginnings = PartStarts(costs, window, memory, falls, peak, lambda start, end: 0)
    for end in window:
        fits = [start for start in costs if start < end and peak(start, end) <= memory]
        assert beginnings.of(end) == min(fits, key=lambda start: (costs[start], -start), default=None)


def test_few_peaks_are_asked_for():
    """Of a million stretches."""
    length, asked = 1000, []
    sums = np.arange(length + 1)

    def peak(start, end):
        asked.append((start, end))
        return 3 * (end - start) + start % 2 - end % 2

    costs = dict.fromkeys(range(length), 0)
    beginnings = PartStarts(costs, range(1, length + 1), 999, PeakBounds(sums, sums), peak, lambda start, end: 0)
    assert [beginnings.of(end) for end in (1, 2, 3)] == [0, 1, 2]
    narrow = PartStarts({0: 0, 400: 1}, range(401, length + 1), 999, PeakBounds(sums, sums), peak, lambda start, end: 0)
    asked.clear()
    found = [narrow.of(end) for end in range(401, length + 1)]
    assert found == [400] * 333 + [None] * 267
    assert len(asked) < 60
