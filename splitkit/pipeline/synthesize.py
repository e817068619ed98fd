"""Makes orders of actions for given stages, and reads and writes orders as torch's schedule CSV.

A file has a row per rank and a cell per action (``_load_csv``, torchtitan)::

    0F0,0F1,0B0,0B1          rank 0, format="compute_only"
    1F0,1B0,1F1,1B1          rank 1

    0F0,0SEND_F0,0RECV_B0,0B0          rank 0, format="compute_comms": with messages
    1RECV_F0,1F0,1B0,1SEND_B0          rank 1
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import sub
from pathlib import Path
from typing import Any, Literal

import numpy as np

from splitkit.checks import Memory, is_number, memory_of, shown
from splitkit.errors import FileError, NoPlanError, PolicyError, ScheduleError
from splitkit.files import PathLike, save_text
from splitkit.pipeline.memory import share, static_bytes, units_of
from splitkit.pipeline.message_order import MessageOrder, is_message
from splitkit.pipeline.order import ACTION, LETTERS, OTHER_CELL, Action, PipelineOrder, action_of
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.schedule import rank_of_stage, require_numbers
from splitkit.pipeline.schedules import known_schedules, pipeline_order
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts, bytes_back, require_stages
from splitkit.pipeline.trace import LinkTimes
from splitkit.plans.parts import Claim
from splitkit.short_repr import brief
from splitkit.solvers.order_problem import ActionBytes, F, I, OrderProblem, Rows, W
from splitkit.solvers.order_search import rows_one_by_one, search_order
from splitkit.units import duration, size

_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_REMEDY = "Write stage, F, B, I or W, and microbatch: 3F0; or leave the cell empty for idle time."


def order_to_csv(order: PipelineOrder) -> str:
    """Return an order as torch writes it; each row ends with ``\\r\\n``.

    A `MessageOrder` is written as with ``format="compute_comms"``, all others as with ``format="compute_only"``: the
    reader of the file then places the messages, as torch does by default.
    """
    text = io.StringIO()
    csv.writer(text).writerows(order.cells if isinstance(order, MessageOrder) else order.ranks)
    return text.getvalue()


def order_from_csv(text: str, name: str = "custom") -> PipelineOrder:
    """Read an order that torch wrote with ``format="compute_only"`` or ``"compute_comms"``, or that a person wrote.

    An empty row is a rank that does nothing; an empty cell is idle time. In an overlapped pair
    ``(0F3;3B1)OVERLAP_F_B`` the first action runs first, as in torch. If there are sends and receives, the result is a
    `MessageOrder` with all cells as they are; otherwise torch places the messages, and inserts what shards parameters
    or reduces gradients.

    Raises:
        ScheduleError: SK331 for a cell that is not an action, named by row and column, and for an order that deadlocks,
            by its actions or by its messages.
    """
    lines = csv.reader(io.StringIO(text, newline=""))
    try:
        rows = tuple(tuple(_row(number, cells)) for number, cells in enumerate(lines, 1))
    except csv.Error as error:
        raise ScheduleError("SK331", f"{name} is not CSV: row {lines.line_num}: {error}", _REMEDY) from error
    actions = tuple(tuple(action_of(cell) for cell in row if ACTION.fullmatch(cell)) for row in rows)
    if any(is_message(cell) for row in rows for cell in row):
        return MessageOrder(name, actions, rows)
    return PipelineOrder(name, actions)


def save_order(order: PipelineOrder, path: PathLike) -> None:
    """Write an order to a file: see `order_to_csv`.

    Raises:
        FileError: SK504 if the file cannot be written.
    """
    save_text(path, order_to_csv(order))


def load_order(path: PathLike) -> PipelineOrder:
    """Read an order from a file, and name it after the file: see `order_from_csv`.

    Raises:
        FileError: SK504 if the file cannot be read.
        ScheduleError: SK331 if it holds no order.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = f"cannot read {str(path)!r}: {getattr(error, 'strerror', None) or error}"
        raise FileError("SK504", reason, "Name a CSV file with a row of actions for each rank.") from error
    return order_from_csv(text, Path(path).name)


