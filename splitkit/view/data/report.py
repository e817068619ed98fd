"""Describes the parts of a plan: what each one computes, holds, takes and gives, as data and as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.checks import Memory, memory_of
from splitkit.costs import Costs
from splitkit.costs.training import forward_and_backward
from splitkit.display import Shown
from splitkit.engine.complete import complete_plan
from splitkit.engine.split import Split
from splitkit.engine.subgraphs import Subgraph, extract_subgraphs
from splitkit.frontends.capture.unfold_regions import note_hidden_nodes
from splitkit.graph.dataflow import Dataflow, facts_of, module_path
from splitkit.graph.node_values import tensor_bytes
from splitkit.pipeline.placed_prices import costs_of_plan, in_part, rerun_seconds
from splitkit.pipeline.run import RankRow, ScheduleRun
from splitkit.plans.parts import PARENT, Claim, PartKey
from splitkit.plans.record import Plan, plan_of
from splitkit.prices import as_given, checked, includes_backward, require_costs, unit_of
from splitkit.short_repr import brief
from splitkit.units import quantity, size
from splitkit.view.tables import table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class PartReport:
    """One part.

    Attributes:
        part: the part's name.
        modules: the modules that it computes, collapsed to ranges.
        ops: the number of nodes that it computes, copies included; getitems of tuples are not counted.
        flops: the floating-point operations of these nodes.
        parameters: the number of elements in the parameters that it reads, each counted once.
        parameter_bytes: the bytes of these parameters and of the buffers that it reads.
        bytes_in: the bytes of its inputs, without parameters.
        bytes_out: the bytes of its outputs.
        share: its share of the total time, or of what else the prices count. A checkpointed part runs forward again; of
            a part with replicas, one counts.
        device: the device that it runs on, if the plan says so.
        replicas: the number of devices that run it.
    """

    part: str
    modules: str
    ops: int
    flops: float
    parameters: int
    parameter_bytes: int
    bytes_in: int
    bytes_out: int
    share: float
    device: str | None = None
    replicas: int = 1


@dataclass(frozen=True)
class Report(Shown):
    """All parts of a plan in the order of execution; the parent comes last if it computes something.

    Attributes:
        parts: one row per part.
        total: the row of the whole model; its bytes are those of the model's inputs and outputs.
        note: the notes of the plan and of the prices, and how many nodes export has hidden.
        sizes_known: whether the graph carries the ``meta["val"]`` that bytes and FLOPs come from.
        claim: objective, value, proven bound, solver and limiting part, if an optimizing policy made the plan.
        unit: the unit of the prices: ``"s"``, ``"TFLOP"``, ``"nodes"``.
    """

    parts: tuple[PartReport, ...]
    total: PartReport
    note: str
    sizes_known: bool
    claim: Claim | None = None
    unit: str = "s"

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        data = asdict(self)
        if self.claim is not None:
            data["claim"] |= {
                "gap": self.claim.gap,
                "optimal": self.claim.optimal,
                "limiting": part_title(self.claim.limiting),
            }
        return data

    def table(self) -> Table:
        """Return a rich table that never truncates a name."""
        numbers = ("ops", "FLOPs", "parameters", "bytes in", "bytes out", "share")
        has_devices = any(row.device for row in self.parts)
        has_replicas = any(row.replicas > 1 for row in self.parts)
        where = [*(["device"] if has_devices else []), *(["replicas"] if has_replicas else [])]
        titles = ("part", *where, "modules", *numbers)

        def cells(row: PartReport) -> list[str]:
            return [
                row.part,
                *([row.device or ""] if has_devices else []),
                *([f"x{row.replicas}" if row.replicas > 1 else ""] if has_replicas else []),
                row.modules,
                str(row.ops),
                quantity(row.flops) if self.sizes_known else "-",
                quantity(row.parameters),
                size(row.bytes_in) if self.sizes_known else "-",
                size(row.bytes_out) if self.sizes_known else "-",
                f"{row.share:.1%}",
            ]

        rows = map(cells, self.parts)
        spare = ("parameters", "bytes in", "FLOPs", "ops", "bytes out")
        return table(titles, rows, numbers, self.note, least={"modules": 24}, total=cells(self.total), spare=spare)

    def __str__(self) -> str:
        from splitkit.view.console import to_text

        return to_text(self.table())


def report(gm: fx.GraphModule | Split, plan: Plan | None = None, costs: Costs | None = None) -> Report:
    """Describe what each part of a plan computes, holds, receives and sends.

    Args:
        gm: the graph that the plan is for, or a split.
        plan: the plan; by default the one of the split.
        costs: the prices; by default those that the plan was made with. If it does not know them, FLOPs, or 1 per node
            where the graph has no ``meta["val"]``.

    Raises:
        PlanError: if the plan's parts cannot be ordered.
    """
    flow = facts_of(gm)
    plan = plan_of(gm if plan is None else plan)
    costs = checked(costs_of_plan(plan, flow) if costs is None else require_costs(costs))
    whole = complete_plan(flow, plan)
    subgraphs = [step for step in extract_subgraphs(flow, whole) if isinstance(step, Subgraph)]
    parent = tuple(n for n, keys in whole.items() if PARENT in keys)
    paths = {n: module_path(n) for n in flow.nodes}
    work = _work(flow, whole, costs)
    most = sum(work.values())
    shares = {key: seconds / most if most else 0.0 for key, seconds in work.items()}

    def row(
        title: str, nodes: Iterable[Node], taken: Iterable[Node], given: Iterable[Node], key: PartKey, share: float
    ) -> PartReport:
        nodes = tuple(nodes)
        own = [n for n in nodes if flow.is_placeable(n)]
        tensors = flow.owned(*nodes)
        device = plan.parts[key].device if key in plan.parts else None
        return PartReport(
            title,
            ", ".join(collapse([paths[n] for n in own], paths.values())),
            len(own),
            sum(costs.flops(n) for n in own),
            sum(t.numel() for t in tensors if isinstance(t, torch.nn.Parameter)),
            sum(map(tensor_bytes, tensors)),
            sum(costs.nbytes(n) for n in taken),
            sum(costs.nbytes(n) for n in given),
            share,
            str(device) if device else None,
            plan.parts[key].replicas if key in plan.parts else 1,
        )

    rows = [row(part_title(s.key), s.nodes, s.inputs, s.outputs, s.key, shares.get(s.key, 0.0)) for s in subgraphs]
    if any(flow.is_placeable(n) for n in parent):
        rows.append(row("parent", parent, (), (), PARENT, shares[PARENT]))
    inputs = [n for n in flow.index if n.op == "placeholder"]
    outputs = [a for n in flow.index if n.op == "output" for a in n.all_input_nodes]
    note = "; ".join(filter(None, (plan.note, getattr(costs, "note", ""), note_hidden_nodes(flow.root))))
    total = row("all", flow.index, inputs, outputs, PARENT, sum(shares.values()))
    sizes_known = all("val" in n.meta for n in flow.nodes)
    return Report(tuple(rows), total, note, sizes_known, plan.claim, unit_of(costs))


def _work(flow: Dataflow, plan: Plan, costs: Costs) -> dict[PartKey, float]:
    """Return part -> the seconds of one replica, with the forward that backward runs again."""
    own = {key: checked(in_part(costs, key)) for key in plan.parts}
    trains = includes_backward(as_given(costs))
    forward, backward = defaultdict[PartKey, float](float), defaultdict[PartKey, float](float)
    for node in flow.nodes:
        for key in plan[node]:
            prices = own.get(key, costs)
            early, late = forward_and_backward(prices, node) if trains else (prices.seconds(node), 0.0)
            forward[key], backward[key] = forward[key] + early, backward[key] + late
    again = rerun_seconds(plan, forward, backward)
    whole = {key: early + backward[key] + again[key] for key, early in forward.items()}
    return {key: seconds / (plan.parts[key].replicas if key in plan.parts else 1) for key, seconds in whole.items()}


def part_title(key: PartKey) -> str:
    """Return the name of a part for people."""
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


# Describes a set of nodes by as few module names as possible.


def collapse(here: Iterable[str], everywhere: Iterable[str]) -> list[str]:
    """Name the modules of a part.

    A module all of whose nodes are in the part stands for its children, and consecutive layers become a range. A
    numbered layer or a module without children that is only partly there carries the count::

        h.0.attn h.0.mlp h.1.attn h.1.mlp h.2.attn    ->    h.0-1, h.2 (1 of 2)

    Args:
        here: the module path of each node of the part; ``""`` is the model itself.
        everywhere: the module path of every node of the model.
    """
    counts = [Counter(module for path in paths for module in _outer_modules(path)) for paths in (here, everywhere)]
    return list(_joined(_covered((), *counts)))


def joined_layers(modules: Iterable[str]) -> list[str]:
    """Name modules in order, with a range for consecutive layers: ``h.0 h.1 h.2`` becomes ``h.0-2``."""
    return list(_joined((tuple(module.split(".")) if module else (), "") for module in modules))


def _outer_modules(path: str) -> Iterator[tuple[str, ...]]:
    """Yield the model itself, and each module on the way to a module."""
    return accumulate(path.split(".") if path else (), lambda outer, atom: (*outer, atom), initial=())


def _covered(
    module: tuple[str, ...], here: Counter[tuple[str, ...]], everywhere: Counter[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path, ``""`` if the module is here as a whole, else the count); both count the nodes at or below each."""
    if not here[module]:
        return
    if here[module] == everywhere[module]:
        yield module, ""
        return
    children = [other for other in everywhere if other and other[:-1] == module]
    if not children or (module and module[-1].isdigit()):
        yield module, f"{here[module]} of {everywhere[module]}"
        return
    for child in children:
        yield from _covered(child, here, everywhere)
    own, all_own = (count[module] - sum(count[child] for child in children) for count in (here, everywhere))
    if own:
        yield module, f"{own} of {all_own} own"


