"""Checks of the parameters that policies share."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from splitkit.dataflow import Dataflow
from splitkit.errors import NoPlanError, PolicyError


def positive(policy: object, name: str, value: object) -> None:
    """Raise SK302 unless ``value`` is an int above zero."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PolicyError("SK302", f"{type(policy).__name__}({name}={value!r})", f"{name} must be a whole number >= 1.")


def seconds_above_zero(policy: object, seconds: object) -> None:
    """Raise SK302 unless ``seconds`` is a number above zero."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not seconds > 0:  # type: ignore[operator]
        raise PolicyError("SK302", f"{type(policy).__name__}(seconds={seconds!r})", "seconds must be a number above 0.")


def modules_near(name: str, known: Sequence[str]) -> str:
    """The remedy for the name of a module that is not there."""
    near = get_close_matches(name, known, n=3, cutoff=0.3) or known[:3]
    return f"Modules near it: {', '.join(near)}." if near else "The graph carries no module paths."


def enough_nodes(flow: Dataflow, parts: int) -> None:
    """Raise SK303 if the graph has fewer placeable nodes than ``parts``."""
    if len(flow.nodes) < parts:
        raise NoPlanError(
            "SK303",
            f"{parts} parts were asked for, but the graph has only {len(flow.nodes)} nodes to place",
            f"Ask for at most {len(flow.nodes)}." if flow.nodes else "Capture a model that computes something.",
        )
