"""Chains of stages on several devices each, against all chains that there are."""

import random
from itertools import combinations, product

import numpy as np
import pytest

from splitkit.solvers.line.replicated import Aim, ReplicatedChains


def compositions(items, devices, degrees):
    """All (borders, replicas) of so many items in a row."""
    for count in range(1, items + 1):
        for cuts in combinations(range(1, items), count - 1):
            for replicas in product(degrees, repeat=count):
                if sum(replicas) <= devices:
                    yield [*cuts, items], list(replicas)


def instance(seed):
    random_ = random.Random(seed)
    items, devices = random_.randint(1, 6), random_.randint(1, 6)
    degrees = [d for d in random_.choice([(1, 2), (1, 2, 4), (2, 3), (1, 3)]) if d <= devices] or [1]
    work = np.array([random_.choice([0, 1, 2, 3, 7, 20]) for _ in range(items)], float)
    bytes_ = np.array([random_.randint(0, 9) for _ in range(items + 1)], float)
    first, last = np.triu_indices(items + 1, 1)
    before = np.concatenate([[0.0], work.cumsum()])
    held = np.array([random_.randint(1, 9) for _ in range(items)], float)
    sums = np.concatenate([[0.0], held.cumsum()])
    own = sums[last] - sums[first]
    has_prices, has_memory = random_.random() < 0.6, random_.random() < 0.5
    room = random_.uniform(5, 40)
    slow = [random_.choice([1.0, 3.0]) for _ in range(devices + 1)]  # of a border after so many devices

    def enter(done, a, b):
        return slow[done] * bytes_[first] / min(a, b) / 4

    def leave(done, a, b):
        return slow[done] * bytes_[last] / min(a, b) / 3

    def extra(to_come, done, d):
        return own * (d - 1) / d / 8

    def over(to_come, done, d):
        return own / 2 + min(to_come, 3) * own / d - room

    places = devices if has_memory else 0
    chains = ReplicatedChains(
        first, last, before[last] - before[first], bytes_, devices, degrees, enter if has_prices else None,
        leave if has_prices else None, extra if has_prices else None, over if has_memory else None, places,
    )  # fmt: skip
    pair = {(f, t): i for i, (f, t) in enumerate(zip(first.tolist(), last.tolist(), strict=True))}

    def loads(borders, replicas):
        """Of each stage; None where one does not fit."""
        found, start, done = [], 0, 0
        for at, (end, d) in enumerate(zip(borders, replicas, strict=True)):
            i = pair[start, end]
            if has_memory and over(len(borders) - at, done, d)[i] > 0:
                return None
            load = (before[end] - before[start]) / d
            if has_prices:
                load += extra(len(borders) - at, done, d)[i]
                load += enter(done, replicas[at - 1], d)[i] if at else 0.0
                load += leave(done + d, d, replicas[at + 1])[i] if at + 1 < len(borders) else 0.0
            found.append(load)
            start, done = end, done + d
        return found

    return chains, loads, bytes_, (items, devices, degrees)


def worth(aim, loads, borders, replicas, crossing):
    if max(loads) > aim.limit * (1 + 1e-9):
        return np.inf
    if not aim.summed:
        return max(loads)
    squares = sum(d * load**2 for d, load in zip(replicas, loads, strict=True))
    return aim.squares * squares + aim.loads * sum(loads) + aim.crossing * sum(crossing[b] for b in borders)


@pytest.mark.parametrize("seed", range(60))
def test_the_best_of_all_chains_is_found(seed):
    chains, loads_of, crossing, shape = instance(seed)
    known = [(b, r, loads) for b, r in compositions(*shape) if (loads := loads_of(b, r)) is not None]
    fastest = min((max(loads) for _, _, loads in known), default=np.inf)
    for aim in (Aim(), Aim(fastest * 1.1, squares=1.0), Aim(loads=1.0), Aim(fastest * 1.3, 0.5, 0.1, 2.0)):
        least = min((worth(aim, loads, b, r, crossing) for b, r, loads in known), default=np.inf)
        found = chains.best(aim)
        assert (found is None) == (least == np.inf)
        if found is not None:
            assert found.value == pytest.approx(least)
            loads = loads_of(found.borders, found.replicas)
            assert worth(aim, loads, found.borders, found.replicas, crossing) == pytest.approx(least)
            assert sum(found.replicas) <= chains.devices


def test_of_equal_chains_that_of_fewer_devices_is_taken():
    first, last = np.triu_indices(3, 1)
    work = np.array([0.0, 4.0, 4.0])  # the first item takes no time, the second all
    found = ReplicatedChains(first, last, work, np.zeros(3), 5, (1, 4)).best(Aim())
    assert (found.value, sum(found.replicas)) == (1.0, 4)


def test_an_aim_is_a_sum_if_any_of_its_terms_has_a_weight():
    assert not Aim().summed and not Aim(limit=1.0).summed
    assert Aim(squares=1.0).summed and Aim(loads=1.0).summed and Aim(crossing=1.0).summed
