"""What a second of recompute frees, and when a rank changes to the next corner of a stage."""

from __future__ import annotations

import numpy as np
import pytest

from splitkit.search.pipelines.rank_choice import freed_rate
from splitkit.search.pipelines.stage_frontiers import FrontierPoint


def point(saved, seconds):
    return FrontierPoint(np.zeros(1, bool), saved, seconds, 0.0, lambda: 0)


def test_bytes_that_a_second_of_recompute_frees():
    corners = [point(100, 0.0), point(60, 2.0), point(60, 3.0), point(10, 3.0)]
    assert [freed_rate(corners, at, 3) for at in range(4)] == [60.0, 0.0, pytest.approx(150 / 1e-30), -1.0]
    assert freed_rate([point(10, 0.0), point(20, 1.0)], 0, 1) == 0.0  # the next corner saves more
