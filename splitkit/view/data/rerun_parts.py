"""What a picture shows of parts that backward runs again: what they keep, and what the step takes with and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from torch.fx import Node

from splitkit.errors import PlanError
from splitkit.graph.byte_sizes import value_bytes
from splitkit.graph.dataflow import Dataflow
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import StagePrices
from splitkit.plans.checkpointed import checkpointed
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.view.data.ladder_model import as_triples

Taken = tuple[Node | None, int, list[Node]]
"""A value: the node that makes it (``None`` for an input of the graph), its bytes, and the nodes that read it."""


def rerun(plan: Plan, keys: Sequence[PartKey]) -> list[bool]:
    """Return for each part whether backward runs it again."""
    return [plan.parts[key].call == "checkpoint" for key in keys]


def taken_values(flow: Dataflow) -> list[Taken]:
    """Return the values that a part keeps if it takes them and backward runs it again, in graph order."""
    found: list[Taken] = []
    for node in flow.index:
        if node.op in ("get_attr", "output"):
            continue
        maker = flow.producer(node)
        readers = {flow.producer(user) for user in node.users} - {maker}
        read = sorted(filter(flow.is_placeable, readers), key=flow.index.__getitem__)
        if read and (nbytes := value_bytes(node)):
            found.append((None if node.op == "placeholder" else maker, nbytes, read))
    return found


def kept_between(
    saved: Mapping[tuple[int, int], Mapping[Node, int]],
    taken: Sequence[Taken],
    row_of: Callable[[Node], int],
    part_of: Callable[[int], int],
    again: Sequence[bool],
) -> list[tuple[int, int, int]]:
    """Return (row that makes, row that keeps, bytes) of what lies between forward and backward.

    A part that backward runs again keeps the values of other parts that it reads, up to its first reader; other parts
    keep what autograd saves. `page/scripts/recomputed.js` does the same after a border has moved.

    Args:
        saved: (row, row) -> what autograd saves, as if no part were run again.
        taken: the values of the graph.
        row_of: node -> its row.
        part_of: row -> its part.
        again: for each part whether it is run again.
    """
    found = {rows: sum(of.values()) for rows, of in saved.items() if not again[part_of(rows[1])]}
    for maker, nbytes, readers in taken:
        first: dict[int, int] = {}
        for row in map(row_of, readers):
            first[part_of(row)] = min(row, first.get(part_of(row), row))
        own = None if maker is None else part_of(row_of(maker))
        for part, row in first.items():
            if again[part] and part != own:
                key = (row if maker is None else row_of(maker), row)
                found[key] = found.get(key, 0) + nbytes
    return as_triples(found)


def step_choices(prices: StagePrices, plan: Plan, run: ScheduleRun) -> dict[str, Sequence[StageCosts]]:
    """Return a word for which parts are run again -> their costs; first as planned.

    There is nothing else to choose in inference, where parts have effects, and where the step has other prices.
    """
    again = [part.call == "checkpoint" for part in plan.parts.values()]
    own = "yes" if all(again) else "in some parts" if any(again) else "no"
    found: dict[str, Sequence[StageCosts]] = {own: run.stages}
    if prices.optimizer is None or prices.of(plan) != tuple(run.stages):
        return found
    plain = replace(plan, parts={key: replace(part, call="plain") for key, part in plan.parts.items()})
    for word, made in {"no": plain, "yes": checkpointed(plan)}.items():
        if word not in found:
            with suppress(PlanError):
                found[word] = prices.of(made)
    return found
