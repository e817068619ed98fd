"""Find out whether a node yields a tuple; a tuple cannot cross between parts as a tensor does."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, NoneType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch.fx import Node

from splitkit._torch import inputs_of, member_of
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import (
    Effects,
    Facts,
    distinct_tensors,
    first_argument,
    replace_effects,
    union_effects,
    unknown_effects,
)
from splitkit.graph.ops.functions import is_python, torch_name
from splitkit.graph.ops.schemas import matching_overloads, named_facts, packet_facts, schema_facts
from splitkit.graph.storages import value_of

Known = dict[Node, bool | None]
"""Node -> an answer of `is_tuple`; valid while the graph does not change."""


def is_tuple(node: Node, root: nn.Module | None = None, known: Known | None = None) -> bool | None:
    """Return whether a node yields a tuple or list (``True``) or a single value (``False``); ``None`` if unknown.

    ``meta["val"]`` or ``meta["example_value"]`` decides if there is one.

    Args:
        node: a node of any graph.
        root: the module that its ``call_module`` and ``get_attr`` targets belong to.
        known: the answers for other nodes, a cache that this call adds to. With one dictionary for all nodes of a
            graph, all answers take time linear in its edges.
    """
    known = {} if known is None else known
    left = [node]
    while left:  # not recursive: a chain of operators may be longer than Python's recursion limit
        last = left[-1]
        if last not in known and (before := [n for n in _stands_on(last) if n not in known]):
            left += before
            continue
        if left.pop() not in known:
            known[last] = _answer(last, root, known)
    return known[node]


def _stands_on(node: Node) -> Iterable[Node]:
    """Return the arguments whose answers decide the answer for a node."""
    if value_of(node) is not None:
        return ()
    if node.op == "output" or node.target is operator.getitem:
        return (a for a in node.args[:1] if isinstance(a, Node))
    return (a for a in node.args if isinstance(a, Node)) if is_sum(node) else ()


def _answer(node: Node, root: nn.Module | None, known: Known) -> bool | None:
    value = value_of(node)
    if value is not None:
        return isinstance(value, (tuple, list))
    if node.op == "output":
        return _argument(node.args[0], known)
    if node.op == "get_attr":
        found = find_attribute(root, node.target)
        return None if found is None else isinstance(found, (tuple, list))
    if node.op == "call_module":
        return _module(find_attribute(root, node.target))
    return _call(node, root, known) if node.op in ("call_function", "call_method") else None


def _call(node: Node, root: nn.Module | None, known: Known) -> bool | None:
    target: Any = node.target
    if isinstance(target, OpOverload):
        return schema_facts(target).yields_tuple
    if isinstance(target, HigherOrderOperator):
        return _agreed(_module(b) for b in body_modules(node, root).values())
    if isinstance(target, OpOverloadPacket):
        return _overloads(node, packet_facts(target))
    if target is operator.getitem:
        return _item(node, root, known)
    if is_python(node):
        return _python(node, known)
    name = torch_name(target)
    return None if name is None else _function(node, name)


def _argument(value: object, known: Known) -> bool | None:
    return known[value] if isinstance(value, Node) else isinstance(value, (tuple, list))


def _agreed(answers: Iterable[bool | None]) -> bool | None:
    found = set(answers)
    return found.pop() if len(found) == 1 else None


# ---------------------------------------------------------------- Python


def _python(node: Node, known: Known) -> bool | None:
    target: Any = node.target
    if target in (tuple, list, zip, divmod, torch.Size, sorted, enumerate, dict, set, frozenset):
        return True
    if target is getattr:
        name = node.args[1] if len(node.args) > 1 else None
        return True if name == "shape" else False if name in op_tables.SINGLE_ATTRIBUTES else None
    if is_sum(node):
        return any(_argument(a, known) for a in node.args)
    return None if target in (next, iter, reversed, max, min) else False


def is_sum(node: Node) -> bool:
    """Whether a node adds or repeats values that may be tuples or lists."""
    return node.op == "call_function" and node.target in _SUMS


_SUMS = (operator.add, operator.mul, operator.concat, operator.iadd, operator.imul)


def _item(node: Node, root: nn.Module | None, known: Known) -> bool | None:
    source, index = node.args[0], node.args[1]
    whole = known[source] if isinstance(source, Node) else None
    if not isinstance(source, Node) or not whole:
        return whole
    if isinstance(index, slice):
        return True
    if source.op == "call_module":  # LSTM yields (output, (h, c)); a graph may nest as it likes
        found = find_attribute(root, source.target)
        return index in (1, -1) if isinstance(found, nn.LSTM) else None if isinstance(found, fx.GraphModule) else False
    if isinstance(source.target, OpOverload):
        kinds = ["List[" in str(r.type) for r in source.target._schema.returns]
        return len(kinds) > 1 and isinstance(index, int) and -len(kinds) <= index < len(kinds) and kinds[index]
    # torch's functions and methods yield flat tuples; anything else may nest
    return False if source.op in ("call_function", "call_method") and torch_name(source.target) else None


# ---------------------------------------------------------------- torch


def _function(node: Node, name: str) -> bool | None:
    if node.target is F.embedding_bag:  # not torch.embedding_bag
        return False
    if name in op_tables.TUPLE_IF or "return_indices" in node.kwargs:
        return _flags(node, op_tables.TUPLE_IF.get(name, (("return_indices", -1),)))
    if name in ("where", "size", "stride") and len(node.args) + len(node.kwargs) == 1:
        return True
    if name in op_tables.FUNCTIONS:
        return op_tables.FUNCTIONS[name]
    if name in op_tables.ALIASING:
        return op_tables.ALIASING[name]
    if name.startswith("atleast_"):
        return len(node.args) > 1 or isinstance(node.args[0], (tuple, list))
    if name in op_tables.IN_PLACE_METHODS or name in op_tables.CHECKS or name in op_tables.CALLS_BACK:
        return False
    return _overloads(node, named_facts(name))


def _flags(node: Node, flags: Iterable[tuple[str, int]]) -> bool | None:
    values = [node.kwargs.get(k, node.args[i] if 0 <= i < len(node.args) else False) for k, i in flags]
    return None if any(isinstance(v, Node) for v in values) else any(values)


def _overloads(node: Node, overloads: tuple[Facts, ...]) -> bool | None:
    fits = matching_overloads(node, overloads)
    if len({f.yields_tuple for f in fits}) > 1:  # a node is more often a tensor than a number: torch.max(x, y)
        given = [(i, a) for i, a in enumerate(node.args) if isinstance(a, Node)]
        fits = tuple(f for f in fits if all("Tensor" in f.types[i] for i, _ in given if i < len(f.types))) or fits
    return _agreed(f.yields_tuple for f in fits)


def _module(m: object) -> bool | None:
    if isinstance(m, fx.GraphModule):
        return next((is_tuple(n, m) for n in m.graph.nodes if n.op == "output"), None)
    if not is_stock(m):
        return None
    if isinstance(m, nn.Sequential):
        return _module(m[-1]) if len(m) else None
    name = type(m).__name__
    if name in op_tables.TUPLE_MODULES or getattr(m, "return_indices", False):
        return True
    known = name in op_tables.FRESH_MODULES or name in op_tables.DROPOUT_MODULES or name in op_tables.ALIAS_MODULES
    return False if known and name != "Identity" else None


# Effects of Python functions and methods on lists, dicts and iterators, which they write, join and exhaust.


_ITERATORS: tuple[Any, ...] = (iter, reversed, enumerate, zip, map, filter)
_JOINS = (operator.or_, operator.and_, operator.xor, operator.sub)  # of sets and dicts
_GROWS = (operator.iadd, operator.iconcat, operator.ior, operator.ixor, "__iadd__", "__ior__", "__setitem__")


def container_effects(node: Node, root: nn.Module, known: Known) -> Effects | None:
    """Return the effects of a Python function or method on containers and iterators; ``None`` if it takes neither.

    ``known`` holds the answers of `is_tuple` about the graph.
    """
    target: Any = node.target
    everything = tuple(inputs_of(node))
    if target in _GROWS and is_container(node.args[0], root, known) is not False:
        return Effects(first_argument(node), everything, same_sizes=True)
    if node.op == "call_method":
        return _method(node, root, known)
    if not is_python(node):
        return None
    used_up = first_argument(node) if target is next else tuple(filter(is_iterator, everything))
    if used_up:
        return Effects(used_up, everything)
    if target in (operator.add, operator.mul) and is_tuple(node, root, known):
        return Effects(aliases=everything)
    if target in _JOINS and any(is_container(n, root, known) for n in everything):
        return Effects(aliases=everything)
    return None


def is_container(value: object, root: nn.Module, known: Known) -> bool | None:
    """Whether a value is a list, tuple, dict, set or iterator; ``None`` if that is not known."""
    if not isinstance(value, Node):
        return isinstance(value, (tuple, list, dict))
    yields_tuple = is_tuple(value, root, known)
    if yields_tuple or is_iterator(value):
        return True
    meta = value_of(value)
    if meta is None and value.op == "get_attr":
        meta = find_attribute(root, value.target)
    return yields_tuple if meta is None else isinstance(meta, (dict, set, frozenset, Iterator))


def is_iterator(value: Node) -> bool:
    """Whether a node yields an iterator (``iter``, ``zip`` ...)."""
    if value.op == "call_function" and value.target in _ITERATORS:
        return True
    known = value.meta.get("val")
    return value.target == "__iter__" or (known is not None and isinstance(known, Iterator))


def _method(node: Node, root: nn.Module, known: Known) -> Effects | None:
    kind = is_container(node.args[0], root, known) if node.args else None
    if kind and node.target in op_tables.CONTAINER_READS:
        return Effects(aliases=tuple(node.all_input_nodes))
    # tensors and lists have a `sort`; without readers it is the list's, as a tensor's only returns a result
    may_be_a_list = kind is None and node.target == "sort" and not node.users
    return unknown_effects(node) if kind or may_be_a_list else None


# Effects of modules of torch.nn, which follow from their class and settings.


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
