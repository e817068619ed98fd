"""Modules of torch.nn, whose class and settings say what a call does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Node

from splitkit.graph.ops import tables
from splitkit.graph.ops.facts import Effects, distinct, union
from splitkit.graph.ops.names import torch_name


@dataclass(frozen=True)
class ModuleEffects:
    """What a module does, seen from its caller: its own nodes are of no concern.

    Attributes:
        effects: what it does beyond its arguments.
        writes: it may write its first argument; a graph, any of them.
        aliases: its output may share memory with its first argument; a graph's, with any of them.
    """

    effects: Effects
    writes: bool = False
    aliases: bool = False


def lookup(root: nn.Module | None, target: object) -> Any:
    """What a dotted name means in a module; ``None`` if nothing."""
    value: Any = root
    for atom in str(target).split("."):
        value = getattr(value, atom, None)
    return value


def bodies(node: Node, root: nn.Module | None) -> dict[Node | nn.Module, nn.Module]:
    """The modules among the arguments of a higher-order operator, by the argument that stands for them."""
    args: tuple[Any, ...] = node.args
    found: dict[Node | nn.Module, nn.Module] = {a: a for a in args if isinstance(a, nn.Module)}
    for n in node.all_input_nodes:
        if n.op == "get_attr" and isinstance(body := lookup(root, n.target), nn.Module):
            found[n] = body
    return found


def state(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """The parameters, buffers and plain tensors of a module and its children."""
    plain = (t for m in module.modules() for t in vars(m).values() if isinstance(t, torch.Tensor))
    return distinct((*module.parameters(), *module.buffers(), *plain))


def is_stock(module: object) -> bool:
    """Does it do what its class of torch.nn says, and no more: no hook, no parametrization, no forward of its own?"""
    if not isinstance(module, nn.Module) or not type(module).__module__.startswith("torch.nn.modules."):
        return False
    return not is_changed(module)


def is_changed(module: nn.Module) -> bool:
    """Does it do more or other than its class says?"""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, h, None) for h in hooks):
        return True
    return "forward" in vars(module) or "parametrizations" in module._modules


def stock_inside(m: nn.Module, children: Sequence[ModuleEffects]) -> ModuleEffects | None:
    """What a module of torch.nn does in either mode, given what its children do; ``None`` if that is not known.

    ``training`` is not asked: parts may be put into the other mode later on.
    """
    name, inplace = type(m).__name__, bool(getattr(m, "inplace", False))
    if name in tables.DROPOUT_MODULES:
        return ModuleEffects(Effects(random=cast(nn.Dropout, m).p != 0), inplace, True)
    effects = union((_own(m, name), *(c.effects for c in children)))
    if name == "Sequential":
        return ModuleEffects(effects, *_in_turn(children))
    if name.startswith("Transformer") and name.endswith("Layer"):
        activation = getattr(m, "activation", None)
        if not isinstance(activation, nn.Module) and torch_name(activation) is None:
            return None
    if name in tables.FRESH_MODULES:
        return ModuleEffects(effects, inplace, inplace)
    return ModuleEffects(effects, any(c.writes for c in children), True) if name in tables.ALIAS_MODULES else None


def _in_turn(children: Sequence[ModuleEffects]) -> tuple[bool, bool]:
    """Does a chain of modules write its input, and does it return it?"""
    written, reached = False, True  # does what runs next get the input itself?
    for child in children:
        written, reached = written or (reached and child.writes), reached and child.aliases
    return written, reached


def _own(m: Any, name: str) -> Effects:
    """Random numbers and state of one module, its children left out."""
    written: tuple[Any, ...] = ()
    if name.startswith(("BatchNorm", "SyncBatchNorm", "InstanceNorm")):
        written = tuple(m.buffers(recurse=False))
    elif name in ("Embedding", "EmbeddingBag") and m.max_norm is not None:
        written = (m.weight,)
    draws = (
        name == "RReLU"
        or (name.startswith("FractionalMaxPool") and m._random_samples is None)
        or (name in ("LSTM", "GRU", "RNN", "MultiheadAttention") and m.dropout != 0)
    )
    return Effects(writes_state=written, random=draws, impure=name == "SyncBatchNorm", same_sizes=True)
