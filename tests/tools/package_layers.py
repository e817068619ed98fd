"""The packages of splitkit and their layers: the import rules, and a table of packages with their imports.

``python tests/tools/package_layers.py [folder]`` prints the table.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

LAYERS: tuple[tuple[str, ...], ...] = (
    ("top",),
    ("graph", "solvers", "hardware"),
    ("plans", "costs", "memory"),
    ("training", "pipeline"),
    ("engine", "search"),
    ("policies", "frontends", "runtime"),
    ("view", "testing", "exports"),
    ("studies",),
    ("cli",),
)
"""Packages by layer; a package imports packages of lower layers only."""

LAYER = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}

FORBIDDEN: dict[str, set[str]] = {
    "policies": {"engine", "frontends", "runtime"},
    "search": {"engine", "frontends", "runtime"},
    "engine": {"search", "policies", "solvers"},
    "runtime": {"search", "policies", "solvers"},
    "solvers": {"top"},
}
"""Packages that a package must not import although they are lower: policies carry nothing out, solvers are pure."""

PUBLIC_FILES = {"__init__.py", "__main__.py", "extend.py"}
"""Files that import from every package; only `READERS_OF_PUBLIC_FILES` import them."""

READERS_OF_PUBLIC_FILES = {("cli", "__init__.py"), ("policies", "extend.py")}
"""Packages that import a public file: the command line, as users do, and policies, as authors of policies do."""


class SourceTree:
    """The files of a package and what they import.

    Attributes:
        root: the folder of the package.
        files: its files, relative.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = sorted(str(path.relative_to(root)) for path in root.rglob("*.py"))
        self._of_module = {self._module(file): file for file in self.files}
        self._trees: dict[str, tuple[ast.Module, list[ast.AST]]] = {}

    def _module(self, file: str) -> str:
        parts = Path(file).with_suffix("").parts
        return ".".join([self.root.name, *(parts[:-1] if parts[-1] == "__init__" else parts)])

    def tree(self, file: str) -> ast.Module:
        return self._parsed(file)[0]

    def nodes(self, file: str) -> list[ast.AST]:
        """Return all nodes of the tree of a file."""
        return self._parsed(file)[1]

    def _parsed(self, file: str) -> tuple[ast.Module, list[ast.AST]]:
        if file not in self._trees:
            tree = ast.parse((self.root / file).read_text())
            self._trees[file] = tree, [*ast.walk(tree)]
        return self._trees[file]

    def forget(self) -> None:
        """Free the trees, which hold some hundred MB."""
        self._trees.clear()

    def lines(self, file: str) -> int:
        return (self.root / file).read_text().count("\n")

    def imports(self, file: str) -> Iterator[tuple[str, int]]:
        """Yield (imported file, line), also inside functions and under TYPE_CHECKING."""
        for node in self.nodes(file):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    found = self._of_module.get(f"{node.module}.{alias.name}") or self._of_module.get(node.module)
                    if found is not None:
                        yield found, node.lineno
            elif isinstance(node, ast.Import):
                yield from ((self._of_module[a.name], node.lineno) for a in node.names if a.name in self._of_module)

    def cycles(self) -> list[list[str]]:
        """Return the groups of files that import each other, directly or through others."""
        import networkx as nx

        outer = PUBLIC_FILES - {"extend.py"}  # which policies import
        inner = [file for file in self.files if file not in outer]
        arrows = [(f, g) for f in inner for g, _ in self.imports(f) if f != g and g not in outer]
        return [sorted(cycle) for cycle in nx.strongly_connected_components(nx.DiGraph(arrows)) if len(cycle) > 1]


def package_of(file: str) -> str:
    parts = Path(file).parts
    return parts[0] if len(parts) > 1 else "top"


def table(sources: SourceTree) -> list[str]:
    """Return one line per package: layer, files, lines, and the packages that it imports with the number of imports."""
    packages: dict[str, dict[str, int]] = {}
    for file in sources.files:
        arrows = packages.setdefault(package_of(file), {})
        for other, _ in sources.imports(file) if file not in PUBLIC_FILES else ():
            if package_of(other) != package_of(file):
                arrows[package_of(other)] = arrows.get(package_of(other), 0) + 1
    rows = [f"{'layer':>5} {'package':<10} {'files':>5} {'lines':>6}  imports"]
    for package in sorted(packages, key=lambda name: (LAYER.get(name, -1), name)):
        mine = [file for file in sources.files if package_of(file) == package]
        lines = sum(map(sources.lines, mine))
        shown = ", ".join(f"{name} {count}" for name, count in sorted(packages[package].items()))
        rows.append(f"{LAYER.get(package, '-'):>5} {package:<10} {len(mine):>5} {lines:>6}  {shown}")
    arrows = sum(map(len, packages.values()))
    lines = sum(map(sources.lines, sources.files))
    rows.append(
        f"{len(sources.files)} files, {lines} lines, {arrows} imports between packages, {len(sources.cycles())} cycles"
    )
    return rows


if __name__ == "__main__":
    given = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[2] / "splitkit"
    print("\n".join(table(SourceTree(Path(given)))))
