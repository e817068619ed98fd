"""Effects of modules of torch.nn, which follow from their class and settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, NoneType
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Node

from splitkit._torch import member_of
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import Effects, distinct_tensors, first_argument, replace_effects, union_effects
from splitkit.graph.ops.functions import torch_name


@dataclass(frozen=True)
class ModuleEffects:
    """The effects of a module as its caller sees them.

    Attributes:
        effects: its effects besides those on its arguments.
        writes: whether it may write its first argument (a graph: any argument).
        aliases: whether its output may share memory with its first argument (a graph: with any argument).
    """

    effects: Effects
    writes: bool = False
    aliases: bool = False


def find_attribute(root: nn.Module | None, target: object) -> Any:
    """Return the object behind a dotted name in a module; ``None`` if there is none."""
    value: Any = root
    try:
        for atom in str(target).split("."):
            value = member_of(value, atom)
    except AttributeError:
        return None
    return value


def body_modules(node: Node, root: nn.Module | None) -> dict[Node | nn.Module, nn.Module]:
    """Return argument -> module, for the modules among the arguments of a higher-order operator."""
    args: tuple[Any, ...] = node.args
    found: dict[Node | nn.Module, nn.Module] = {a: a for a in args if isinstance(a, nn.Module)}
    for n in node.all_input_nodes:
        if n.op == "get_attr" and isinstance(body := find_attribute(root, n.target), nn.Module):
            found[n] = body
    return found


def module_tensors(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the parameters, buffers and plain tensor attributes of a module and its children."""
    plain = (t for m in module.modules() for t in vars(m).values() if isinstance(t, torch.Tensor))
    return distinct_tensors((*module.parameters(), *module.buffers(), *plain))


def is_stock(module: object) -> bool:
    """Whether a module is of a class of torch.nn, without hooks, parametrizations or methods of its own."""
    if not isinstance(module, nn.Module) or not type(module).__module__.startswith("torch.nn.modules."):
        return False
    methods = (name for name, value in vars(module).items() if isinstance(value, (FunctionType, MethodType)))
    return not is_changed(module) and not any(hasattr(type(module), name) for name in methods)


def is_changed(module: nn.Module) -> bool:
    """Whether a module may do something else than its class: it has hooks, parametrizations or its own forward."""
    held = vars(module)
    if any(map(held.get, _HOOKS)) or "forward" in held:
        return True
    return "parametrizations" in held.get("_modules", ())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")  # 2.11, 2.13, 2.15


def stock_inside(m: nn.Module, children: Sequence[ModuleEffects]) -> ModuleEffects | None:
    """Return what a module of torch.nn does, given what its children do; ``None`` if that is not known.

    The answer covers both train and eval mode, as parts may change their mode later.
    """
    name, inplace = type(m).__name__, bool(getattr(m, "inplace", False))
    if name in op_tables.DROPOUT_MODULES:
        return ModuleEffects(Effects(random=cast(nn.Dropout, m).p != 0), inplace, True)
    effects = union_effects((_own(m, name), *(c.effects for c in children)))
    if name == "Sequential":
        return ModuleEffects(effects, *_in_turn(children))
    if name.startswith("Transformer") and name.endswith("Layer"):
        activation = getattr(m, "activation", None)
        if not isinstance(activation, nn.Module) and torch_name(activation) is None:
            return None
    if name in op_tables.FRESH_MODULES:
        return ModuleEffects(effects, inplace, inplace)
    return ModuleEffects(effects, any(c.writes for c in children), True) if name in op_tables.ALIAS_MODULES else None


def settled_effects(node: Node, module: nn.Module) -> Effects | None:
    """Return the effects of a module that follow from its class and ``inplace``; ``None`` if more must be looked at.

    The result equals that of `stock_inside`, in a tenth of the time: most modules that a graph calls are of this kind,
    and the answers of different modules cannot be shared. Such a module yields one tensor.
    """
    if type(module) not in _SETTLED or is_changed(module):
        return None
    held = vars(module)
    if held["_modules"]:
        return None
    own = [*held["_parameters"].values(), *held["_buffers"].values()]
    for name in held.keys() - _FIELDS:
        if type(held[name]) not in _SETTINGS:  # isinstance(..., torch.Tensor) is slow
            return None
    read = distinct_tensors([tensor for tensor in own if tensor is not None]) if own else ()
    if held.get("inplace", False):
        args = first_argument(node)
        return Effects(args, args, read, same_sizes=True)
    return replace_effects(_COMPUTES, reads_state=read) if read else _COMPUTES


_COMPUTES = Effects(same_sizes=True)
_FIELDS = frozenset(vars(nn.Module()))  # attributes of every module; none is itself a tensor
_SETTINGS = frozenset((bool, int, float, str, tuple, list, NoneType))
_BY_SETTINGS = (  # effects or results of these classes depend on other settings too
    *("AdaptiveLogSoftmax", "AdaptiveMaxPool", "BatchNorm", "Embedding", "FractionalMaxPool", "GRU", "InstanceNorm"),
    *("LSTM", "MaxPool", "MultiheadAttention", "RNN", "RReLU", "SyncBatchNorm"),
)
_SETTLED = frozenset(
    getattr(nn, name) for name in op_tables.FRESH_MODULES if hasattr(nn, name) and not name.startswith(_BY_SETTINGS)
)


def _in_turn(children: Sequence[ModuleEffects]) -> tuple[bool, bool]:
    """Return whether a chain of modules may write its input, and whether it may return it."""
    written, reached = False, True  # reached: the next module may get the input itself
    for child in children:
        written, reached = written or (reached and child.writes), reached and child.aliases
    return written, reached


def _own(m: Any, name: str) -> Effects:
    """Return the random numbers and state writes of one module without its children."""
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
