"""Which nodes do the users of a policy mean? Ops as objects, as text, or as a rule."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.fx import Node

from splitkit._torch import HigherOrderOperator, OpOverload, OpOverloadPacket
from splitkit.dataflow import Dataflow
from splitkit.errors import PolicyError

Op = str | Callable[..., Any]
"""One op: ``torch.ops.aten.mm.default``, ``torch.ops.aten.mm`` (any overload), ``torch.relu``, ``nn.Linear`` (a called
module of that class), or text: ``"aten.mm"``, ``"vllm::attention"``, ``"relu_"`` (a method), ``"torch.relu"``."""

Ops = Op | Collection[Op] | Callable[[Node], object]
"""One op in text or of `torch.ops`, a collection of ops, or a rule: any other callable is asked for each node."""

Rule = Callable[[Node], bool]


def rule_of(policy: object, ops: Ops, flow: Dataflow) -> Rule:
    """The rule behind ``ops``, for a policy that names itself in errors.

    Raises:
        PolicyError: SK302 when an item is no op; later, when the rule fails on a node.
    """
    if isinstance(ops, str | OpOverload | OpOverloadPacket | HigherOrderOperator | type):
        ops = (ops,)
    if callable(ops):
        return _asked(policy, ops)
    return _listed(policy, ops, flow)


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
    if not isinstance(ops, Collection) or not all(isinstance(op, str) or callable(op) for op in ops):
        raise PolicyError(
            "SK302",
            f"{type(policy).__name__} was given {ops!r:.200}, which are no ops",
            "List ops of torch.ops, functions, module classes, or their names: ['aten.mm', torch.relu].",
        )
    wanted = {op.replace("::", ".") if isinstance(op, str) else op for op in ops}
    known: dict[tuple[str, Any], bool] = {}

    def is_listed(node: Node) -> bool:
        kind = (node.op, node.target)
        if kind not in known:
            known[kind] = not wanted.isdisjoint(_spellings(node, flow.root))
        return known[kind]

    return is_listed


def _spellings(node: Node, root: nn.Module) -> list[Any]:
    """All that may stand in a list for the target of ``node``."""
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
