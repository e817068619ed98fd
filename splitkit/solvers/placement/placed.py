"""Stages of a core as a placement of its problem: devices for units, and which of several stages is taken."""

from __future__ import annotations

import numpy as np

from splitkit.solvers.placement.core import Core
from splitkit.solvers.placement.evaluate import loads
from splitkit.solvers.placement.problem import Ints, Problem
from splitkit.solvers.placement.solution import Key
from splitkit.solvers.placement.stages import Stages


def preferred(problem: Problem, core: Core, plans: list[Stages], prefer: Key | None) -> tuple[Ints, tuple[int, ...]]:
    """The best of several stages, placed: by their greatest load, then by the key, then the first.

    Args:
        problem: what is placed.
        core: of the problem.
        plans: at least one.
        prefer: the key.
    """
    found = [placed(core, stages) for stages in plans]
    if len(found) == 1:
        return found[0]
    worst = [float(loads(problem, device).max()) for device, _ in found]
    least = min(worst)
    best = [place for place, value in zip(found, worst, strict=True) if value <= least * (1 + 1e-12)]
    return min(best, key=lambda place: prefer(*place)) if prefer else best[0]


def placed(core: Core, stages: Stages) -> tuple[Ints, tuple[int, ...]]:
    """The device of each unit of the problem, and the used devices from the first stage to the last."""
    unused = {kind: list(spec.devices) for kind, spec in enumerate(core.kinds)}
    first_to_last = [unused[kind].pop(0) for kind in reversed(stages.kinds)]
    of_stage = np.array(first_to_last[::-1], np.int64)
    device = of_stage[stages.rank][core.group]
    used = set(np.unique(device).tolist())
    return device, tuple(d for d in first_to_last if d in used)