def _row(number: int, cells: list[str]) -> Iterator[str]:
    """Yield the actions of a row; a cell that pairs actions yields each of them."""
    for column, cell in enumerate(cells, 1):
        word = cell.strip()
        pair = _PAIR.fullmatch(word)
        for one in pair[1].split(";") if pair else [word] if word else []:
            if not ACTION.fullmatch(one.strip()) and (pair or not OTHER_CELL.fullmatch(one)):
                raise ScheduleError("SK331", f"row {number}, column {column}: {cell!r:.80} is not an action", _REMEDY)
            yield one.strip()


# Makes an order of actions for given stages: the shortest step that memory allows, or close to it, with a bound.
#
# The solver (`order_search`) knows the bytes that depend on the order alone. Messages that wait to be read
# depend on times; `splitkit.simulate_schedule` has the last word on them, and where they take a rank above its limit,
# the solver gets less room for that rank and tries again. Its first bound stays: less memory never makes a step
# shorter.


OrderPlacement = Literal["loop", "V"]

_NO_LIMIT = 2**62  # bytes that a rank without limit has
_TRIES = 4
"""How often the solver runs with less room for messages."""
_KNOWN_ACTIONS = 3 * 4096
"""The longest steps for which the known schedules are tried: torch takes long to make long ones."""
_MOST_EFFORT = 1000  # what takes a second at an effort of 1 then takes a quarter of an hour
_KINDS = "FIW"


def synthesize(
    stages: Sequence[StageCosts],
    microbatches: int,
    memory: Memory = None,
    *,
    ranks: int | None = None,
    placement: OrderPlacement | None = None,
    links: str | LinkTimes | None = None,
    devices: Sequence[Hashable] | None = None,
    static_buffers: bool = False,
    objective: OrderObjective = "step",
    effort: float = 1.0,
) -> SynthesizedOrder:
    """Make an order of forward (F), input gradient (I) and weight gradient (W) actions on each rank.

    Among orders in which each stage processes the microbatches in sequence, it minimises the simulated step, such that
    no rank's peak exceeds its memory limit. (With one stage per rank, and without message buffers, other orders are
    never better: `splitkit.solvers.order_problem`.) Every rank runs as in `splitkit.simulate_schedule` with
    ``overlap``.

    Steps of up to 100 actions are solved by branch and bound, usually to a proof. Longer ones are searched: list
    scheduling by many rules and within the windows of single stages, then moves on the critical path. The known
    schedules that fit are also tried, so that none of them is better. The bound is the largest of

    * the work of a rank after the arrival of its first message;
    * the forwards and input parts of one stage, and the way of the first microbatch to it and of the last one back;
    * the largest value for which the windows of single stages contradict each other
      (`splitkit.solvers.exact_order`). Memory enters here.

    The same arguments give the same order: the limits of the search count work, not time.

    Args:
        stages: the stages, in the order of the model.
        microbatches: how many microbatches the step has.
        memory: the limit of each rank: one size for all (``"80GiB"``), or one for each; ``None`` for none.
        ranks: how many ranks share the stages; ``None``: as many as stages, or half as many with ``placement="V"``.
        placement: where several stages of a rank are: ``"loop"``, stage s on rank s mod ranks; ``"V"``, of two stages
            the second ones from the last rank back to the first. ``None``: the better one.
        links: as for `splitkit.simulate_schedule`.
        devices: as for `splitkit.simulate_schedule`.
        static_buffers: as for `splitkit.simulate_schedule`; `splitkit.runtime` has them on torch before 2.15.
        objective: ``"step"``: the time of the step. ``"span"``: the longest time of a rank from its first to its last
            action, which is the distance of steps if every rank begins the next one as soon as it has done this one.
        effort: multiplies the work limits of the search: more than 1 for a better order or bound, less for a quick one.

    Raises:
        ScheduleError: SK330 if the numbers do not fit each other; SK332 for stages with invalid costs.
        PolicyError: SK302 for another objective, placement or memory.
        NoPlanError: SK303 if a rank has too little memory for one microbatch at a time; says how many bytes it takes.
        CostError: SK322 if two ranks that talk have no link.
    """
    if objective not in ("step", "span"):
        raise PolicyError("SK302", f"synthesize(objective={shown(objective)})", "objective must be 'step' or 'span'.")
    if not is_number(effort) or not 0 < float(effort) <= _MOST_EFFORT:
        reason = f"synthesize(effort={shown(effort)})"
        raise PolicyError("SK302", reason, f"effort must be a number above 0 and at most {_MOST_EFFORT}.")
    ranks, placements = _placed(stages, microbatches, ranks, placement)
    limits = memory_of("synthesize", memory, ranks)
    found = [
        _Synthesis(
            stages, microbatches, ranks, one, limits, links, devices, static_buffers, objective, float(effort)
        ).run()
        for one in placements
    ]
    best = min(found, key=lambda one: one.value)
    bound, proof = min((one.bound, one.proof) for one in found)
    return SynthesizedOrder(best.run, objective, bound, proof, best.placement, limits)


