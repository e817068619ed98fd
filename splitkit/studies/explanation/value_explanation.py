"""Why one value of a training step is saved or recomputed, and what the other choice would cost."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from torch.fx import Node

from splitkit.errors import listed
from splitkit.graph.dataflow import module_path
from splitkit.plans.record import Plan
from splitkit.prices import Costs, unit_of
from splitkit.short_repr import brief
from splitkit.studies.explanation.recompute_explanation import MIB, choices_of
from splitkit.studies.explanation.recompute_rows import HELD, SAVED, RecomputeRow
from splitkit.studies.explanation.told import Section, Told
from splitkit.training.flow import BACKWARD, JointFlow
from splitkit.training.saved_values import op_of
from splitkit.units import duration, size


@dataclass(frozen=True)
class ValueExplanation(Told):
    """Why a node of a training step is saved, recomputed, or neither.

    Attributes:
        node: its name.
        op: what it computes.
        module: its module.
        halves: the halves that compute it.
        row: its row, not folded; ``None`` if nothing is decided about it.
        chain: the names of the ops that backward would have to run to have it, if it is saved.
        returned: whether forward returns it to the caller.
        readers: the names of the nodes of backward that read it.
        unit: the unit of the times.
    """

    node: str
    op: str
    module: str
    halves: tuple[str, ...]
    row: RecomputeRow | None
    chain: tuple[str, ...]
    returned: bool
    readers: tuple[str, ...]
    unit: str

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"kind": "value", **asdict(self), "row": None if self.row is None else self.row.to_dict()}

    def sections(self) -> list[Section]:
        """Return the paragraphs."""
        where = f" of {self.module}" if self.module else ""
        ran = " and in ".join(self.halves) or "neither half"
        head = f"{self.node} is {self.op}{where}, computed in {ran}."
        return [head, *self._decided(), *self._others()]

    def _decided(self) -> list[str]:
        row = self.row
        if row is None:
            return ["Backward reads nothing of it that forward makes, so nothing is saved or recomputed."]
        says = [
            f"Its {size(row.nbytes)} are saved for backward."
            if row.decision == SAVED
            else "Backward computes it again."
        ]
        if row.forced == HELD:
            return [f"Backward reads it, and {HELD}."]
        if row.forced:
            return [f"{says[0]} There is no choice: {row.forced}."]
        if row.seconds is None or row.saved_change is None:
            return says
        more = "more" if row.saved_change > 0 else "fewer"
        change = f"{size(abs(row.saved_change))} {more} are saved"
        peak = "" if row.peak_change is None else f", and the peak {_signed(row.peak_change)}"
        time = duration(row.seconds, self.unit)
        what = f"Recomputing it takes {time}" if row.decision == SAVED else f"Saving it would spare {time}"
        rate = "" if row.rate is None else f", which is {duration(row.rate * MIB, self.unit)} for each MiB"
        return [*says, f"{what}; then {change}{peak}{rate}."]

    def _others(self) -> list[str]:
        says = []
        if len(self.chain) > 1:
            says.append(f"For that, backward would run {listed(self.chain, 8)}.")
        if self.returned:
            says.append("Forward returns it to the caller, who holds it in any case.")
        if self.readers:
            says.append(f"Backward reads it in {listed(self.readers, 6)}.")
        return says


def _signed(nbytes: int) -> str:
    return f"{'rises' if nbytes > 0 else 'falls'} by {size(abs(nbytes))}" if nbytes else "stays as it is"


def explain_value(flow: JointFlow, plan: Plan, policy: object, costs: Costs, node: Node) -> ValueExplanation:
    """Explain why a node of a joint graph is saved or recomputed; the arguments are those of `explain_recompute`."""
    choices, costs = choices_of(flow, plan, policy, costs)
    places = choices.plan.places
    halves = tuple(str(key) for key in places.get(flow.producer(node), ()) if key is not None)
    members = [value for value in choices.saved if flow.producer(value) is node]
    asked = members[0] if members and node not in choices.saved else node
    decided = asked in choices.saved or flow.producer(asked) in choices.again
    row = choices.row([asked]) if decided else None
    saved = row is not None and row.decision == SAVED and not row.forced
    chain = choices.chain(asked)[0] if saved else []
    late = [user.name for user in node.users if BACKWARD in places.get(flow.producer(user), ())]
    return ValueExplanation(
        node.name,
        op_of(node) if node.op not in ("placeholder", "get_attr") else "an input",
        module_path(node),
        halves,
        row,
        tuple(choices.problem.ops[op].name for op in chain),
        node in choices.returned,
        tuple(late),
        unit_of(costs),
    )
