"""Select nodes as the users of policies name them: ops as objects, as text or by a rule; modules by patterns."""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from splitkit._torch import HigherOrderOperator, OpOverload, OpOverloadPacket
from splitkit.checks import items_of, shown
from splitkit.errors import PolicyError, near, nearest
from splitkit.graph.dataflow import Dataflow, module_path

Op = str | Callable[..., Any]
"""One op: ``torch.ops.aten.mm.default``, ``torch.ops.aten.mm`` (any overload), ``torch.relu``, ``nn.Linear`` (a called
module of that class), or text: ``"aten.mm"``, ``"vllm::attention"``, ``"relu_"`` (a method), ``"torch.relu"``,
``"torch.nn.Linear"``."""

Ops = Op | Collection[Op] | Callable[[Node], object]
"""One op as text or of `torch.ops`, a collection of ops, or a rule: any other callable, called with each node."""

Rule = Callable[[Node], bool]

_UNNAMED = (torch.Tensor, torch, nn.functional, operator, builtins)
"""The modules and classes in which a name without a module is looked up."""


def rule_of(policy: object, ops: Ops, flow: Dataflow) -> Rule:
    """Return a predicate of nodes for ``ops``; ``policy`` is the policy that errors name.

    Raises:
        PolicyError: SK302 if an item is not an op, and later if the rule fails on a node; SK304 if no op has the given
            name. An op that does not occur in the graph is not an error, as lists are written for many models.
    """
    if isinstance(ops, str | OpOverload | OpOverloadPacket | HigherOrderOperator | type):
        ops = (ops,)
    if callable(ops):
        return _asked(policy, ops)
    return _listed(policy, ops, flow)


def modules_matching(patterns: Collection[str], nodes: Iterable[Node]) -> dict[Node, str]:
    """Return node -> the first pattern that matches its module path or the path of an enclosing module.

    Args:
        patterns: shell-style patterns (``*``, ``?``, ``[0-5]``) of dotted module paths.
        nodes: the nodes to choose from.

    Raises:
        PolicyError: SK304 for a pattern that matches no module.
    """
    paths = {node: module_path(node) for node in nodes}
    around: dict[str, list[str]] = {}  # a.b.c -> a.b.c, a.b, a
    for path in paths.values():
        around[path] = [path.rsplit(".", i)[0] for i in range(path.count(".") + 1)]
    known = dict.fromkeys(name for names in around.values() for name in names)
    matched = {pattern: {name for name in known if fnmatchcase(name, pattern)} for pattern in patterns}
    for pattern, names in matched.items():
        if not names:
            raise no_module(f"the pattern {pattern!r} matches no module of the graph", pattern, known)
    first = {
        path: next((p for p, named in matched.items() if not named.isdisjoint(names)), None)
        for path, names in around.items()
    }
    return {node: found for node, path in paths.items() if (found := first[path]) is not None}


def no_module(reason: str, name: str, known: Iterable[str]) -> PolicyError:
    """Return an SK304 error for an unknown module name; it suggests similar names among ``known``."""
    paths = [path for path in known if path]
    found = near(name, paths, most=3, cutoff=0.3) or paths[:3]
    remedy = f"Modules near it: {', '.join(found)}." if found else "The graph carries no module paths."
    return PolicyError("SK304", reason, remedy, [name])


def _asked(policy: object, rule: Callable[[Node], object]) -> Rule:
    def ask(node: Node) -> bool:
        try:
            return bool(rule(node))
        except Exception as error:
            raise PolicyError(
                "SK302",
                f"the rule {rule!r} of {type(policy).__name__} fails on {node.name}: {type(error).__name__}: {error}",
                "A rule answers for a node. A function that is meant as an op goes in a list: [torch.mm].",
                [node],
            ) from error

    return ask