def _placed(
    stages: Sequence[StageCosts], microbatches: int, ranks: int | None, placement: object
) -> tuple[int, tuple[OrderPlacement, ...]]:
    """Return the number of ranks, and the placements to try."""
    if placement not in (None, "loop", "V"):
        raise PolicyError("SK302", f"synthesize(placement={shown(placement)})", "placement must be 'loop' or 'V'.")
    require_stages(stages)
    count, given = len(stages), ranks
    if ranks is None:
        ranks = count // 2 if placement == "V" and count > 1 else count
    require_numbers(count, microbatches, ranks)
    if count % ranks:
        text = f"{count} stages on {ranks} ranks"
        raise ScheduleError(
            "SK330", text, "Each rank has the same number of stages: split into a multiple of the number of ranks."
        )
    if placement == "V" and count != 2 * ranks:
        text, fits = f"{count} stages on {ranks} ranks in a V", f"{2 * ranks}"
        if given is None:
            text, fits = f"{count} stages in a V", f"{count + count % 2}"
        raise ScheduleError("SK330", text, f"A V has two stages on each rank: split into {fits}.")
    if placement is not None:
        return ranks, ("V" if placement == "V" else "loop",)
    return ranks, ("loop", "V") if count == 2 * ranks and ranks > 1 else ("loop",)


@dataclass(frozen=True)
class _Synthesis:
    """The synthesis for one placement; the fields are the arguments of `synthesize`."""

    stages: Sequence[StageCosts]
    microbatches: int
    ranks: int
    placement: OrderPlacement
    limits: tuple[int | None, ...]
    links: str | LinkTimes | None
    devices: Sequence[Hashable] | None
    static_buffers: bool
    objective: OrderObjective
    effort: float

    def run(self) -> SynthesizedOrder:
        """Return the best order whose simulated peaks are within the limits."""
        problem, least = self._problem()
        over = self._excess(least)
        if max(over) > 0:
            raise self._no_room(least, over)
        known = [rows for rows in self._known(problem) if max(self._excess(self._simulated(rows))) <= 0]
        runs, first = [least, *map(self._simulated, known)], None
        for _ in range(_TRIES):
            found = search_order(problem, known, self.effort)
            first = first or found
            if found is None:
                break
            runs.append(self._simulated(found.timed.rows))
            if max(self._excess(runs[-1])) <= 0:
                break
            waiting = [memory.messages for memory in runs.pop().memory]
            problem = replace(problem, room=tuple(map(sub, problem.room, waiting)))
        assert first is not None, "an order of one microbatch after the other fits"
        results = [
            SynthesizedOrder(run, self.objective, first.bound, first.how, self.placement, self.limits) for run in runs
        ]
        return min(results, key=lambda one: one.value)

    def _problem(self) -> tuple[OrderProblem, ScheduleRun]:
        """Return the problem, and the step that takes one microbatch after the other and holds the least."""
        rank_of = tuple(rank_of_stage(self.placement, stage, self.ranks) for stage in range(len(self.stages)))
        rows: Rows = []
        for rank in range(self.ranks):
            own = [stage for stage, on in enumerate(rank_of) if on == rank]
            rows.append([(s, F) for s in own] + [(s, kind) for s in own[::-1] for kind in (I, W)])
        problem = _problem(self._simulated([row * self.microbatches for row in rows]), self.limits, self.objective)
        return problem, self._simulated(rows_one_by_one(problem))

    def _simulated(self, rows: Rows) -> ScheduleRun:
        numbered: list[list[Action]] = []
        for row in rows:
            counts: Counter[tuple[int, int]] = Counter()
            numbered.append([])
            for stage, kind in row:
                numbered[-1].append(Action(stage, _KINDS[kind], counts[stage, kind]))
                counts[stage, kind] += 1
        order = PipelineOrder("synthesized", tuple(map(tuple, numbered)))
        return simulate_schedule(
            self.stages, order, links=self.links, devices=self.devices, static_buffers=self.static_buffers
        )

    def _excess(self, run: ScheduleRun) -> list[int]:
        """Return the bytes by which the peak of each rank is above its limit."""
        return [0 if limit is None else peak - limit for peak, limit in zip(run.peaks, self.limits, strict=True)]

    def _no_room(self, least: ScheduleRun, over: Sequence[int]) -> NoPlanError:
        rank = over.index(max(over))
        need, limit = least.peaks[rank], self.limits[rank] or 0
        text = f"rank {rank} takes {size(need)} for one microbatch at a time, and has {size(limit)}"
        remedy = f"Give it {need} bytes ({size(need)}), smaller microbatches, or more stages."
        error = NoPlanError("SK303", text, remedy)
        error.excess = over[rank]
        return error

    def _known(self, problem: OrderProblem) -> Iterator[Rows]:
        """Yield the orders of the known schedules that go with the numbers and the placement, backward divided."""
        count = len(self.stages)
        if 3 * count * self.microbatches > _KNOWN_ACTIONS:
            return
        for schedule in known_schedules():
            try:
                order = pipeline_order(schedule.name, count, self.microbatches, self.ranks)
            except ScheduleError:
                continue
            if order.rank_of == problem.rank_of:
                yield [
                    [(a.stage, _KINDS.index(kind)) for a in row for kind in ("IW" if a.kind == "B" else a.kind)]
                    for row in order.ranks
                ]


