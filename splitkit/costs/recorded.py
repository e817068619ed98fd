"""Turn costs into a record that a plan and its file keep, and a record into costs of a graph again.

What a formula prices is recorded by its parameters, and priced again; all other prices are kept as a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import fx
from torch.fx import Node

from splitkit.costs import Costs, Device, Fused, Roofline, Unit, default, flops, fused, roofline, training, unit
from splitkit.costs.flop_formulas import CountedCosts, Flops, counter_of
from splitkit.costs.training import FromOps
from splitkit.errors import CostError, FileError, SplitError
from splitkit.graph.dataflow import Dataflow, root_of
from splitkit.hardware.link_specs import Link
from splitkit.price_record import Kind, LazyPrices, PriceRecord, printable
from splitkit.prices import Checked, as_given, checked, includes_backward, price_name, unit_of
from splitkit.short_repr import brief

_KINDS: dict[type, Kind] = {Flops: "flops", Unit: "unit", Roofline: "roofline", Fused: "fused"}
_WITHOUT_PRICE = ("placeholder", "get_attr", "output")


def record_of(costs: Costs, graph: fx.GraphModule | Dataflow) -> PriceRecord:
    """Return the record of costs of a graph.

    A table is filled when it is first read, so a plan that nobody saves asks for no price.
    """
    root, given = root_of(graph), as_given(costs)
    adds_backward = isinstance(given, FromOps) and given.gm is root
    base = as_given(given.costs) if adds_backward else given
    kind = _KINDS.get(type(base), "table") if getattr(base, "gm", None) is root else "table"
    asked = checked(base)
    has_table, has_ratios = kind == "table", kind == "table" and includes_backward(base)
    return PriceRecord(
        name=printable(f"{price_name(base)}, backward {given.source}" if adds_backward else price_name(base)),
        kind=kind,
        unit=printable(unit_of(base), 40),
        device=asdict(base.device) if kind in ("roofline", "fused") else None,
        tf32=kind in ("roofline", "fused") and bool(base.tf32),
        mesh={k: asdict(v) for k, v in base.mesh.items()} or None if kind in ("roofline", "fused") else None,
        training=adds_backward,
        table=LazyPrices(lambda: _prices(root, asked.seconds)) if has_table else None,
        backward=LazyPrices(lambda: _prices(root, Checked(base).backward_ratio)) if has_ratios else None,
        live=(root, costs),
    )


def _prices(root: fx.GraphModule, price: Callable[[Node], float]) -> dict[str, float]:
    """Return name -> price of the nodes that have one; inputs and attributes cost nothing, if no price says so."""
    found = {}
    for node in root.graph.nodes:
        try:
            seconds = price(node)
        except SplitError:  # a node that no policy may ask for, such as one of a later edit
            continue
        if seconds or node.op not in _WITHOUT_PRICE:
            found[node.name] = seconds
    return found


def costs_of(record: PriceRecord | None, graph: fx.GraphModule | Dataflow) -> Costs:
    """Return costs of a graph by the record of a plan for it, and the default costs if there is no record.

    They price every node as the recorded ones did. Bytes and FLOPs are those of the graph.

    Raises:
        FileError: SK501 if the record of a file describes no device or link.
    """
    if record is None:
        return default(graph)
    root = root_of(graph)
    if record.live is not None and record.live[0] is root:
        costs: Costs = record.live[1]
        return costs
    made = _base(record, graph)
    return training(made, graph) if record.training else made


def _base(record: PriceRecord, graph: fx.GraphModule | Dataflow) -> Costs:
    if record.kind == "flops":
        return flops(graph)
    if record.kind == "unit":
        return unit(graph)
    if record.kind != "table":
        try:
            field = "device"
            device = Device(**(record.device or {}))
            field = "mesh"
            mesh = {name: Link(**link) for name, link in (record.mesh or {}).items()}
        except (CostError, TypeError) as error:
            raise FileError("SK501", f"the plan is damaged: prices.{field}: {error}", "Plan again.") from error
        return (roofline if record.kind == "roofline" else fused)(graph, device, tf32=record.tf32, mesh=mesh)
    table = PriceTable if record.backward is None else PriceTableWithBackward
    return table(root_of(graph), record, counter=counter_of(graph))


@dataclass(frozen=True)
class PriceTable(CountedCosts):
    """The prices of a table that a plan recorded.

    Attributes:
        gm: the graph.
        record: the record with the table.
        counter: the counter of FLOPs.
    """

    gm: fx.GraphModule
    record: PriceRecord
    counter: Flops = field(kw_only=True, repr=False, compare=False)

    __repr__ = brief

    @property
    def note(self) -> str:
        """What the prices are, for reports."""
        return self.record.name

    @property
    def unit(self) -> str:
        """The unit of the prices."""
        return self.record.unit

    def seconds(self, node: Node) -> float:
        """Return the recorded price; 0 for inputs and attributes.

        Raises:
            CostError: SK325 for a node without a recorded price.
        """
        return self._row(self.record.table or {}, node)

    def _row(self, table: Any, node: Node) -> float:
        found: float | None = table.get(node.name)
        if found is not None:
            return found
        if node.op in _WITHOUT_PRICE:
            return 0.0
        raise CostError(
            "SK325", f"the plan has no price of {node.name}", "Give costs of this graph, or plan again.", [node]
        )


@dataclass(frozen=True)
class PriceTableWithBackward(PriceTable):
    """A `PriceTable` whose prices include backward."""

    def backward(self, node: Node) -> float:
        """Return the recorded backward of a node as a multiple of its forward; SK325 as for `seconds`."""
        return self._row(self.record.backward or {}, node)
