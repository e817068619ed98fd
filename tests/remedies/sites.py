"""Every remedy that an error of splitkit promises, read from the source without importing it.

A remedy is the third argument of an error (``SplitError(code, reason, remedy)``). Where it is a name, the text
is looked up: in the assignments of the function, in the constants of the module, or, if the name is a parameter, at the
calls of the function. A template is the text with ``{...}`` in place of what is only known at run time.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "splitkit"


@dataclass(frozen=True, order=True)
class Site:
    """A place of the source that raises an error, with one of the remedies that it can have."""

    code: str
    remedy: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.code} -> {self.remedy!r}"


@dataclass(frozen=True)
class _Call:
    """A call inside the functions that enclose it, the innermost last."""

    node: ast.Call
    within: tuple[ast.FunctionDef, ...]
    module: _Module


class _Module:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.constants = dict(pair for statement in self.tree.body for pair in _assigned(statement))

    @cached_property
    def calls(self) -> list[_Call]:
        return list(self._calls(self.tree, ()))

    def _calls(self, node: ast.AST, within: tuple[ast.FunctionDef, ...]) -> Iterator[_Call]:
        if isinstance(node, ast.FunctionDef):
            within = (*within, node)
        if isinstance(node, ast.Call):
            yield _Call(node, within, self)
        for child in ast.iter_child_nodes(node):
            yield from self._calls(child, within)


class _Reader:
    """Follows the remedies of a package from its errors to their texts."""

    def __init__(self, package: Path) -> None:
        self.modules = [_Module(path) for path in sorted(package.rglob("*.py"))]
        self.callers: dict[str, list[_Call]] = defaultdict(list)
        for module in self.modules:
            for call in module.calls:
                self.callers[_called(call.node)].append(call)

    def sites(self) -> set[Site]:
        found = set()
        for module in self.modules:
            for call in module.calls:
                for code in self._codes(call):
                    where = f"{module.path.relative_to(PACKAGE.parent)}:{call.within[-1].name if call.within else ''}"
                    remedy = _argument(call.node, 2, "remedy")
                    texts = self._texts(remedy, call, 0) if remedy is not None else {""}
                    found |= {Site(code, text, where) for text in texts}
        return found

    def _codes(self, call: _Call) -> set[str]:
        first = call.node.args[0] if call.node.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and _is_code(first.value):
            return {first.value}
        return set()

    def _texts(self, node: ast.expr, call: _Call, depth: int) -> set[str]:
        """Return the templates that an expression can be."""
        if isinstance(node, ast.IfExp):
            return self._texts(node.body, call, depth) | self._texts(node.orelse, call, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return {a + b for a in self._texts(node.left, call, depth) for b in self._texts(node.right, call, depth)}
        if isinstance(node, ast.Constant):
            return {str(node.value)}
        if isinstance(node, ast.JoinedStr):
            return {"".join(v.value if isinstance(v, ast.Constant) else "{...}" for v in node.values)}
        if isinstance(node, ast.Name) and depth < 4:
            return self._named(node.id, call, depth + 1) or {"{...}"}
        return {"{...}"}

    def _named(self, name: str, call: _Call, depth: int) -> set[str]:
        for function in reversed(call.within):
            values = [value for statement in ast.walk(function) for n, value in _assigned(statement) if n == name]
            if values:
                return set().union(*(self._texts(value, call, depth) for value in values))
            names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
            if name in names + [arg.arg for arg in function.args.kwonlyargs]:
                position = names.index(name) - (names[0] in ("self", "cls")) if name in names else None
                return self._passed(function, call.module, position, name, depth)
        if name in call.module.constants:
            return self._texts(call.module.constants[name], call, depth)
        defined = [module for module in self.modules if name in module.constants]  # imported from one of them
        return set().union(*(self._texts(module.constants[name], call, depth) for module in defined))

    def _passed(
        self, function: ast.FunctionDef, module: _Module, position: int | None, name: str, depth: int
    ) -> set[str]:
        found = set()
        for call in self.callers[function.name]:
            if call.module is not module and function.name.startswith("_"):
                continue
            given = _argument(call.node, position, name)
            if given is not None:
                found |= self._texts(given, call, depth)
        defaults = dict(zip([arg.arg for arg in function.args.args][::-1], function.args.defaults[::-1], strict=False))
        if name in defaults:
            found |= {text for text in [getattr(defaults[name], "value", None)] if isinstance(text, str)}
        return found


def _assigned(statement: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value
            elif isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                for one, value in zip(target.elts, statement.value.elts, strict=False):
                    if isinstance(one, ast.Name):
                        yield one.id, value
    elif (
        isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None
    ):
        yield statement.target.id, statement.value


def _argument(call: ast.Call, position: int | None, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if (
        position is not None
        and 0 <= position < len(call.args)
        and not any(isinstance(a, ast.Starred) for a in call.args[: position + 1])
    ):
        return call.args[position]
    return None


def _called(call: ast.Call) -> str:
    return (
        call.func.attr
        if isinstance(call.func, ast.Attribute)
        else call.func.id
        if isinstance(call.func, ast.Name)
        else ""
    )


def _is_code(text: str) -> bool:
    return len(text) == 5 and text.startswith("SK") and text[2:].isdigit()


def sites(package: Path = PACKAGE) -> set[Site]:
    """Return the remedies of all errors in the package."""
    return _Reader(package).sites()


if __name__ == "__main__":
    for site in sorted(sites()):
        print(site)
