"""Parses policies: ``Stages(4)``, ``ByName({'transformer.h.*': 1})``, ``SplitBackward(policy=MinCut())``.

Parameters are literals or policies; nothing is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitkit.errors import PolicyError, SplitError, UsageError, nearest

if TYPE_CHECKING:
    from splitkit.costs import Costs
    from splitkit.graph.dataflow import Dataflow
    from splitkit.plans.policy import Policy
    from splitkit.plans.record import Plan


@dataclass(frozen=True)
class PolicySpec:
    """A policy as parsed, not built yet.

    Attributes:
        text: the text on the command line.
        name: the name of the policy's class.
        args: the positional parameters.
        kwargs: the named parameters.
    """

    text: str
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def build(self) -> Policy:
        """Build the policy; this imports torch and the policy's package.

        Raises:
            PolicyError: SK301 if it cannot be loaded, SK302 if it does not accept these parameters.
        """
        return _Spelled(self.text, self._made())

    def _made(self) -> Any:
        """Make the policy, after the policies among its parameters."""
        make = _load(self.name)
        args = [value._made() if isinstance(value, PolicySpec) else value for value in self.args]
        kwargs = {k: value._made() if isinstance(value, PolicySpec) else value for k, value in self.kwargs.items()}
        try:
            return make(*args, **kwargs)
        except TypeError as error:
            raise _unfit(self.text, error) from error


@dataclass(frozen=True)
class _Spelled:
    """A policy made from text: Python errors in it are due to parameters of the wrong type, and become SK302."""

    text: str
    policy: Any

    @property
    def expression(self) -> str:
        """The expression that plans record."""
        return self.text.strip()

    def __getattr__(self, name: str) -> Any:
        if name == "policy":  # not set yet while the object is copied
            raise AttributeError(name)
        return getattr(self.policy, name)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        from splitkit.plans.policy import as_plan

        try:
            return as_plan(self.policy, flow, costs)
        except SplitError:
            raise
        except (TypeError, AttributeError, ValueError, LookupError) as error:
            raise _unfit(self.text, error) from error


def parse(text: str) -> PolicySpec:
    """Parse a policy expression, without torch.

    Raises:
        UsageError: SK601 if it is not a call of a known policy with literals.
    """
    return _parsed(text, _expression(text))


def _parsed(text: str, call: ast.expr) -> PolicySpec:
    if isinstance(call, ast.Name):  # Random is Random()
        call = ast.Call(call, [], [])
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise _unreadable(text, "it is not the name of a policy with its parameters")
    _require_known(call.func.id)
    args = tuple(_value(text, arg) for arg in call.args)
    kwargs = {}
    for word in call.keywords:
        if word.arg is None:
            raise _unreadable(text, "** is not allowed")
        kwargs[word.arg] = _value(text, word.value)
    return PolicySpec(text, call.func.id, args, kwargs)


def _expression(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _unreadable(text, getattr(error, "msg", str(error)) or "it is nested too deeply") from error


def _value(text: str, node: ast.expr) -> Any:
    """Return a literal, or the policy that a parameter is: ``SplitBackward(policy=MinCut())``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _parsed(ast.unparse(node), node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise _unreadable(text, f"{ast.unparse(node)} is not a literal") from error


def _require_known(name: str) -> None:
    own, others = builtins(), installed()
    if name in own:
        _require_writable(own[name])
    elif name not in others:
        known = [*own, *others]
        remedy = nearest(name, known, most=3, cutoff=0.5) or f"Choose one of {', '.join(known)}."
        raise UsageError("SK601", f"there is no policy {name!r}", remedy)


def _require_writable(policy: Builtin) -> None:
    if policy.function:
        raise UsageError(
            "SK601",
            f"{policy.name} takes a function ({policy.function}), which the command line cannot give",
            f"Use ByName({{...}}), or Python: splitkit.plan(gm, policies.{policy.name}(...)).save('plan.json').",
        )


def _load(name: str) -> Any:
    if name in builtins():
        return getattr(import_module(PACKAGE), name)
    entry = installed()[name]
    try:
        return entry.load()
    except Exception as error:
        raise PolicyError(
            "SK301",
            f"the policy {name} ({entry.value}) cannot be loaded: {type(error).__name__}: {error}",
            "Fix or remove the package that provides it.",
        ) from error


def _unreadable(text: str, why: str) -> UsageError:
    return UsageError(
        "SK601",
        f"the policy {text!r} cannot be read: {why}",
        'Write a policy and literals, such as "Stages(4)" or "ByName({\'transformer.h.*\': 1})".',
    )


def _unfit(text: str, error: Exception) -> PolicyError:
    known = builtins().get(text.partition("(")[0].strip())
    return PolicyError(
        "SK302",
        f"{text}: {error}" if isinstance(error, TypeError) else f"{text}: {type(error).__name__}: {error}",
        f"It is {known.signature}." if known else "See the policy's documentation.",
    )


# Lists the policies: splitkit's own, read from their source without importing torch, and those of other packages.


GROUP = "splitkit.policies"
PACKAGE = "splitkit.policies"


@dataclass(frozen=True)
class Builtin:
    """One of splitkit's own policies.

    Attributes:
        name: the name of the policy's class.
        signature: the name with the parameters as written in the source, such as ``RoundRobin(n: int)``.
        function: the parameter that cannot be written on the command line, a required function; empty if there is none.
        doc: the first sentence of its docstring.
    """

    name: str
    signature: str
    function: str
    doc: str


def builtins() -> dict[str, Builtin]:
    """Return name -> policy for splitkit's own policies, sorted by name."""
    folder = Path(__file__).parents[2] / "policies"
    found: dict[str, Builtin] = {}
    for statement in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(f"{PACKAGE}."):
            file = folder / f"{(statement.module or '').removeprefix(f'{PACKAGE}.')}.py"
            source = file.read_text(encoding="utf-8")
            classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
            for alias in statement.names:
                body = classes[alias.name].body if alias.name in classes else []
                if any(isinstance(item, ast.FunctionDef) and item.name == "assign" for item in body):
                    found[alias.name] = _builtin(classes[alias.name])
    return dict(sorted(found.items()))


def installed() -> dict[str, EntryPoint]:
    """Return name -> entry point of the policies of other packages, without loading them."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _builtin(node: ast.ClassDef) -> Builtin:
    fields = [
        (item.target.id, ast.unparse(item.annotation), _default(item.value))
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_"
        if not ast.unparse(item.annotation).startswith(("ClassVar", "InitVar"))
    ]
    texts = [f"{name}: {kind}" + (f" = {default}" if default is not None else "") for name, kind, default in fields]
    function = next((name for name, kind, default in fields if default is None and "Callable" in kind), "")
    doc = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    said = doc.partition(". ")[0].rstrip(".").replace("`", "") + "."
    return Builtin(node.name, f"{node.name}({', '.join(texts)})", function, said)


def _default(value: ast.expr | None) -> str | None:
    """Return a default as text: ``3`` for ``field(default=3)``, ``dict()`` for ``field(default_factory=dict)``."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        given = {word.arg: ast.unparse(word.value) for word in value.keywords}
        return given.get("default") or (f"{given['default_factory']}()" if "default_factory" in given else None)
    return None if value is None else ast.unparse(value)