def _joined(covered: Iterable[tuple[tuple[str, ...], str]]) -> Iterator[str]:
    """Join whole consecutive layers: ``h.0 h.1 h.2`` becomes ``h.0-2``."""
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    # first and last are the ends of the range that is open; the extra entry at the end closes the last one
    for path, count in [*covered, ((), "end")]:
        is_beside = last and not count and path[:-1] == last[:-1] and path[-1].isdigit()
        if is_beside and int(path[-1]) == int(last[-1]) + 1:
            last = path
            continue
        if last:
            yield ".".join(first) if first == last else f"{'.'.join(first)}-{last[-1]}"
        first = last = ()
        if count and count != "end":
            yield f"{'.'.join(path) or '(top level)'} ({count})"
        elif not count and path and path[-1].isdigit():
            first = last = path
        elif not count:
            yield ".".join(path) or "(the whole model)"


# Makes the table of ranks that ``splitkit plan --devices`` prints.


_TITLES = (
    "rank",
    "device",
    "stages",
    "replicas",
    "busy",
    "load",
    "bubble",
    "in flight",
    "fixed",
    "saved",
    "temporary",
    "peak",
    "memory",
)
_SPARE = ("in flight", "temporary", "fixed", "saved", "stages", "bubble", "memory")


def rank_table(ranks: ScheduleRun | Sequence[RankRow], devices: Sequence[str] = (), memory: Memory = None) -> Table:
    """Return a table with one row per rank; leave out empty columns, and device or memory if all ranks have the same::

        from splitkit.view.console import show
        show(rank_table(splitkit.simulate_schedule(stages, "1f1b", 8), memory="80GiB"))

    Args:
        ranks: a simulated step of a pipeline, or rows.
        devices: the name of each rank's device, for a step.
        memory: the memory limit of all ranks (``"80GiB"``) or of each, for a step.

    Raises:
        PolicyError: SK302 if ``memory`` is not a size, or not one for each rank.
    """
    if isinstance(ranks, ScheduleRun):
        ranks = ranks.rows(devices, memory_of("rank_table", memory, ranks.ranks))
    rows = [rank.cells(number) for number, rank in enumerate(ranks)]
    same = [title for title in ("device", "memory") if len({row[title] for row in rows}) == 1]
    titles = [title for title in _TITLES if title not in same and any(row[title] for row in rows)]
    cells, numbers = ([row[title] for title in titles] for row in rows), [t for t in titles if t != "device"]
    return table(titles, cells, numbers, spare=_SPARE)