def _listed(policy: object, ops: Collection[Op], flow: Dataflow) -> Rule:
    items = items_of(ops)
    if items is None or not all(isinstance(op, str) or callable(op) for op in items):
        raise PolicyError(
            "SK302",
            f"{type(policy).__name__} was given {shown(ops)}, which are not ops",
            "List ops of torch.ops, functions, module classes, or their names: ['aten.mm', torch.relu].",
        )
    calls = {(n.op, n.target): n for n in flow.index if n.op.startswith("call_")}
    spelled = {call: _spellings(node, flow.root) for call, node in calls.items()}
    known = {name for names in spelled.values() for name in names if isinstance(name, str)}
    wanted = {meant for op in items for meant in (_meanings(policy, op, known) if isinstance(op, str) else (op,))}
    listed = {call for call, names in spelled.items() if not wanted.isdisjoint(names)}
    return lambda node: (node.op, node.target) in listed


_OTHER_OPS = (
    "An op of a library that is not loaded is written library::op; a function of your own, or a class of modules, is "
    "given as itself."
)


def _meanings(policy: object, text: str, known: Collection[str]) -> tuple[Any, ...]:
    """Return a name as graphs spell it, and the function or class of that name if there is one.

    Raises:
        PolicyError: SK304 if neither torch nor the graph (whose calls have the names ``known``) has such an op.
    """
    name = text.removeprefix("torch.ops.").replace("::", ".")
    found = _function(name)
    if found is not None:
        return name, found
    if name in known or _is_op(name) or _may_come_later(text, name):
        return (name,)
    torchs = [f"aten.{op}" for op in torch.ops.aten] + [f"torch.{function}" for function in dir(torch)]
    names = {*known, *torchs, *dir(torch.Tensor)} - {name}
    raise PolicyError(
        "SK304",
        f"{type(policy).__name__} was given {text!r}, which is not an op",
        nearest(name, sorted(names), _OTHER_OPS, most=3, cutoff=0.7),
        [text],
    )


def _function(name: str) -> Any:
    """Return the function or class of a name: in a loaded module, or in `_UNNAMED` for a name without a module."""
    *spaces, last = name.split(".")
    places = [_reached(sys.modules.get(spaces[0]), *spaces[1:])] if spaces else _UNNAMED
    functions = filter(callable, (_reached(place, last) for place in places))
    return next((found for found in functions if not isinstance(found, OpOverload | OpOverloadPacket)), None)


def _reached(start: Any, *names: str) -> Any:
    for name in names:
        try:
            start = getattr(start, name, None)
        except Exception:  # a lazy module may fail to load a submodule
            return None
    return start


def _is_op(name: str) -> bool:
    """Whether ``torch.ops`` has an op of this name; a higher-order op may be named without its library."""
    ops = (_reached(torch.ops, *name.split(".")), _reached(torch.ops.higher_order, name))
    return any(isinstance(op, OpOverload | OpOverloadPacket | HigherOrderOperator) for op in ops)


def _may_come_later(text: str, name: str) -> bool:
    """Whether a library that is not loaded completely may define an op of this name; aten is always complete."""
    library, dot, _ = name.partition(".")
    ops = _reached(torch.ops, library)
    is_loaded = isinstance(ops, Iterable) and any(True for _ in ops)
    return bool(dot) and library != "aten" and ("::" in text or is_loaded)


def _spellings(node: Node, root: nn.Module) -> list[Any]:
    """Return all items of a list of ops that would match the target of ``node``."""
    target: Any = node.target
    if node.op == "call_module":
        return [cls for cls in type(root.get_submodule(target)).__mro__ if cls is not object]
    if isinstance(target, OpOverload):
        packet = target.overloadpacket
        return [target, packet, str(target), str(packet)]
    if isinstance(target, OpOverloadPacket):
        return [target, str(target)]
    if isinstance(target, HigherOrderOperator):
        return [target, str(target), f"{target.namespace}.{target}"]
    if isinstance(target, str):
        return [target]
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None) or "torch"
    return [target, name, f"{module.removeprefix('_')}.{name}"]
