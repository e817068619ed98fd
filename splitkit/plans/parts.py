"""Parts of a plan (their keys, devices and ways to be called) and the claim that a policy makes about its plan."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch

from splitkit.checks import MOST, is_whole, shown
from splitkit.errors import PlanError

PartKey = Hashable
"""The key of a part: ``0``, ``"backward"``, ``("cuda:0", 3)``."""

PARENT: PartKey = None
"""The place of nodes that no part computes: the graph that calls the parts."""

CALLS = ("plain", "checkpoint")
"""The ways in which the parent may call a part."""

_MAXIMISED = frozenset(("tokens",))
_EXACT = 1e-5  # smaller gaps are rounding
_BETTER: Mapping[str, tuple[str, str]] = {
    "bottleneck": ("Slowest", "is {} faster"),
    "makespan": ("Busiest", "is {} faster"),
    "step": ("Busiest", "is {} faster"),
    "tokens": ("Tightest", "has room for {} more tokens"),
    "parts": ("Fullest", "has {} fewer parts"),
    "traffic": ("Fullest", "sends {} fewer bytes"),
    "waiting": ("Largest", "leaves {} fewer bytes waiting"),
}
"""Objective -> what the limiting part is, and what no plan does: ``{}`` is how much, or empty."""

NAMING = "Name parts with ints, strings, devices or tuples of these."
"""The remedy for a key that cannot name a part."""


def flaw_of_key(key: object) -> str:
    """Return why a key cannot name a part; an empty string if it can."""
    if isinstance(key, torch.Tensor):
        return "equal tensors are different keys (take key.item())"
    try:
        hash(key)
    except Exception:
        return f"a {type(key).__name__} cannot be a key"
    return next(filter(None, map(flaw_of_key, key)), "") if isinstance(key, tuple) else ""


@dataclass(frozen=True)
class Part:
    """The properties of a part other than its nodes.

    Attributes:
        key: its name.
        device: where it should run. The engine moves nothing; the runtime does.
        call: ``"plain"``; or ``"checkpoint"``, which saves only the part's inputs and runs it again in backward
            (`torch.utils.checkpoint`).
        replicas: the number of devices that run it, each with all of its parameters and an equal share of every
            microbatch (data parallel). The engine makes one part; the runtime replicates it.
        planned_on: the key of the device that the part was planned for, where the policy was given devices
            (``devices`` of the plan's request); it stays when the part gets another key.
    """

    key: PartKey
    device: torch.device | None = None
    call: Literal["plain", "checkpoint"] = "plain"
    replicas: int = 1
    planned_on: PartKey = None

    def __post_init__(self) -> None:
        call: object = self.call
        device: object = self.device
        if self.key is PARENT:
            raise PlanError("SK206", "None stands for the parent, which is not a part", "Name the part.")
        if flaw := flaw_of_key(self.key):
            raise PlanError("SK206", f"{self.key!r} cannot name a part: {flaw}", NAMING)
        if not isinstance(call, str) or call not in CALLS:
            raise PlanError("SK206", f"part {self.key!r} has call={call!r}", "Use 'plain' or 'checkpoint'.")
        if device is not None and not isinstance(device, torch.device):
            raise PlanError(
                "SK206",
                f"part {self.key!r} has device={device!r}, which is not a torch.device",
                "Use torch.device('cuda:0').",
            )
        if flaw := flaw_of_replicas(self.replicas):
            raise PlanError("SK206", f"part {self.key!r} has replicas={flaw}", "Use a whole number, 1 or more.")
        object.__setattr__(self, "replicas", int(self.replicas))


def flaw_of_replicas(given: object) -> str:
    """Return the text of an invalid number of replicas; an empty string if it is valid."""
    return "" if is_whole(given, 1) and int(given) <= MOST else shown(given)


@dataclass(frozen=True)
class Claim:
    """What a policy asserts about the quality of its plan.

    Attributes:
        objective: the minimised quantity: ``"bottleneck"`` (seconds of the most loaded part), ``"makespan"`` (seconds
            of one sample), ``"parts"`` (how many), ``"traffic"`` (bytes) or ``"waiting"`` (bytes between the input part
            and the weight part, with seconds at a price); or the maximised ``"tokens"`` (of cache).
        value: the objective of this plan.
        bound: a lower bound on the objective of every plan within the same limits; for tokens an upper bound.
        solver: the method that found the plan, and the one that proved the bound if it is a different one.
        limiting: the part that determines the value, such as the most loaded one.
        tolerance: the relative distance from the bound that counts as optimal: rounding errors of the proof, or what
            the policy gave up to balance the parts.
        evenness: Jain's index of the parts' loads, from 0 to 1 (`evenness`); None if the policy did not balance them.
    """

    objective: str
    value: float
    bound: float
    solver: str
    limiting: PartKey
    tolerance: float = 1e-9  # rounding of double-precision sums over some 10^6 nodes
    evenness: float | None = None

    @property
    def gap(self) -> float:
        """An upper bound on how much lower the objective could be, as a fraction of the value.

        For tokens, how much higher it could be, as a fraction of the bound.
        """
        low, high = self.range
        return max(0.0, 1 - low / high) if high else 0.0

    @property
    def range(self) -> tuple[float, float]:
        """The bound and the value, the lower one first: for tokens, which are maximised, that is the value."""
        return (self.value, self.bound) if self.objective in _MAXIMISED else (self.bound, self.value)

    @property
    def optimal(self) -> bool:
        """Whether the plan is proven optimal within the tolerance."""
        return self.gap <= self.tolerance

    @property
    def proof(self) -> str:
        """How much better a plan could be, as a sentence without its full stop."""
        low, high = self.range
        if high > 0 >= low:
            return "How much better a plan could be is not known"
        more = high / low - 1 if self.objective in _MAXIMISED and low else self.gap
        some = "" if self.gap < _EXACT else f"more than {ceil(1000 * more - 1e-6) / 10:g} %"
        does = _BETTER.get(self.objective, ("", f"has {{}} less {self.objective}"))[1]
        return " ".join(f"No plan {does.format(some)}".split())

    def told(self, *about: str) -> str:
        """Return sentences for notes, without the last full stop: the limiting part with what is known of it, and
        `proof`.
        """
        key = self.limiting
        kind = "stage" if self.objective in ("bottleneck", "step", "tokens") else "part"
        part = f"{kind} {key}" if isinstance(key, int) else " ".join(map(str, key if isinstance(key, tuple) else [key]))
        limit = ", ".join((f"{_BETTER.get(self.objective, ('Limit', ''))[0]}: {part}", *about))
        return f"{limit}. {self.proof}"

    def __str__(self) -> str:
        return self.told()


def above_mean(load: float, mean: float) -> str:
    """Return ``7 % above the mean``."""
    return f"{100 * (load / mean - 1) if mean else 0.0:.0f} % above the mean"


def evenness(loads: Sequence[float]) -> float:
    """Return how even loads are: 1 if all are equal, 1 / n if one of n carries everything.

    This is Jain's index, the squared sum over n times the sum of squares ("A quantitative measure of fairness", 1984).
    """
    top = max(loads, default=0.0)
    shares = [load / top for load in loads] if top else []
    return sum(shares) ** 2 / (len(shares) * sum(s * s for s in shares)) if shares else 1.0
