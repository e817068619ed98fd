"""Parts by module path: the split that people write by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from splitkit.checks import modules_near
from splitkit.costs import Costs
from splitkit.dataflow import Dataflow, module_path
from splitkit.errors import PolicyError
from splitkit.plan import PartKey, Plan


@dataclass(frozen=True)
class ByName:
    """Nodes go to the part of the first pattern that matches their module path or that of a module around it.

    ``ByName({"transformer.wte": 0, "transformer.h.[0-5]": 0, "transformer.h.*": 1, "lm_head": 1})``. A node that no
    pattern matches stays in the host.

    Attributes:
        parts: shell-style pattern (``*``, ``?``, ``[0-5]``) of a dotted module path -> part.
    """

    parts: Mapping[str, PartKey]

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Match every node; SK304 for a pattern that matches no module."""
        paths = {n: module_path(n) for n in flow.nodes}
        found = {path: self._match(path) for path in dict.fromkeys(paths.values())}
        self._refuse_idle(found)
        places = {n: self.parts[pattern] for n, path in paths.items() if (pattern := found[path]) is not None}
        return Plan.of(places, note=f"{len(set(self.parts.values()))} parts by module path")

    def _match(self, path: str) -> str | None:
        names = _with_parents(path)
        return next((p for p in self.parts if any(fnmatchcase(name, p) for name in names)), None)

    def _refuse_idle(self, found: Mapping[str, str | None]) -> None:
        known = dict.fromkeys(name for path in found for name in _with_parents(path))
        for pattern in self.parts:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise PolicyError(
                    "SK304",
                    f"the pattern {pattern!r} matches no module of the graph",
                    modules_near(pattern, [name for name in known if name]),
                    [pattern],
                )


def _with_parents(path: str) -> list[str]:
    """``a.b.c`` -> itself, ``a.b``, ``a``."""
    atoms = path.split(".")
    return [".".join(atoms[:i]) for i in range(len(atoms), 0, -1)]