def _problem(run: ScheduleRun, limits: Sequence[int | None], objective: OrderObjective) -> OrderProblem:
    """Return the problem that a step poses; only what does not depend on the order is read from the step."""
    stages, rank_of = run.stages, run.order.rank_of
    fixed = [m.parameters + m.gradients + m.optimizer for m in run.memory]
    held = [own + static for own, static in zip(fixed, static_bytes(run), strict=True)]
    syncs = run.syncs or (0.0,) * run.ranks
    room = [_NO_LIMIT if limit is None else limit - own for limit, own in zip(limits, held, strict=True)]
    problem = OrderProblem(
        microbatches=run.order.microbatches,
        rank_of=rank_of,
        seconds=tuple((float(s.forward), float(s.backward_input), float(s.backward_weight)) for s in stages),
        travel=_travel(run),
        uses=tuple(_uses(run, stage) for stage in range(len(stages))),
        room=tuple(room),
        late=syncs,
    )
    if objective == "step":
        return problem
    return replace(problem, late=tuple(sync - first for sync, first in zip(syncs, problem.first, strict=True)))


def _travel(run: ScheduleRun) -> tuple[tuple[float, float], ...]:
    """Return the seconds of each stage's forward message and gradient message, taken from the first microbatch."""
    _, stage, kind, microbatch = run.order.columns
    took = (run.arrivals - run.departures)[microbatch == 0]
    of = {
        (s, LETTERS[k]): seconds
        for s, k, seconds in zip(
            stage[microbatch == 0].tolist(), kind[microbatch == 0].tolist(), took.tolist(), strict=True
        )
    }
    return tuple((of[s, "F"], of[s, "I"]) for s in range(len(run.stages)))


def _uses(run: ScheduleRun, stage: int) -> tuple[ActionBytes, ActionBytes, ActionBytes]:
    """Return the bytes of a stage's actions: those of `splitkit.pipeline.memory` that the order alone decides.

    A gradient from a stage of the same rank is held from when it is made to the end of the action that reads it, one
    from another rank at least while that action runs. With static buffers, ranks keep what they sent.
    """
    costs, rank_of = run.stages[stage], run.order.rank_of
    saved, left, extra = units_of(run, stage)
    before, after = (0 <= s < len(rank_of) and rank_of[s] == rank_of[stage] for s in (stage - 1, stage + 1))
    back = share(bytes_back(run.stages, stage), costs.replicas)
    read = share(bytes_back(run.stages, stage + 1), costs.replicas) if stage + 1 < len(rank_of) else 0
    is_first, is_last = stage == 0, stage + 1 == len(rank_of)
    made = back * (not is_first and (before or run.static_buffers))
    kept = share(costs.activation_bytes, costs.replicas) * (not (is_last or after) and run.static_buffers)
    arriving = read * (not (is_last or after or run.static_buffers))
    return (
        ActionBytes(saved, costs.temporary_bytes),
        ActionBytes(extra, costs.temporary_bytes + arriving, left - saved + made - read * after),
        ActionBytes(0, costs.temporary_bytes, kept - left - extra),
    )


