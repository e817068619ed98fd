"""Small bugs that can be planted in Python source: comparisons, bounds, conditions, statements, values, arguments.

Only bodies of functions are changed: no docstrings, annotations, defaults, decorators, messages of errors or f-strings.
"""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "max", "sorted": "list", "reversed": "list"}
EMPTY = {"list": "[]", "dict": "{}", "set": "set()", "tuple": "()", "frozenset": "frozenset()"}
NUMBERS = ("int", "float")
SKIPPED_KEYWORDS = {"strict", "stacklevel"}
"""Keywords of calls that change no result."""


@dataclass(frozen=True)
class Change:
    """One small bug: a node of a file, and the text that takes its place.

    Attributes:
        function: qualified name of the outermost function, ``Class.method`` or ``function``.
        kind: what is done, such as "comparison".
    """

    function: str
    kind: str
    node: ast.stmt | ast.expr
    new: str


@dataclass(frozen=True)
class Mutant:
    """A file with one bug in it.

    Attributes:
        change: the bug.
        source: the text of the whole file.
        diff: the lines that differ.
    """

    change: Change
    source: str
    diff: str

    @property
    def line(self) -> int:
        return self.change.node.lineno


def changes(source: str) -> dict[str, list[Change]]:
    """Every bug that can be planted, by function, in the order of the file."""
    return {
        name: [Change(name, *change) for change in _changes(function)]
        for name, function in functions(ast.parse(source))
    }


def planted(source: str, change: Change) -> Mutant | None:
    """The file with that bug; None where it is not Python or means the same to the compiler."""
    new = _Text(source).replaced(change.node, change.new)
    try:
        if ast.dump(ast.parse(new)) == ast.dump(ast.parse(source)):
            return None
        compile(new, "mutant", "exec")
    except SyntaxError:
        return None
    return Mutant(change, new, _diff(source, new))


def functions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Functions of a module and methods of its classes, with qualified names; not those inside of functions."""
    for node in tree.body:
        if isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


class _Text:
    """Source as lines of bytes, since columns of nodes count bytes."""

    def __init__(self, source: str) -> None:
        self._lines = [line.encode() for line in source.splitlines(keepends=True)]

    def replaced(self, node: ast.stmt | ast.expr, new: str) -> str:
        assert node.end_lineno is not None and node.end_col_offset is not None
        before = b"".join(self._lines[: node.lineno - 1]) + self._lines[node.lineno - 1][: node.col_offset]
        last = self._lines[node.end_lineno - 1]
        after = last[node.end_col_offset :] + b"".join(self._lines[node.end_lineno :])
        return (before + new.encode() + after).decode()


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0)
    return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def _changes(function: Function) -> Iterator[tuple[str, ast.stmt | ast.expr, str]]:
    """(kind, the node to replace, its new text)."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    returns = function.returns
    for statement in body:
        if isinstance(statement, ast.Assert):  # says what holds, to readers and to mypy
            continue
        for node in _walk(statement):
            if isinstance(node, ast.stmt):
                yield from _of_statement(node, returns)
            elif isinstance(node, ast.expr):
                yield from ((kind, node, f"({ast.unparse(new)})") for kind, new in _of_expression(node))


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below a node whose change changes a result."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _silent(node, child):
                yield from _walk(child)


def _silent(parent: ast.AST, child: ast.AST) -> bool:
    if isinstance(parent, ast.Raise) or isinstance(child, ast.JoinedStr | ast.Assert):
        return True
    return isinstance(child, ast.keyword) and child.arg in SKIPPED_KEYWORDS


def _of_statement(node: ast.stmt, returns: ast.expr | None) -> Iterator[tuple[str, ast.stmt | ast.expr, str]]:
    dropped = isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete)
    if isinstance(node, ast.Expr):
        dropped = not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        dropped = any(isinstance(target, ast.Subscript | ast.Attribute) for target in node.targets)
    if isinstance(node, ast.If):
        dropped = not node.orelse
        yield "condition", node.test, f"(not ({ast.unparse(node.test)}))"
    if dropped:
        yield "statement", node, "__class__" if "super()" in ast.unparse(node) else "pass"  # so the closure stays
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "value", node.value, _nothing(node.value, returns)


def _nothing(value: ast.expr, returns: ast.expr | None) -> str:
    """What a function returns instead of its value: something of the same type, if that is known."""
    name = returns.value if isinstance(returns, ast.Subscript) else returns
    known = name.id if isinstance(name, ast.Name) else ""
    if known == "bool":
        return f"(not ({ast.unparse(value)}))"
    return "0" if known in NUMBERS else EMPTY.get(known, "None")


def _of_expression(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Compare):
        for new in COMPARISONS[type(node.ops[0])]:
            yield "comparison", _with(node, ops=[new(), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator", _with(node, op=OPERATORS[type(node.op)]())
        if isinstance(node.op, ast.BitOr):
            yield from (("union", side) for side in (node.left, node.right))
    elif isinstance(node, ast.BoolOp):
        yield "operator", _with(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        for i in range(len(node.values)):
            rest = node.values[:i] + node.values[i + 1 :]
            yield "operand", rest[0] if len(rest) == 1 else _with(node, values=rest)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield "not" if isinstance(node.op, ast.Not) else "sign", node.operand
    elif isinstance(node, ast.IfExp):
        yield "condition", _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.Constant):
        yield from _of_constant(node)
    elif isinstance(node, ast.Call):
        yield from _of_call(node)
    elif isinstance(node, ast.Set | ast.List | ast.Tuple) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
        if any(isinstance(item, ast.Starred) for item in node.elts):
            for i in range(len(node.elts)):
                yield "union", _with(node, elts=node.elts[:i] + node.elts[i + 1 :])
    elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        yield from _of_comprehension(node)


def _of_constant(node: ast.Constant) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node.value, bool):
        yield "constant", ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield "constant", ast.Constant(node.value + 1)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name in NAMES:
        yield "function", _with(node, func=ast.Name(NAMES[name], ast.Load()))
    if len(node.args) > 1 and name not in ("isinstance", "getattr", "zip", "max", "min", "print", "cast"):
        yield "arguments", _with(node, args=[node.args[1], node.args[0], *node.args[2:]])
    if name in ("min", "max") and len(node.args) > 1:
        for i in range(len(node.args)):
            rest = node.args[:i] + node.args[i + 1 :]
            yield "operand", rest[0] if len(rest) == 1 and not node.keywords else _with(node, args=rest)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg not in SKIPPED_KEYWORDS | {None, "key"}:
            yield "keyword", _with(node, keywords=node.keywords[:i] + node.keywords[i + 1 :])


def _of_comprehension(
    node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp,
) -> Iterator[tuple[str, ast.expr]]:
    for g, generator in enumerate(node.generators):
        for i in range(len(generator.ifs)):
            rest = generator.ifs[:i] + generator.ifs[i + 1 :]
            generators = [_with(one, ifs=rest) if h == g else one for h, one in enumerate(node.generators)]
            yield "filter", _with(node, generators=generators)
            negated = [ast.UnaryOp(ast.Not(), one) if j == i else one for j, one in enumerate(generator.ifs)]
            generators = [_with(one, ifs=negated) if h == g else one for h, one in enumerate(node.generators)]
            yield "condition", _with(node, generators=generators)


def _with(node, **fields):
    """A copy of a node in which some fields are other ones."""
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new
