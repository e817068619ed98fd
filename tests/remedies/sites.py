"""Every remedy that an error of splitkit promises, read from the source without importing it.

A remedy is the third argument of an error (``SplitError(code, reason, remedy)``). Where it is a name, the text
is looked up: in the assignments and loops of the function, in the constants of the module, or, if the name is a
parameter, at the calls of the function. Where it is a call of a function of the package, it is what this function
returns for these arguments. Of texts that are joined, each is a remedy. A template is the text with ``{...}`` in place
of what is only known at run time.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "splitkit"
_DEPTH = 10  # names and functions that are followed one after the other


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
    """A call inside the functions that enclose it, the innermost last; ``bound`` says what is passed to these."""

    node: ast.expr
    within: tuple[ast.FunctionDef, ...]
    module: _Module
    bound: Mapping[str, tuple[ast.expr, _Call]] = field(default_factory=dict)


class _Module:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.constants = dict(pair for statement in self.tree.body for pair in _assigned(statement))
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}

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


_Bound = Mapping[str, tuple[ast.expr, _Call]]


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
        if depth >= _DEPTH:
            return {"{...}"}
        if isinstance(node, ast.BoolOp):
            *first, last = (self._texts(value, call, depth) for value in node.values)
            return set().union(last, *(texts - {""} for texts in first))
        return self._followed(node, call, depth + 1) or {"{...}"}

    def _followed(self, node: ast.expr, call: _Call, depth: int) -> set[str]:
        """Return the texts of what is made elsewhere, or of each member of a sequence; nothing if that is unknown."""
        if isinstance(node, ast.Name):
            return self._named(node.id, call, depth)
        if isinstance(node, ast.Starred):
            return self._texts(node.value, call, depth)
        if isinstance(node, (ast.List, ast.Tuple)):
            return set().union(*(self._texts(one, call, depth) for one in node.elts))
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
            source = node.generators[0]
            same = ast.unparse(node.elt) == ast.unparse(source.target)
            texts = self._texts(source.iter if same else node.elt, call, depth)
            return texts - {""} if source.ifs else texts
        if isinstance(node, ast.Subscript):
            return self._items(node, call, depth)
        if isinstance(node, ast.Call):
            return self._returned(node, call, depth)
        if isinstance(node, ast.Attribute) and node.attr in call.module.functions:  # a property
            return self._results(node, call.module.functions[node.attr], call.module, {}, depth)
        return set()

    def _returned(self, node: ast.Call, call: _Call, depth: int) -> set[str]:
        """Return the texts that a call returns: of a function of the package, or of some that hand texts on."""
        if _called(node) == "map":
            function = node.args[0]
            return self._returned(ast.Call(function, [], []), call, depth)
        if _called(node) in ("join", "next", "filter"):  # filter(None, texts): the last argument
            kept = node.args[1:] if _called(node) == "filter" else node.args
            return set().union(*(self._texts(one, call, depth) for one in kept)) - {""}
        if _called(node) in ("strip", "rstrip") and isinstance(node.func, ast.Attribute):
            return self._texts(node.func.value, call, depth)
        module, function = self._function(_called(node), call.module)
        return set() if function is None else self._results(node, function, module, _bound(function, node, call), depth)

    def _function(self, name: str, module: _Module) -> tuple[_Module, ast.FunctionDef | None]:
        if name in module.functions:
            return module, module.functions[name]
        found = [one for one in self.modules if name in one.functions]
        return (found[0], found[0].functions[name]) if len(found) == 1 else (module, None)

    def _results(
        self, node: ast.expr, function: ast.FunctionDef, module: _Module, bound: _Bound, depth: int
    ) -> set[str]:
        """Return the texts that a function returns or yields."""
        inside = _Call(node, (function,), module, bound)
        kinds = (ast.Return, ast.Yield, ast.YieldFrom)
        values = [one.value for one in ast.walk(function) if isinstance(one, kinds) and one.value is not None]
        return set().union(*(self._texts(value, inside, depth) for value in values))

    def _items(self, node: ast.Subscript, call: _Call, depth: int) -> set[str]:
        """Return the texts of the item of a tuple, wherever it is made."""
        of, index = node.value, node.slice
        if not isinstance(index, ast.Constant) or not isinstance(index.value, int) or depth >= _DEPTH:
            return set()
        return set().union(
            *(self._texts(one.elts[index.value], call, depth) for one, call in self._tuples(of, call, depth))
        )

    def _tuples(self, node: ast.expr, call: _Call, depth: int) -> Iterator[tuple[ast.Tuple, _Call]]:
        if isinstance(node, ast.Tuple):
            yield node, call
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                yield from self._tuples(value, call, depth)
        elif isinstance(node, ast.IfExp):
            yield from self._tuples(node.body, call, depth)
            yield from self._tuples(node.orelse, call, depth)
        elif isinstance(node, ast.Name):
            values = [v for f in call.within for s in ast.walk(f) for n, v in _assigned(s) if n == node.id]
            for value in values:
                yield from self._tuples(value, call, depth + 1)
        elif isinstance(node, ast.Call) and depth < _DEPTH:
            module, function = self._function(_called(node), call.module)
            for one in ast.walk(function) if function is not None else ():
                if isinstance(one, ast.Return) and one.value is not None:
                    yield from self._tuples(one.value, _Call(node, (function,), module), depth + 1)

    def _named(self, name: str, call: _Call, depth: int) -> set[str]:
        for function in reversed(call.within):
            if name in call.bound:
                value, where = call.bound[name]
                return self._texts(value, where, depth)
            loops = [
                (index, self._looped(statement.iter, call))
                for statement in ast.walk(function)
                if isinstance(statement, ast.For) and isinstance(statement.target, ast.Tuple)
                for index, target in enumerate(statement.target.elts)
                if isinstance(target, ast.Name) and target.id == name
            ]
            if any(rows for _, rows in loops):
                return set().union(*(self._texts(r.elts[i], call, depth) for i, rows in loops for r in rows))
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

    def _looped(self, node: ast.expr, call: _Call) -> list[ast.Tuple]:
        """Return the rows of a constant table of the module."""
        table = call.module.constants.get(node.id) if isinstance(node, ast.Name) else None
        return [row for row in getattr(table, "elts", ()) if isinstance(row, ast.Tuple)]

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
            elif isinstance(target, ast.Tuple):
                for i, one in enumerate(target.elts):
                    if isinstance(one, ast.Name):
                        yield one.id, ast.Subscript(statement.value, ast.Constant(i))
    elif isinstance(statement, ast.NamedExpr) or (
        isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value is not None
    ):
        yield statement.target.id, statement.value


def _bound(function: ast.FunctionDef, node: ast.Call, call: _Call) -> dict[str, tuple[ast.expr, _Call]]:
    """Return the arguments of a call by name, and the defaults of what it does not pass."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    passed = names[1:] if names[:1] in (["self"], ["cls"]) else names
    keywords = [arg.arg for arg in args.kwonlyargs]
    found = dict(zip(names[::-1], args.defaults[::-1], strict=False)) | dict(
        zip(keywords, args.kw_defaults, strict=True)
    )
    for name in (*passed, *keywords):
        given = _argument(node, passed.index(name) if name in passed else None, name)
        found |= {} if given is None else {name: given}
    return {name: (value, call) for name, value in found.items() if value is not None}


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
