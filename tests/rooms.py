"""The rooms of the house: which files import which, and the table of rooms (``python tests/rooms.py [folder]``)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FLOORS: tuple[tuple[str, ...], ...] = (
    ("top",),
    ("graph", "solvers"),
    ("plans", "costs", "memory"),
    ("training", "pipeline"),
    ("engine", "search"),
    ("policies", "frontends", "runtime"),
    ("view", "testing"),
    ("studies",),
    ("cli",),
)
"""Rooms by floor; a room imports lower floors only."""

FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

FORBIDDEN: dict[str, set[str]] = {
    "policies": {"engine", "frontends", "runtime"},
    "search": {"engine", "frontends", "runtime"},
    "engine": {"search", "policies", "solvers"},
    "runtime": {"search", "policies", "solvers"},
    "solvers": {"top"},
}
"""What a room must not import although it may lie lower: who decides does not carry out, solvers are pure."""

DOORS = {"__init__.py", "__main__.py", "extend.py", "cli/__main__.py"}
"""Files that open onto every room; none is imported but by guests."""

GUESTS = {("cli", "__init__.py"), ("policies", "extend.py")}
"""Who comes in by a door: the command line as users do, policies as their authors do elsewhere."""


class House:
    """The files of a package and what they import.

    Attributes:
        root: the folder of the package.
        files: its files, relative.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = sorted(str(path.relative_to(root)) for path in root.rglob("*.py"))
        self._of_module = {self._module(file): file for file in self.files}

    def _module(self, file: str) -> str:
        parts = Path(file).with_suffix("").parts
        return ".".join([self.root.name, *(parts[:-1] if parts[-1] == "__init__" else parts)])

    def tree(self, file: str) -> ast.Module:
        return ast.parse((self.root / file).read_text())

    def lines(self, file: str) -> int:
        return (self.root / file).read_text().count("\n")

    def imports(self, file: str) -> Iterator[tuple[str, int]]:
        """(file that is imported, line): also inside functions and under TYPE_CHECKING."""
        for node in ast.walk(self.tree(file)):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found = self._of_module.get(f"{node.module}.{alias.name}") or self._of_module.get(node.module)
                    if found is not None:
                        yield found, node.lineno
            elif isinstance(node, ast.Import):
                yield from ((self._of_module[a.name], node.lineno) for a in node.names if a.name in self._of_module)

    def cycles(self) -> list[list[str]]:
        """Files that import each other, directly or through others: one list a knot."""
        import networkx as nx

        outer = DOORS - {"extend.py"}  # by which policies come in
        inner = [file for file in self.files if file not in outer]
        arrows = [(f, g) for f in inner for g, _ in self.imports(f) if f != g and g not in outer]
        return [sorted(knot) for knot in nx.strongly_connected_components(nx.DiGraph(arrows)) if len(knot) > 1]


def room_of(file: str) -> str:
    parts = Path(file).parts
    return parts[0] if len(parts) > 1 else "top"


def table(house: House) -> list[str]:
    """One line a room: floor, files, lines, and the rooms that it imports with the number of imports."""
    rooms: dict[str, dict[str, int]] = {}
    for file in house.files:
        arrows = rooms.setdefault(room_of(file), {})
        for other, _ in house.imports(file) if file not in DOORS else ():
            if room_of(other) != room_of(file):
                arrows[room_of(other)] = arrows.get(room_of(other), 0) + 1
    rows = [f"{'floor':>5} {'room':<10} {'files':>5} {'lines':>6}  imports"]
    for room in sorted(rooms, key=lambda name: (FLOOR.get(name, -1), name)):
        mine = [file for file in house.files if room_of(file) == room]
        lines = sum(map(house.lines, mine))
        shown = ", ".join(f"{name} {count}" for name, count in sorted(rooms[room].items()))
        rows.append(f"{FLOOR.get(room, '-'):>5} {room:<10} {len(mine):>5} {lines:>6}  {shown}")
    arrows = sum(map(len, rooms.values()))
    lines = sum(map(house.lines, house.files))
    rows.append(f"{len(house.files)} files, {lines} lines, {arrows} arrows between rooms, {len(house.cycles())} cycles")
    return rows


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "splitkit"
    print("\n".join(table(House(Path(given)))))
