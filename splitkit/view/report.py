"""What a plan amounts to: one row a part, as data and as a table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.brief import brief
from splitkit.costs import Costs, default
from splitkit.engine.complete import complete
from splitkit.engine.cut import Subgraph, cut
from splitkit.engine.split import Split
from splitkit.frontends.unfold_regions import hidden_note
from splitkit.graph.dataflow import Dataflow, facts_of, module_path
from splitkit.graph.sizes import tensor_bytes
from splitkit.plans.parts import HOST, Claim, PartKey
from splitkit.plans.record import Plan, plan_of
from splitkit.prices import checked, require_costs
from splitkit.shown import Shown
from splitkit.units import quantity, size
from splitkit.view.paths import collapse
from splitkit.view.tables import table

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class PartReport:
    """One part.

    Attributes:
        part: its name.
        modules: which modules it computes, collapsed to ranges.
        ops: how many nodes it computes, copies included; members of tuples are not counted.
        flops: floating-point operations of these.
        parameters: numbers in the parameters that it reads, each once.
        parameter_bytes: bytes of these and of the buffers it reads.
        bytes_in: bytes of the values that it takes, parameters not included.
        bytes_out: bytes of the values that it gives.
        share: its part of the total time under the given costs.
        device: where it should run, if the plan says so.
        replicas: on how many devices.
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
    """All parts, in the order of execution, the host last if it computes something.

    Attributes:
        parts: the rows.
        total: the row of the whole model; its bytes are those of the model's inputs and outputs.
        note: what the plan says of itself, what the prices say, and how many nodes export has hidden from it.
        sizes_known: whether the graph carries the ``meta["val"]`` that bytes and FLOPs come from.
        claim: objective, value, proven bound, solver and limiting part, where a policy that optimises made the plan.
    """

    parts: tuple[PartReport, ...]
    total: PartReport
    note: str
    sizes_known: bool
    claim: Claim | None = None

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready data."""
        data = asdict(self)
        if self.claim is not None:
            data["claim"] |= {
                "gap": self.claim.gap,
                "optimal": self.claim.optimal,
                "limiting": _title(self.claim.limiting),
            }
        return data

    def table(self) -> Table:
        """A rich table that never truncates a name."""
        return _table(self)

    def __str__(self) -> str:
        from splitkit.view.console import to_text

        return to_text(self.table())


def report(gm: fx.GraphModule | Split, plan: Plan | None = None, costs: Costs | None = None) -> Report:
    """Describe what each part of a plan computes, holds, takes and gives.

    Args:
        gm: the graph that the plan is for, or a split.
        plan: the plan; that of the split by default.
        costs: prices; FLOPs by default, or one unit a node where the graph has no ``meta["val"]``.

    Raises:
        PlanError: when the plan's parts cannot be ordered.
    """
    flow = facts_of(gm)
    costs = checked(default(flow) if costs is None else require_costs(costs))
    plan = plan_of(gm if plan is None else plan)
    whole = complete(flow, plan)
    subgraphs = [unit for unit in cut(flow, whole) if isinstance(unit, Subgraph)]
    host = tuple(n for n, keys in whole.items() if HOST in keys)
    paths = {n: module_path(n) for n in flow.nodes}
    seconds = {n: costs.seconds(n) for n in flow.nodes}
    work = sum(seconds[n] * len(whole[n]) for n in flow.nodes)

    def row(
        title: str, nodes: Iterable[Node], taken: Iterable[Node], given: Iterable[Node], key: PartKey
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
            sum(seconds[n] for n in own) / work if work else 0.0,
            str(device) if device else None,
            plan.parts[key].replicas if key in plan.parts else 1,
        )

    rows = [row(_title(s.key), s.nodes, s.inputs, s.outputs, s.key) for s in subgraphs]
    if any(flow.is_placeable(n) for n in host):
        rows.append(row("host", host, (), (), HOST))
    inputs = [n for n in flow.index if n.op == "placeholder"]
    outputs = [a for n in flow.index if n.op == "output" for a in n.all_input_nodes]
    note = "; ".join(filter(None, (plan.note, getattr(costs, "note", ""), hidden_note(flow.root))))
    return Report(tuple(rows), row("all", flow.index, inputs, outputs, HOST), note, _sizes_known(flow), plan.claim)


def _title(key: PartKey) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _sizes_known(flow: Dataflow) -> bool:
    return all("val" in n.meta for n in flow.nodes)


def _table(report: Report) -> Table:
    numbers = ("ops", "FLOPs", "parameters", "bytes in", "bytes out", "share")
    has_devices = any(row.device for row in report.parts)
    has_replicas = any(row.replicas > 1 for row in report.parts)
    where = [*(["device"] if has_devices else []), *(["replicas"] if has_replicas else [])]
    titles = ("part", *where, "modules", *numbers)

    def cells(row: PartReport) -> list[str]:
        return [
            row.part,
            *([row.device or ""] if has_devices else []),
            *([f"x{row.replicas}" if row.replicas > 1 else ""] if has_replicas else []),
            row.modules,
            str(row.ops),
            quantity(row.flops) if report.sizes_known else "-",
            quantity(row.parameters),
            size(row.bytes_in) if report.sizes_known else "-",
            size(row.bytes_out) if report.sizes_known else "-",
            f"{row.share:.1%}",
        ]

    rows = map(cells, report.parts)
    spare = ("parameters", "bytes in", "FLOPs", "ops", "bytes out")
    return table(titles, rows, numbers, report.note, least={"modules": 24}, total=cells(report.total), spare=spare)
