"""Gives the policies that packages below `splitkit.policies` make by themselves, such as that of a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class LatePolicies:
    """Policies that are imported when they are first needed.

    Attributes:
        budget: gives the class `splitkit.policies.Budget`. ``splitkit/__init__.py`` sets it, as packages know only
            those below them.
    """

    budget: ClassVar[Callable[[], Any]]
