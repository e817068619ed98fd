"""The programs over cuts of a line against brute force, and the path bound against simulated steps."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from splitkit.pipeline.schedules import pipeline_order
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.search.pipelines.rank_choice import warm_up
from splitkit.solvers.line.path_bound import first_wait, least_path, least_sum


def random_line(seed, stages=3, size=6):
    dice = np.random.default_rng(seed)
    times = dice.integers(1, 20, (stages, size, size)).astype(float)
    times[dice.random(times.shape) < 0.2] = np.inf
    times[:, np.arange(size)[:, None] >= np.arange(size)[None, :]] = np.inf
    links = dice.integers(0, 4, size).astype(float)
    links[-1] = 0.0
    return times, links, dice.integers(0, 9, times.shape).astype(float)


def all_cuts(stages, size):
    return [(*inner, size - 1) for inner in combinations(range(1, size - 1), stages - 1)]


def path(times, links, waits, ends, count):
    before, found = 0.0, 0.0
    for stage, (start, end) in enumerate(pairwise([0, *ends])):
        found = max(found, count * times[stage, start, end] + waits[stage, start, end] + before)
        before += times[stage, start, end] + links[end]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_programs_equal_brute_force(seed):
    times, links, waits = random_line(seed)
    cuts = all_cuts(3, 6)
    found = least_path(times, links, 5, waits)
    assert found.value == min(path(times, links, waits, ends, 5) for ends in cuts)
    if np.isfinite(found.value):
        assert path(times, links, waits, found.ends, 5) == found.value
    least = least_sum(times, links, 12.0)
    sums = []
    for ends in cuts:
        own = [times[s, a, b] for s, (a, b) in enumerate(pairwise([0, *ends]))]
        sums.append(sum(own) + sum(links[e] for e in ends) if max(own) <= 12.0 else np.inf)
    assert least.value == min(sums)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager-1f1b"])
def test_no_simulated_step_is_shorter_than_its_path_bound(schedule):
    dice, tight = np.random.default_rng(0), 0
    for _ in range(60):
        stages = int(dice.integers(2, 6))
        count = int(dice.integers(stages, 12))
        forward, backward = dice.integers(1, 20, (2, stages)).astype(float)
        order = pipeline_order(schedule, stages, count)
        step = simulate_schedule([StageCosts(f, b) for f, b in zip(forward, backward, strict=True)], order).seconds
        both = forward + backward
        before = np.cumsum(both) - both
        waits = [float(first_wait(forward[s], both[s + 1 :].sum(), warm)) for s, warm in enumerate(warm_up(order))]
        bound = max(count * both + before + np.array(waits))
        assert bound <= step + 1e-9
        tight += bound > step - 1e-9
    assert tight > (0 if schedule == "gpipe" else 10)
