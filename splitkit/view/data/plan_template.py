"""The plan file that a page can save: all of it but the places, which the page fills in from its borders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan

_OF_THE_PLAN = ("nodes", "note", "claim", "places")


def plan_template(plan: Plan, keys: Iterable[PartKey]) -> dict[str, Any]:
    """Return the fields of a plan's file that stay when borders are moved.

    The parts are in the order in which they run, as the page numbers its stages. The names of nodes are not repeated
    (they are in the columns of ops), so the file is bound to a graph of equal names.

    Args:
        plan: the plan.
        keys: its parts in the order in which they run.
    """
    data = plan.to_dict()
    written = dict(zip(plan.parts, data["parts"], strict=True))
    kept = {name: value for name, value in data.items() if name not in _OF_THE_PLAN}
    return kept | {"parts": [written[key] for key in keys]}
