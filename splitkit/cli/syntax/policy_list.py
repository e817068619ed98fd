"""Lists the policies: splitkit's own, read from their source without importing torch, and those of other packages."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

GROUP = "splitkit.policies"
PACKAGE = "splitkit.policies"


@dataclass(frozen=True)
class Field:
    """A parameter of a policy: name, annotation and default as written in the source."""

    name: str
    annotation: str
    default: str | None

    def __str__(self) -> str:
        return f"{self.name}: {self.annotation}" + (f" = {self.default}" if self.default is not None else "")

    @property
    def needs_a_function(self) -> bool:
        """Whether the parameter is a required function."""
        return self.default is None and "Callable" in self.annotation


@dataclass(frozen=True)
class Builtin:
    """One of splitkit's own policies.

    Attributes:
        name: the name of the policy's class.
        fields: its parameters.
        doc: the first sentence of its docstring.
    """

    name: str
    fields: tuple[Field, ...]
    doc: str

    @property
    def signature(self) -> str:
        """The signature, such as ``RoundRobin(n: int)``."""
        return f"{self.name}({', '.join(map(str, self.fields))})"

    @property
    def function(self) -> Field | None:
        """The parameter that cannot be written on the command line, if there is one."""
        return next((f for f in self.fields if f.needs_a_function), None)


def builtins() -> dict[str, Builtin]:
    """Return name -> policy for splitkit's own policies, sorted by name."""
    folder = Path(__file__).parents[2] / "policies"
    found: dict[str, Builtin] = {}
    for statement in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(f"{PACKAGE}."):
            source = _source(folder, (statement.module or "").removeprefix(f"{PACKAGE}."))
            classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
            for alias in statement.names:
                if alias.name in classes and _assigns(classes[alias.name]):
                    found[alias.name] = _builtin(classes[alias.name])
    return dict(sorted(found.items()))


def installed() -> dict[str, EntryPoint]:
    """Return name -> entry point of the policies of other packages, without loading them."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _source(folder: Path, module: str) -> str:
    path = folder.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return file.read_text(encoding="utf-8")


def _assigns(node: ast.ClassDef) -> bool:
    return any(isinstance(item, ast.FunctionDef) and item.name == "assign" for item in node.body)


def _builtin(node: ast.ClassDef) -> Builtin:
    fields = tuple(
        Field(item.target.id, ast.unparse(item.annotation), _default(item.value))
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_"
        if not ast.unparse(item.annotation).startswith(("ClassVar", "InitVar"))
    )
    doc = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    return Builtin(node.name, fields, doc.partition(". ")[0].rstrip(".").replace("`", "") + ".")


def _default(value: ast.expr | None) -> str | None:
    """Return a default as text: ``3`` for ``field(default=3)``, ``dict()`` for ``field(default_factory=dict)``."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        given = {word.arg: ast.unparse(word.value) for word in value.keywords}
        return given.get("default") or (f"{given['default_factory']}()" if "default_factory" in given else None)
    return None if value is None else ast.unparse(value)
