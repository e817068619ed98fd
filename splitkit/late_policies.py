"""Gives packages what those above them have: the policy of a budget, and which schedules there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class LatePolicies:
    """What is imported when it is first needed.

    Attributes:
        budget: gives the class `splitkit.policies.Budget`. ``splitkit/__init__.py`` sets it, as packages know only
            those below them.
        is_schedule: whether splitkit has a schedule of this name; it is set likewise.
    """

    budget: ClassVar[Callable[[], Any]]
    is_schedule: ClassVar[Callable[[str], bool]]
