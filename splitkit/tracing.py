"""Capture by ``torch.fx.symbolic_trace``: module calls stay whole, and shapes come from a run on fake tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.fakes import set_values
from splitkit.functions import functions_of_proxies


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    """Trace ``model`` and give every node its ``meta["val"]``; nothing real is computed.

    Inputs without tensors (flags, ``None``, left-out defaults) are constants of the graph: they keep their place in
    the signature, and another value is refused.
    """
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    constants = {
        name: value
        for name, value in bound.arguments.items()
        if signature.parameters[name].kind not in variadic and not _has_tensor(value)
    }
    with functions_of_proxies():
        gm = fx.symbolic_trace(model, concrete_args=constants)
    _fold_constants(gm, constants)
    set_values(gm, bound.arguments)
    _guard(_ConstantInputs(signature, constants), gm)
    gm._register_deepcopy_hook(partial(_guard, _ConstantInputs(signature, constants)))  # 2.11, 2.13, 2.15
    return gm


def _guard(check: _ConstantInputs, gm: fx.GraphModule) -> None:
    gm.register_forward_pre_hook(check, with_kwargs=True)


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _fold_constants(gm: fx.GraphModule, constants: Mapping[str, Any]) -> None:
    """Drop the checks that fx writes for constant inputs, and give these inputs their own names back (``y_1``: ``y``).

    The checks would be nodes that a policy places; a hook on the module does their work.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    for name, value in constants.items():
        node = next((n for n in inputs if n.target in (name, f"{name}_1")), None)
        if node is None:
            continue
        for user in reversed(list(_readers(node))):
            gm.graph.erase_node(user)
        node.target = name
        node.meta["val"] = value
    gm.graph.lint()
    gm.recompile()


def _readers(node: Node) -> dict[Node, None]:
    """All nodes that depend on ``node``, in graph order; of a constant input: its check."""
    found: dict[Node, None] = {}
    for user in node.users:
        found[user] = None
        found.update(_readers(user))
    return found


class _ConstantInputs:
    """Refuses another value for an input that was fixed at capture."""

    def __init__(self, signature: inspect.Signature, constants: Mapping[str, Any]) -> None:
        self.signature = signature
        self.constants = dict(constants)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self.signature.bind(*args, **kwargs).arguments
        for name, value in self.constants.items():
            if name in given and not _same(given[name], value):
                raise RuntimeError(f"Expected input {name} to be {value!r}, as at capture, but got {given[name]!r}")


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))
