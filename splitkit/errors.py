"""The errors that splitkit raises on purpose: one family, each with a stable code, a reason and a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


class SplitError(ValueError):
    """The base class of splitkit's errors.

    ``str(error)`` is ``"SK203: reason"`` followed by the remedy on its own line. The code is stable across releases
    and listed in ``docs/errors.md``.

    Attributes:
        code: ``"SK"`` and three digits.
        reason: what is wrong, naming the node or field.
        remedy: what would work.
        nodes: the names of the nodes concerned.
    """

    def __init__(self, code: str, reason: str, remedy: str = "", nodes: Iterable[object] = ()) -> None:
        self.code = code
        self.reason = reason
        self.remedy = remedy
        self.nodes = tuple(str(n) for n in nodes)
        super().__init__(f"{code}: {reason}" + (f"\n  {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, self.reason, self.remedy, self.nodes)


class GraphError(SplitError):
    """The graph itself cannot be analysed (SK1xx)."""


class PlanError(SplitError):
    """The plan violates a dependence, a side effect or a rule of the graph (SK2xx)."""


class CycleError(PlanError):
    """Parts depend on each other in a cycle (SK203, SK311)."""


class PolicyError(SplitError):
    """The parameters of a policy are invalid for this graph (SK3xx)."""


class NoPlanError(PolicyError):
    """The policy is valid, but no plan meets its demands (SK303).

    Attributes:
        nearest: the plan that misses the demands by the least, if the search has one; it is not pickled.
        excess: the bytes by which that plan exceeds the budget.
    """

    nearest: object = None
    excess: int = 0


class CostError(SplitError):
    """The description of devices, links or costs is invalid (SK32x)."""


class ScheduleError(SplitError):
    """A pipeline schedule cannot be simulated (SK33x)."""


class CaptureError(SplitError):
    """A model could not be turned into a graph (SK4xx).

    Attributes:
        reached: the graph up to the point where the capture stopped, if it had begun: a graph module, for inspection
            only. It is not pickled.
        stopped_at: the line of Python where it stopped: ``model.py:12: if x.sum() > 0:``; empty if not known.
    """

    reached: Any = None
    stopped_at: str = ""


class FileError(SplitError):
    """A plan or report file cannot be used (SK5xx)."""


class PlanWarning(UserWarning):
    """A plan can be used, but its claim does not hold (SK509).

    Attributes:
        code: as in `SplitError`.
        reason: what differs, naming a node.
    """

    def __init__(self, code: str, reason: str) -> None:
        self.code, self.reason = code, reason
        super().__init__(f"{code}: {reason}")


class UsageError(SplitError):
    """The command line was used wrongly (SK60x)."""


class CheckError(SplitError, AssertionError):
    """A split computes different results than the whole (SK70x)."""


class PipelineError(SplitError, RuntimeError):
    """A split cannot run on several ranks, or one of them failed (SK8xx)."""


class ViewError(SplitError):
    """Something cannot be drawn (SK9xx)."""


def message_line(error: BaseException) -> str:
    """Return the first line of an exception's message; the name of its type if that is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def near(name: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the names in ``known`` that are spelled nearly like ``name``, ignoring case, the nearest first."""
    spelled = {other.lower(): other for other in known}
    return [spelled[found] for found in get_close_matches(name.lower(), spelled, most, cutoff)]


def nearest(name: str, known: Iterable[str], then: str = "", most: int = 1, cutoff: float = 0.6) -> str:
    """Return ``Did you mean gpt2?`` followed by ``then``, or only ``then`` if no name is near."""
    found = near(name, known, most, cutoff)
    return f"Did you mean {', '.join(found)}? {then}".rstrip() if found else then


def listed(names: Sequence[object], most: int) -> str:
    """Join names as ``a, b, c and 4 more``, with at most ``most`` of them written out."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"
