"""What is in one part: modules, time, what goes in and out, what fills its memory, and which borders could move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from splitkit.engine.complete import complete_plan
from splitkit.engine.subgraphs import Subgraph, extract_subgraphs
from splitkit.graph.dataflow import Dataflow, module_path
from splitkit.pipeline.byte_breakdown import ByteBreakdown
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.record import Plan
from splitkit.prices import Costs
from splitkit.search.plan_figures import StageFigures, StagePricing
from splitkit.short_repr import brief
from splitkit.studies.explanation.move_text import move_text
from splitkit.studies.explanation.paired_parts import name_of_part
from splitkit.studies.explanation.stage_moves import StageMove, StageMoves
from splitkit.studies.explanation.told import Section, Told
from splitkit.units import duration, size
from splitkit.view.console.tables import table
from splitkit.view.data.report import PartReport, part_title, report

_SHOWN = 6


@dataclass(frozen=True)
class CrossingValue:
    """A value that a part receives or gives.

    Attributes:
        way: ``"in"`` or ``"out"``.
        node: the name of the node that makes it.
        module: the module of that node.
        parts: the part that it comes from, or the parts that read it; ``"parent"`` for inputs and outputs of the graph.
        nbytes: its bytes.
    """

    way: str
    node: str
    module: str
    parts: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class PartExplanation(Told):
    """One part of a plan.

    Attributes:
        row: what `splitkit.report` says of it.
        seconds: its load, with transfers; ``None`` where several parts share a device.
        work: the part of the load that is computation.
        slowest: the load of the slowest stage.
        held: the bytes that its device holds at the peak; ``None`` where that is not known part by part.
        limit: the memory limit of its device.
        values: what it receives and gives, the largest first.
        moves: for each of its borders and each direction, the best move that was found.
        unit: the unit of the times.
    """

    row: PartReport
    seconds: float | None
    work: float | None
    slowest: float
    held: ByteBreakdown | None
    limit: int | None
    values: tuple[CrossingValue, ...]
    moves: tuple[StageMove, ...]
    unit: str

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; times are in ``unit``, sizes in bytes."""
        return {
            "kind": "part",
            **asdict(self.row),
            "seconds": self.seconds,
            "work": self.work,
            "slowest": self.slowest,
            "memory": None if self.held is None else self.held.to_dict(),
            "limit": self.limit,
            "values": [asdict(value) for value in self.values],
            "moves": [move.to_dict() for move in self.moves],
            "unit": self.unit,
        }

    def sections(self) -> list[Section]:
        """Return the paragraphs and the table of values."""
        row = self.row
        where = f" on {row.device}" if row.device else ""
        head = f"Part {row.part}{where} has {row.ops} ops: {row.modules or 'nothing'}."
        return [*filter(None, (head, self._time(), self._memory(), self._borders())), self._table(), *self._moves()]

    def _time(self) -> str:
        share = f"{self.row.share:.0%} of all work"
        if self.seconds is None or self.work is None:
            return f"It takes {share}."
        sent = self.seconds - self.work
        transfers = f", of which {duration(sent, self.unit)} are transfers" if sent > 0 else ""
        slow = f"{self.seconds / self.slowest:.0%} of the slowest stage" if self.slowest else "no time"
        slow = "it is the slowest stage" if self.seconds == self.slowest else slow
        return f"Its time is {duration(self.seconds, self.unit)}{transfers}: {slow}, {share}."

    def _memory(self) -> str:
        if self.held is None:
            return ""
        of = "" if self.limit is None else f" of {size(self.limit)}"
        return f"At its peak it holds {size(self.held.total)}{of}: {self.held}."

    def _borders(self) -> str:
        return f"{size(self.row.bytes_in)} come in and {size(self.row.bytes_out)} go out, without parameters."

    def _table(self) -> Section:
        rows = [(v.way, v.node, v.module, ", ".join(v.parts), size(v.nbytes)) for v in self.values[:_SHOWN]]
        more = len(self.values) - len(rows)
        title = "values that come in and go out, largest first" + (f" ({more} more)" if more else "")
        return table(("", "value", "module", "from or to", "bytes"), rows, ("bytes",), title)

    def _moves(self) -> list[str]:
        if not self.moves:
            return []
        return ["Its borders could move:", *(f"- {move_text(move, self.unit)}" for move in self.moves)]


def explain_part(
    pricing: StagePricing, moves: StageMoves | None, plan: Plan, figures: StageFigures, title: str, costs: Costs
) -> PartExplanation | None:
    """Explain the part of that name; ``None`` if there is none.

    Args:
        pricing: the prices by which the plan was made.
        moves: the moves of the plan; ``None`` where they are not priced.
        plan: the plan.
        figures: its figures.
        title: the name of the part, as reports have it.
        costs: the prices of the report.
    """
    row = next((row for row in report(pricing.flow.root, plan, costs).parts if row.part == title), None)
    if row is None:
        return None
    key = next((key for key in plan.parts if part_title(key) == title), PARENT)
    devices = list(figures.loads)
    alone = key in figures.loads and len(figures.held) in (0, len(devices))
    place = devices.index(key) if key in figures.loads else 0
    limits = pricing.limits(len(figures.held))
    return PartExplanation(
        row,
        figures.loads.get(key),
        figures.work.get(key),
        figures.value,
        figures.held[place] if alone and figures.held else None,
        limits[place] if alone and figures.held else None,
        tuple(sorted(_values(pricing.flow, plan, key, costs), key=lambda value: -value.nbytes)),
        () if moves is None else tuple(_best(moves.found, key)),
        pricing.unit,
    )


def _values(flow: Dataflow, plan: Plan, key: PartKey, costs: Costs) -> Iterable[CrossingValue]:
    whole = complete_plan(flow, plan)
    own = next((s for s in extract_subgraphs(flow, whole) if isinstance(s, Subgraph) and s.key == key), None)
    if own is None:
        return
    for node in own.inputs:
        home = flow.producer(node)
        source = whole.source(home, key)
        yield CrossingValue("in", node.name, module_path(node), (name_of_part(source),), costs.nbytes(node))
    for node in own.outputs:
        readers = {other for user in node.users for other in whole.places.get(user, (PARENT,))} - {key}
        yield CrossingValue("out", node.name, module_path(node), tuple(_names(readers, plan)), costs.nbytes(node))


def _names(keys: Iterable[PartKey], plan: Plan) -> list[str]:
    found = set(keys)
    return [*(part_title(key) for key in plan.parts if key in found), *(["parent"] if PARENT in found else [])]


def _best(moves: Iterable[StageMove], key: PartKey) -> list[StageMove]:
    """Return the best move over each border of a part, in each direction."""
    found: dict[tuple[PartKey, PartKey], StageMove] = {}
    for move in moves:
        if key in (move.source, move.target):
            found.setdefault((move.source, move.target), move)
    return list(found.values())
