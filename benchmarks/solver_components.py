"""Which part of the solvers earns its lines: each switched off alone, on the searches of `solver_cases`.

For each component: in how many searches it was called, and for what share of their processor time; how often it found
a better plan or raised the bound; and in how many of these searches the plan or the bound is worse, or better, without
it, and by how much at most. The library has no hooks for that: its functions are replaced from outside. Processor time
is inclusive, of one thread. The clock is stopped, so that steps alone end a search. ``--json`` for machines.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import islice
from typing import Any
from unittest.mock import patch

from placement import own_stdout
from rich.console import Console
from rich.table import Table
from solver_cases import Case, Outcome, cases, without_clock

from splitkit.search import device_search, memory_search, placement_model
from splitkit.search.recompute import plan_pool, recompute_search
from splitkit.search.stages import rank_borders, stage_search
from splitkit.solvers.placement import contract, latency_solver, set_solver, unequal_solver
from splitkit.solvers.placement.stages import contiguous, ideal_dp, linked_annealing, stage_solver

NEAR = 1e-9
"""Relative: what differs by less is equal."""
Function = Callable[..., Any]


def nothing(*_: Any, **__: Any) -> None:
    """Find nothing."""


def none(*_: Any, **__: Any) -> Iterator[Any]:
    """Find none."""
    return iter(())


def zero(*_: Any, **__: Any) -> float:
    """Prove nothing."""
    return 0.0


def given(place: int) -> Function:
    """Return what was given at this place."""
    return lambda *args, **_: args[place]


@dataclass(frozen=True)
class Component:
    """A part of the search.

    Attributes:
        name: what the table calls it.
        owner: the module or class that looks it up.
        attribute: under this name.
        off: what stands for it when it is switched off, made from it.
    """

    name: str
    owner: Any
    attribute: str
    off: Callable[[Function], Any]


def to(replacement: Any) -> Callable[[Function], Any]:
    """Whatever was there, this stands for it."""
    return lambda _: replacement


_STAGES, _SETS = stage_solver.StageSearch, set_solver._SetSearch
_RECOMPUTE = recompute_search.RecomputeSearch
COMPONENTS = [
    Component("stages: orders but the first", stage_solver, "orders", lambda own: lambda core: islice(own(core), 1)),
    Component("stages: ideals", _STAGES, "over_ideals", to(nothing)),
    Component("stages: ideals, dominance", ideal_dp, "dominance_applies", to(lambda *_: False)),
    Component("stages: reordering", _STAGES, "by_reordering", to(nothing)),
    Component("stages: annealing", _STAGES, "by_annealing", to(nothing)),
    Component("stages: joining", contract, "joining_bound", to(given(1))),
    Component("stages: borders", stage_solver, "border_bound", to(given(1))),
    Component("stages: shares", _STAGES, "by_shares", to(nothing)),
    Component("stages: relaxation", stage_solver, "stage_relaxation", to(given(2))),
    Component("stages: integer program", _STAGES, "by_program", to(nothing)),
    Component("stages: idle units joined", contiguous, "exact_links", to(lambda _: False)),
    Component("stages: ties", _STAGES, "ties", to(lambda _: [])),
    Component("stages: cuts between blocks", rank_borders.RankBorders, "stages", to(none)),
    Component("stages: few borders, true peaks", stage_search.StagePlanner, "_few", to(none)),
    Component("stages: even cuts", stage_search.StagePlanner, "_balanced", to(none)),
    Component("stages: annealing over links", linked_annealing.LinkedAnnealing, "annealed", to(given(1))),
    Component("stages: bound with empty stages", stage_search, "least_without_units", to(zero)),
    Component("stages: bound of ranks", stage_search, "joining_bound", to(given(1))),
    Component("stages: nets for copies", stage_search, "with_copies", to(given(0))),
    Component("all: shared values sent", placement_model.PlacementModel, "shared_seconds", to(0.0)),
    Component("sets: annealing", _SETS, "_anneal", to(nothing)),
    Component("sets: joining", _SETS, "_join", to(nothing)),
    Component("sets: cover", set_solver.CoverBound, "run", to(zero)),
    Component("sets: integer program", _SETS, "_program", to(nothing)),
    Component("latency: chained", latency_solver, "chain_placements", to(lambda _: [])),
    Component("latency: list scheduling", latency_solver, "list_schedules", to(lambda *_: [])),
    Component("latency: moves", latency_solver.PieceAnnealing, "run", to(nothing)),
    Component("latency: chain bound", latency_solver, "chain_bound", to(zero)),
    Component("latency: tree", latency_solver, "_searched", to(lambda *_: False)),
    Component("unequal: lines", unequal_solver, "best_on_order", to(nothing)),
    Component("unequal: moves", unequal_solver._Search, "_move", to(nothing)),
    Component("unequal: all placements", unequal_solver._Search, "_try_all", to(nothing)),
    Component("devices: bound by messages", device_search, "least_load", to(zero)),
    Component("memory: all cuts of small graphs", memory_search.MemorySearch, "_exactly", to(nothing)),
    Component("memory: orders but the first", memory_search, "orders", to(lambda _: [])),
    Component("recompute: sown plans", plan_pool.Descent, "sow", to(nothing)),
    Component("recompute: descent to a budget", plan_pool.Descent, "under", to(nothing)),
    Component("recompute: descent in time", plan_pool.Descent, "cheaper", to(nothing)),
    Component("recompute: descent in peak", plan_pool.Descent, "lower", to(nothing)),
    Component("recompute: close look", _RECOMPUTE, "_closer", to(lambda _, b, f, low: (low, 0))),
    Component("recompute: limits added", _RECOMPUTE, "_below", to(lambda *_: False)),
    Component("recompute: longer look", _RECOMPUTE, "_refine", to(nothing)),
    Component("recompute: cut", _RECOMPUTE, "_cut", to(zero)),
    Component("recompute: peaks of cuts", recompute_search.Bounds, "_cut", to(lambda *_: 0)),
]


@dataclass
class Tally:
    """What one search took.

    Attributes:
        calls: of each component.
        seconds: of the processor, in each component, those it calls included.
    """

    calls: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)


def timed(name: str, own: Function, tally: Tally) -> Function:
    """A function that is counted; a generator for as long as it runs."""

    @wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        tally.calls[name] += 1
        with _clock(name, tally):
            found = own(*args, **kwargs)
        return _each(found) if isinstance(found, Iterator) else found

    def _each(found: Iterator[Any]) -> Iterator[Any]:
        while True:
            with _clock(name, tally):
                item = next(found, tally)
            if item is tally:
                return
            yield item

    return call


@contextmanager
def _clock(name: str, tally: Tally) -> Iterator[None]:
    start = time.thread_time()
    try:
        yield
    finally:
        tally.seconds[name] += time.thread_time() - start


@contextmanager
def watched(tally: Tally) -> Iterator[None]:
    """Count all components that are functions."""
    with ExitStack() as stack:
        for part in COMPONENTS:
            own = part.owner.__dict__[part.attribute]
            if callable(own) and not isinstance(own, type):
                stack.enter_context(patch.object(part.owner, part.attribute, timed(part.name, own, tally)))
        yield


@contextmanager
def without(part: Component) -> Iterator[None]:
    """Switch a component off."""
    with patch.object(part.owner, part.attribute, part.off(part.owner.__dict__[part.attribute])):
        yield


@dataclass(frozen=True)
class Row:
    """A search with everything, or without one component.

    Attributes:
        case: its name.
        off: the component, ``None`` for none.
        outcome: what it found; ``None`` where it failed.
        seconds: of the processor.
        tally: what it took, of the search with everything.
    """

    case: str
    off: str | None
    outcome: Outcome | None
    seconds: float
    tally: Tally


def ran(name: str, case: Case, seconds: float, off: Component | None = None) -> Row:
    """One search."""
    tally = Tally()
    with without_clock(), watched(tally) if off is None else without(off):
        start = time.thread_time()
        try:
            outcome = case(seconds)
        except Exception as error:  # without a component a search may fail in any way
            outcome = None
            if off is None:
                raise RuntimeError(name) from error
        return Row(name, None if off is None else off.name, outcome, time.thread_time() - start, tally)


def rows_of(chosen: Sequence[str], seconds: float, parts: Sequence[Component]) -> Iterator[Row]:
    """Each search with everything, then without each component that it called."""
    known, captured = cases(), set[str]()
    for name in chosen:
        if (model := name.partition(":")[0]) not in captured:
            captured.add(model)
            known[name](0.01)
        whole = ran(name, known[name], seconds)
        yield whole
        for part in parts:
            is_function = callable(part.owner.__dict__[part.attribute])
            if not is_function or whole.tally.calls[part.name]:
                yield ran(name, known[name], seconds, part)


def compared(whole: Outcome, part: Outcome | None) -> dict[str, float]:
    """How much worse plan and bound are without a component, relative; less than 0 where they are better."""
    if part is None:
        return {"plan": float("inf"), "bound": 0.0}
    plan = next((b / a - 1 for a, b in zip(whole.values, part.values, strict=True) if abs(b - a) > NEAR * abs(a)), 0.0)
    bound = 1 - part.bound / whole.bound if whole.bound else 0.0
    return {"plan": plan, "bound": bound if abs(bound) > NEAR else 0.0}


def summary(rows: Sequence[Row], parts: Sequence[Component]) -> list[dict[str, Any]]:
    """One entry for each component."""
    whole = {row.case: row for row in rows if row.off is None}
    found = []
    for part in parts:
        own = [row for row in rows if row.off == part.name]
        asked = [whole[row.case] for row in own]
        entry: dict[str, Any] = {"component": part.name, "searches": len(own)}
        spent = sum(row.tally.seconds[part.name] for row in asked)
        entry["seconds"], entry["of"] = spent, sum(row.seconds for row in asked)
        entry["saved"] = entry["of"] - sum(row.seconds for row in own)
        for what in ("plan", "bound"):
            changes = {row.case: compared(whole[row.case].outcome, row.outcome)[what] for row in own}
            entry[what] = {
                "worse": sum(change > 0 for change in changes.values()),
                "better": sum(change < 0 for change in changes.values()),
                "worst": max([0.0, *changes.values()]),
                "best": min([0.0, *changes.values()]),
                "where": {case: change for case, change in changes.items() if change},
            }
        found.append(entry)
    return found


def show(entries: Sequence[dict[str, Any]], console: Console) -> None:
    """A table."""
    table = Table("without", "searches", "CPU s", "of CPU s", "plan worse", "by", "better", "by", "bound worse", "by",
                  "better", "by")  # fmt: skip
    for entry in entries:
        cells = [entry["component"], str(entry["searches"]), f"{entry['seconds']:.1f}", f"{entry['of']:.1f}"]
        for what in ("plan", "bound"):
            change = entry[what]
            cells += [str(change["worse"]), f"{change['worst']:.2%}", str(change["better"]), f"{-change['best']:.2%}"]
        table.add_row(*cells)
    console.print(table)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="searches whose name begins with one of these")
    parser.add_argument("--components", nargs="*", default=[""], help="components whose name contains one of these")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each search (3)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    out = own_stdout()
    chosen = [name for name in cases() if name.startswith(tuple(args.only))]
    parts = [part for part in COMPONENTS if any(word in part.name for word in args.components)]
    rows = []
    for row in rows_of(chosen, args.seconds, parts):
        rows.append(row)
        print(json.dumps(_plain(row)), file=sys.stderr, flush=True)
    entries = summary(rows, parts)
    if args.json:
        searches = [_plain(row) for row in rows]
        print(json.dumps({"seconds": args.seconds, "searches": searches, "components": entries}), file=out)
        return
    show(entries, Console(width=200, file=out))


def _plain(row: Row) -> dict[str, Any]:
    outcome = row.outcome
    found = None if outcome is None else {"values": outcome.values, "bound": outcome.bound, "solver": outcome.solver}
    return {"case": row.case, "off": row.off, "seconds": row.seconds, "found": found}


if __name__ == "__main__":
    main()
