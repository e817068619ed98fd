"""The steps that the same stages would take under other schedules, numbers of microbatches, links, and with recompute.

The page picks among them at once: they are computed here, by the simulator, so that no number is the page's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from splitkit.errors import SplitError
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedules import known_schedules, schedule_of
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.transport import Transport

LINKS = ("pcie4", "nvlink4", "ethernet100", "ethernet400")
"""The presets that can be chosen, besides the links of the step itself and none."""
_FACTORS = (0.5, 1, 2, 4)
_MOST_ACTIONS = 2_000
"""A longer step is left out. All others together took 0.3 s for 4 stages, 8 microbatches, recompute or not."""


def what_if(run: ScheduleRun, recompute: Mapping[str, Sequence[StageCosts]] | None = None) -> dict[str, Any] | None:
    """Return the other steps as columns: ``schedules``, ``microbatches``, ``links`` and ``recompute`` to choose from.

    Each of ``rows`` is ``[schedule, microbatches, links, ranks, seconds, bubble, highest peak, recompute]``; the first
    three and the last are indices. A combination that a schedule refuses has no row. ``own`` is the row of the step
    itself. Replicated stages, very long steps, and orders of one's own have no other steps: ``None``.

    Args:
        run: the step itself.
        recompute: a word for which parts are run again in backward -> the costs of the stages; those of ``run`` first.
    """
    recompute = {"as planned": run.stages} if recompute is None else recompute
    words = [schedule.word for schedule in known_schedules()]
    schedule = schedule_of(run.order)
    if schedule is None or run.transport is None or max(run.replicas) > 1:
        return None
    counts = sorted({max(1, int(run.order.microbatches * factor)) for factor in _FACTORS})
    links: dict[str, Any] = {"as given": run.transport.links, "none": None, **{preset: preset for preset in LINKS}}
    if run.transport.links is None:
        del links["as given"]
    rows: list[list[float]] = []
    own = None
    for s, word in enumerate(words):
        ranks = run.ranks if word == schedule.word else None
        for m, count in enumerate(counts):
            if count * len(run.stages) * 2 > _MOST_ACTIONS:
                continue
            for (k, given), (r, stages) in product(enumerate(links.values()), enumerate(recompute.values())):
                step = _simulated(run, stages, run.transport, word, count, ranks, given)
                if step is None:
                    break
                if (word, count, k, r) == (schedule.word, run.order.microbatches, 0, 0):
                    own = len(rows)
                rows.append([s, m, k, step.ranks, step.seconds, step.bubble, max(step.peaks), r])
    if own is None:  # too long
        return None
    choices = {"schedules": words, "microbatches": counts, "links": list(links), "recompute": list(recompute)}
    return choices | {"rows": rows, "own": own}


def _simulated(
    run: ScheduleRun,
    stages: Sequence[StageCosts],
    transport: Transport,
    schedule: str,
    microbatches: int,
    ranks: int | None,
    links: Any,
) -> ScheduleRun | None:
    try:
        return simulate_schedule(
            stages,
            schedule,
            microbatches,
            ranks=ranks,
            links=links,
            overlap=transport.overlap,
            static_buffers=run.static_buffers,
        )
    except SplitError:  # the schedule does not go with these numbers, or the links do not know these ranks
        return None
