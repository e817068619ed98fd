"""The price of copies of shared nodes, as nets of a problem whose units are the other nodes (see `PlacementModel`).

A stage with a unit that needs shared nodes either computes all of them or receives the value of at least one: it pays
for their work or for the cheapest message. A net whose pins are all the units that need a node is paid for by each
stage that holds some of them but not all. If nets cost at most the work of their nodes, and together at most that
message, no stage pays more than it must, so a bound of the extended problem is a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.traffic_bounds import ROUNDED, least_message, needed_by_units
from splitkit.solvers.placement.problem import Problem


def with_copies(problem: Problem, placing: PlacementModel, travel: TransferTimes | None) -> Problem:
    """Return the problem with nets for the price of copies; the same problem if nothing is copied, or links differ."""
    if travel is None or not placing.shared or problem.links is not None:  # which would multiply what copies take
        return problem
    nets = list(_nets(placing, least_message(placing, travel)))
    sizes = np.array([len(pins) for _, pins in nets], np.int64)
    pins = np.array([pin for _, pins in nets for pin in pins], np.int64)
    return replace(
        problem,
        net_costs=np.concatenate([problem.net_costs, np.array([cost for cost, _ in nets], np.float64)]),
        net_starts=np.concatenate([problem.net_starts, problem.net_starts[-1] + np.cumsum(sizes)]),
        pins=np.concatenate([problem.pins, pins]),
    )


def _nets(placing: PlacementModel, message: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Return costs and pins of the nets, which cost at most one message together; nodes that most units need count
    first.
    """
    needed, work = needed_by_units(placing), placing.shared_work
    of_pins: dict[tuple[int, ...], float] = {}
    for place, seconds in enumerate(work):
        pins = tuple(unit for unit, bits in enumerate(needed) if bits >> place & 1)
        of_pins[pins] = of_pins.get(pins, 0.0) + seconds
    left = message
    for pins in sorted(of_pins, key=lambda pins: (-len(pins), pins)):
        cost = min(of_pins[pins], left)
        left -= cost
        if cost > 0 and len(pins) > 1:
            yield cost * ROUNDED, pins
