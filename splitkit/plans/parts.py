"""What a plan says besides where nodes go: the names of parts, what is known of each, and what a policy claims."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from splitkit.checks import MOST, is_whole, shown
from splitkit.errors import PlanError

PartKey = Hashable
"""What names a part: ``0``, ``"backward"``, ``("cuda:0", 3)``."""

HOST: PartKey = None
"""The part that stays behind: the parent graph itself."""

CALLS = ("plain", "checkpoint")
"""How a part may be called."""

_EXACT = 1e-5  # a gap that is printed as none

NAMING = "Name parts with ints, strings, devices or tuples of these."
"""What to do about a key that cannot name a part."""


def flaw_of_key(key: object) -> str:
    """Why a key cannot name a part; empty if it can."""
    if isinstance(key, torch.Tensor):
        return "equal tensors are different keys (take key.item())"
    try:
        hash(key)
    except Exception:
        return f"a {type(key).__name__} cannot be a key"
    return next(filter(None, map(flaw_of_key, key)), "") if isinstance(key, tuple) else ""


@dataclass(frozen=True)
class Part:
    """What is known of a part besides its nodes.

    Attributes:
        key: its name.
        device: where it should run; the engine moves nothing, the runtime does.
        call: ``"plain"``, or ``"checkpoint"`` to keep only its inputs for backward and run it again there
            (`torch.utils.checkpoint`).
        replicas: on how many devices it should run, each with all of its parameters and an equal share of every
            microbatch (data parallel); the engine makes one part, the runtime its replicas.
    """

    key: PartKey
    device: torch.device | None = None
    call: Literal["plain", "checkpoint"] = "plain"
    replicas: int = 1

    def __post_init__(self) -> None:
        call: object = self.call
        device: object = self.device
        if self.key is HOST:
            raise PlanError("SK206", "None is the host, not a part", "Name the part.")
        if flaw := flaw_of_key(self.key):
            raise PlanError("SK206", f"{self.key!r} cannot name a part: {flaw}", NAMING)
        if not isinstance(call, str) or call not in CALLS:
            raise PlanError("SK206", f"part {self.key!r} has call={call!r}", "Use 'plain' or 'checkpoint'.")
        if device is not None and not isinstance(device, torch.device):
            raise PlanError(
                "SK206", f"part {self.key!r} has device={device!r}, no torch.device", "Use torch.device('cuda:0')."
            )
        if flaw := flaw_of_replicas(self.replicas):
            raise PlanError("SK206", f"part {self.key!r} has replicas={flaw}", "Use a whole number, 1 or more.")
        object.__setattr__(self, "replicas", int(self.replicas))


def flaw_of_replicas(given: object) -> str:
    """What is no number of replicas, as a text; empty for one that is."""
    return "" if is_whole(given, 1) and int(given) <= MOST else shown(given)


@dataclass(frozen=True)
class Claim:
    """What a plan says of its own quality.

    Attributes:
        objective: what is least: ``"bottleneck"`` (seconds of the most loaded part), ``"makespan"`` (seconds of one
            sample), ``"parts"`` (how many) or ``"traffic"`` (bytes).
        value: the objective of this plan.
        bound: no plan within the same limits is below it.
        solver: what found the plan, and what proved the bound if that was another.
        limiting: the part that decides.
        tolerance: relative; how far from the bound is good enough: what rounding may have cost the proof, or what was
            yielded for even parts.
        evenness: of the loads of the parts, from 0 to 1 (`evenness`); None where nothing was made even.
    """

    objective: str
    value: float
    bound: float
    solver: str
    limiting: PartKey
    tolerance: float = 1e-9
    evenness: float | None = None

    @property
    def gap(self) -> float:
        """How much lower a plan could be at most, as a fraction of the value."""
        return max(0.0, 1 - self.bound / self.value) if self.value else 0.0

    @property
    def optimal(self) -> bool:
        """Whether the plan is proven to be best, within the tolerance."""
        return self.gap <= self.tolerance

    def __str__(self) -> str:
        proof = f"with a gap of {self.gap:.2%} at most"
        if self.optimal:
            proof = "optimal" if self.gap < _EXACT else f"within {self.gap:.2%} of optimal"
        even = "" if self.evenness is None else f", evenness {self.evenness:.1%}"
        return f"{self.objective} {proof} ({self.solver}), limited by {self.limiting}{even}"


def evenness(loads: Sequence[float]) -> float:
    """How even loads are: 1 where all are alike, 1 / n where one of n has all.

    Jain's index, the squared sum over n times the sum of squares ("A quantitative measure of fairness", 1984).
    """
    top = max(loads, default=0.0)
    shares = [load / top for load in loads] if top else []
    return sum(shares) ** 2 / (len(shares) * sum(s * s for s in shares)) if shares else 1.0