# Holds an order of actions made for given stages, with its simulated step and a lower bound on all orders.


OrderObjective = Literal["step", "span"]
"""What is minimised: the whole step, or the longest time of a rank from its first action to its last."""

_PROOFS = {
    "work": "work of a rank or path through a stage",
    "windows": "windows of single stages",
    "branching": "branching over all orders",
}


@dataclass(frozen=True, eq=False)
class SynthesizedOrder:
    """An order that `splitkit.synthesize` found.

    Attributes:
        run: the simulated step of the order.
        objective: what was minimised.
        bound: no order that takes the microbatches in turn is below it, within the same memory, on either placement
            that was tried.
        proof: what proves the bound: ``"work"``, ``"windows"`` or ``"branching"``.
        placement: ``"V"`` or ``"loop"``; with one stage per rank, ``"loop"``.
        limits: rank -> its memory limit in bytes, ``None`` for none.
    """

    run: ScheduleRun
    objective: OrderObjective
    bound: float
    proof: str
    placement: Literal["loop", "V"]
    limits: tuple[int | None, ...]

    __repr__ = brief

    @property
    def order(self) -> PipelineOrder:
        """The actions of each rank."""
        return self.run.order

    @property
    def ends(self) -> tuple[float, ...]:
        """Rank -> the value of the objective on it: the end of its last action, or the time since its first one."""
        ends = np.zeros(self.run.ranks)
        np.maximum.at(ends, self.order.columns.rank, self.run.ends)
        if self.run.syncs:
            ends += np.array(self.run.syncs)
        if self.objective == "span":
            starts = np.full(self.run.ranks, np.inf)
            np.minimum.at(starts, self.order.columns.rank, self.run.starts)
            ends -= starts
        return tuple(ends.tolist())

    @property
    def value(self) -> float:
        """Seconds of the step, or the longest span of a rank."""
        return max(self.ends)

    @property
    def claim(self) -> Claim:
        """The value, its bound, and the rank that ends last."""
        ends = self.ends
        bound = min(self.bound, max(ends))
        return Claim(self.objective, max(ends), bound, _PROOFS[self.proof], ends.index(max(ends)))

    @property
    def gap(self) -> float:
        """An upper bound on how much shorter another order could be, as a fraction of the value."""
        return self.claim.gap

    @property
    def optimal(self) -> bool:
        """Whether no order is proven to be better."""
        return self.claim.optimal

    @property
    def peaks(self) -> tuple[int, ...]:
        """Bytes of each rank at its peak; `ScheduleRun.memory` divides them by kind."""
        return self.run.peaks

    def save(self, path: PathLike) -> None:
        """Write the order as torch's schedule CSV, for ``splitkit train --schedule order.csv``.

        Raises:
            FileError: SK504 if the file cannot be written.
        """
        save_order(self.order, path)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, the order as a text for each rank."""
        return {
            "objective": self.objective,
            "value": self.value,
            "bound": self.claim.bound,
            "gap": self.gap,
            "optimal": self.optimal,
            "proof": self.proof,
            "placement": self.placement,
            "limits": list(self.limits),
            "actions": [" ".join(map(str, row)) for row in self.order.ranks],
            "step": self.run.to_dict(),
        }

    def __str__(self) -> str:
        unit, claim = self.run.unit, self.claim
        proof = "optimal" if claim.optimal else f"at most {claim.gap:.2%} above the best"
        limits = [limit for limit in self.limits if limit is not None]
        within = f", within {size(min(limits))} per rank" if limits else ""
        head = f"{claim.objective} of {duration(claim.value, unit)}{within}: {proof}"
        return f"{head} (bound {duration(claim.bound, unit)}: {_PROOFS[self.proof]})\n{self.run}"
