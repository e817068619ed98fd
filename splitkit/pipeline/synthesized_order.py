"""Holds an order of actions made for given stages, with its simulated step and a lower bound on all orders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from splitkit.files import PathLike
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.order_file import save_order
from splitkit.pipeline.run import ScheduleRun
from splitkit.plans.parts import Claim
from splitkit.short_repr import brief
from splitkit.units import duration, size

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
        return tuple((ends - self._starts).tolist())

    @property
    def _starts(self) -> np.ndarray[Any, Any]:
        starts = np.full(self.run.ranks, np.inf)
        np.minimum.at(starts, self.order.columns.rank, self.run.starts)
        return starts if self.objective == "span" else np.zeros(self.run.ranks)

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
