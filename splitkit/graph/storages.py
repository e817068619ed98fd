"""Identify storages: which tensors, values and attributes of a graph share memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, cast

import torch
from torch import fx
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.errors import GraphError


def shares_memory(gm: fx.GraphModule) -> bool:
    """Whether the graph's values (``meta["val"]``) show which nodes share memory.

    They do not if the value of an op that always aliases has a storage of its own.
    """
    for node in gm.graph.nodes:
        if node.op == "call_function" and always_aliases(node.target) and node.all_input_nodes:
            first = node.all_input_nodes[0]
            mine, other = storages_shown([node]), storages_shown([first])
            if first.op != "get_attr" and mine.isdisjoint(other):
                return False
    return True


def storages_shown(nodes: Iterable[Node]) -> set[Hashable]:
    """Return the keys of the storages of the nodes' values."""
    return {storage_key(t) for n in nodes for t in tensors(value_of(n))}


_ONE = "splitkit.one_tensor"


def mark_repeated_inputs(inputs: Iterable[tuple[Node, object]]) -> None:
    """Note on placeholders which of them were given the same tensor at capture, such as ``labels=input_ids``.

    They stay separate inputs, which may be given two tensors; but the memory that capture gave to both counts once.

    Args:
        inputs: placeholders with the arguments given for them.
    """
    groups: dict[int, list[Node]] = {}
    for node, given in inputs:
        if isinstance(given, torch.Tensor):
            groups.setdefault(id(given), []).append(node)
    for number, nodes in enumerate(group for group in groups.values() if len(group) > 1):
        for node in nodes:
            node.meta[_ONE] = number


def repeated_group(node: Node) -> int | None:
    """Return a number equal for placeholders that were given the same tensor at capture, ``None`` for all others."""
    found: int | None = node.meta.get(_ONE)
    return found


VIEWS = frozenset(
    [
        "view",
        "t",
        "transpose",
        "permute",
        "expand",
        "slice",
        "select",
        "unsqueeze",
        "squeeze",
        "detach",
        "alias",
        "as_strided",
        "split",
    ]
)
"""Names of ops whose result is a view for all arguments; `reshape` and `to` may copy."""


@cache
def always_aliases(target: object) -> bool:
    """Whether the result of an op is always (a view of) its first argument."""
    if not isinstance(target, _torch.OpOverload):
        return False
    packet = target.overloadpacket
    if str(packet).removeprefix("aten.") in VIEWS:
        return True
    returned = _torch.schema_of(target).returns
    return len(returned) == 1 and _torch.is_written(returned[0])


def attribute(root: torch.nn.Module, target: str) -> object:
    """Return the object behind a dotted attribute name.

    Raises:
        GraphError: SK104 if there is none.
    """
    return Lookup(root)(target)


class Lookup:
    """Finds attributes of one module by their dotted names, and visits each module on the way once.

    No module may be replaced while a lookup is in use.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._owners: dict[str, object] = {"": root}

    def __call__(self, target: str) -> object:
        """Return the object behind a name.

        Raises:
            GraphError: SK104 if there is none.
        """
        path, _, name = target.rpartition(".")
        try:
            return _torch.member_of(self._owners[path] if path in self._owners else self.owner(path), name)
        except AttributeError as error:
            reason = f"the graph reads {target!r}, but its module has no such attribute"
            raise GraphError("SK104", reason, "Restore the attribute, or erase the node.", [target]) from error

    def owner(self, path: str) -> object:
        """Return the object at ``path``, usually a module; raise AttributeError if there is none."""
        if path not in self._owners:
            above, _, name = path.rpartition(".")
            self._owners[path] = _torch.member_of(self.owner(above), name)
        return self._owners[path]


def require_stored(find: Lookup, target: str) -> None:
    """Raise unless reading an attribute yields the same object each time: a parametrized weight is computed anew.

    Raises:
        GraphError: SK104 if it is computed, or is not there.
    """
    path, _, name = target.rpartition(".")
    try:
        owner = find.owner(path)
    except AttributeError:
        owner = None
    if isinstance(owner, torch.nn.Module):
        tables = _torch.attributes_of(owner)
        if name in tables.parameters or name in tables.buffers or name in tables.modules or name in vars(owner):
            return
        computed = "parametrizations" in tables.modules and is_parametrized(owner, name)
        if computed or (find(target) is not find(target) and isinstance(find(target), torch.Tensor)):
            raise GraphError(
                "SK104",
                f"the graph reads {target}, which its module computes anew at each read, so parts would disagree",
                "Capture the model again, which puts the computation into the graph: splitkit.capture(gm, *inputs). "
                "Or store the value: torch.nn.utils.parametrize.remove_parametrizations(module, name).",
                [target],
            )
    find(target)


def storage_key(tensor: torch.Tensor) -> Hashable:
    """Return a key equal for tensors that share memory; `shared_keys` looks into subclasses that wrap others.

    Sparse tensors, some subclasses and tensors of lazy modules have no storage: their key is their id.
    """
    try:
        storage = tensor.untyped_storage()
        span = address_range(storage)
        # in a tuple: a StorageWeakRef raises when it is compared with anything but another one
        return span[:2] if span else (_STORAGE, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError, ValueError):
        return id(tensor)


def address_range(storage: torch.UntypedStorage) -> tuple[torch.device, int, int] | None:
    """Return device, first address and end of a storage; ``None`` if it is empty, on meta, or a wrapper's.

    Memory is known by address, not by storage object, because ``torch.from_numpy`` makes several storages of one
    memory.
    """
    if storage.device.type == "meta" or not storage.nbytes():
        return None
    try:
        start = storage.data_ptr()
    except RuntimeError:  # a tensor subclass that wraps others has a storage without data
        return None
    return (storage.device, start, start + storage.nbytes()) if start else None


def shared_keys(given: Iterable[torch.Tensor]) -> Iterator[tuple[Hashable, Hashable]]:
    """Yield pairs of different keys (`storage_key`) that stand for common memory.

    They are the keys of a wrapper subclass and of the tensors inside it, and the keys of storages that overlap, such as
    those of ``torch.from_numpy(array)`` and ``torch.from_numpy(array[1:])``.
    """
    ends: dict[tuple[torch.device, int], int] = {}
    for tensor in {id(t): t for t in given if not is_lazy(t)}.values():
        for inner in tensors_inside(tensor):
            key: Any = storage_key(inner)
            if inner is not tensor:
                yield storage_key(tensor), key
            if type(key) is tuple and key[0] != _STORAGE:
                ends[key] = max(ends.get(key, 0), key[1] + inner.untyped_storage().nbytes())
    by_address = sorted(ends, key=lambda key: (str(key[0]), key[1]))
    end = 0
    for one, other in pairwise(by_address):
        end = max(end, ends[one]) if one[0] == other[0] else 0
        if other[1] < end:
            yield one, other


_STORAGE = "storage"


def tensors_inside(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that have the memory of a tensor, also tensors that a subclass keeps in its attributes."""
    for inner in _torch.plain_tensors(tensor):
        held = list(held_in(vars(inner))) if _is_wrapper(inner) else ()
        yield from (each for one in held for each in _torch.plain_tensors(one)) if held else (inner,)


def hides_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass that wraps others and neither names them nor shows them in its attributes."""
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    held = [list(_leaves(vars(inner))) for inner in _torch.plain_tensors(tensor) if _is_wrapper(inner)]
    return not all(
        any(isinstance(leaf, torch.Tensor) for leaf in leaves) and all(map(_shows, leaves)) for leaves in held
    )


def _shows(leaf: object) -> bool:
    if isinstance(leaf, torch.Tensor):
        return not any(map(_is_wrapper, _torch.plain_tensors(leaf)))
    return isinstance(leaf, _PLAIN)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a subclass without memory of its own; fake tensors are not: they have some on meta."""
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    try:
        storage = tensor.untyped_storage()
        return storage.device.type != "meta" and address_range(storage) is None
    except (NotImplementedError, RuntimeError, ValueError):
        return True


def start_of(tensor: torch.Tensor) -> Hashable:
    """Return a key equal for tensors that begin at the same place in memory."""
    try:
        return storage_key(tensor), tensor.storage_offset()
    except (NotImplementedError, RuntimeError, ValueError):
        return storage_key(tensor)


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte in the storage and the one after the last; (0, 0) for a tensor without elements."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0
    start, size = int(tensor.storage_offset()), tensor.element_size()
    last = start + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (int(last) + 1) * size


def overlapping(sharing: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors of one storage so that the byte ranges of different groups do not overlap."""
    groups: list[list[torch.Tensor]] = []
    # a sweep over the storage by first byte, as in merging intervals
    end = -1
    for tensor in sorted(sharing, key=byte_range):
        start, stop = byte_range(tensor)
        if start < end:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
        end = max(end, stop)
    return groups


def fills_its_range(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements are contiguous in memory, in any order of the dimensions."""
    step = 1
    for stride, length in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != step and 0 not in shape:
            return False
        step *= length
    return True


def parameters_and_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> tensor for all parameters and buffers of a module; tied tensors have several names."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return found | dict(module.named_buffers(remove_duplicate=False))


def names_of(held: Mapping[str, torch.Tensor]) -> dict[int, list[str]]:
    """Return id of a tensor -> all the names that it has among these."""
    found: dict[int, list[str]] = {}
    for name, tensor in held.items():
        found.setdefault(id(tensor), []).append(name)
    return found


def require_made(named: Mapping[str, torch.Tensor]) -> None:
    """Raise if a lazy module has yet to make one of these parameters and buffers.

    Raises:
        GraphError: SK112 with their names.
    """
    if waiting := [name for name, tensor in named.items() if is_lazy(tensor)]:
        raise GraphError(
            "SK112",
            f"{waiting[0]} has no size yet: a lazy module makes it at its first call",
            "Call the model once on real inputs; it may be captured and split before that.",
            waiting,
        )


def registered_tensors(value: object) -> tuple[torch.Tensor, ...]:
    """Return the parameters and buffers of a module, or the tensor itself."""
    if isinstance(value, torch.nn.Module):
        return (*value.parameters(), *value.buffers())
    return (value,) if isinstance(value, torch.Tensor) else ()


def owned_tensors(root: torch.nn.Module, nodes: Iterable[Node]) -> tuple[torch.Tensor, ...]:
    """Return the parameters, buffers and constants that nodes read; see `splitkit.graph.dataflow.Dataflow.owned`."""
    found: dict[Hashable, torch.Tensor] = {}
    for node in nodes:
        for tensor in (t for value in _held(root, node) for t in registered_tensors(value)):
            if is_lazy(tensor):
                require_made({f"a tensor of {node.name}": tensor})
            start = start_of(tensor)
            found[start] = max(found.get(start, tensor), tensor, key=_weight)
    return tuple(found.values())


def _held(root: torch.nn.Module, node: Node) -> Iterator[object]:
    """Yield the attributes that a node reads, the module that it calls, and the modules among its arguments."""
    for read in (node, *node.all_input_nodes):
        if read.op == "get_attr" or (read is node and node.op == "call_module"):
            yield attribute(root, str(read.target))
    yield from (a for a in node.args if isinstance(a, torch.nn.Module))


def _weight(tensor: torch.Tensor) -> tuple[bool, bool, int]:
    return isinstance(tensor, torch.nn.Parameter), tensor.requires_grad, tensor.numel()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in ``value``, a tensor or a pytree."""
    if isinstance(value, torch.Tensor):
        return iter((value,))
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


_CONTAINERS = (list, tuple, set, frozenset, dict, OrderedDict, torch.Size)
_PLAIN = (
    *(torch.nn.Module, torch.Generator, torch.dtype, torch.device, torch.layout, torch.memory_format),
    *(int, float, complex, bool, str, bytes, type(None), slice, range, type(Ellipsis)),
)


def held_in(value: object) -> Iterable[torch.Tensor]:
    """Return the tensors in a list, tuple, set or dict; they may be attributes of the graph under another name."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def is_plain(value: object) -> bool:
    """Whether a value shows all memory that it holds; an object of any other class may hide some."""
    return all(
        not hides_memory(leaf) if isinstance(leaf, torch.Tensor) else isinstance(leaf, _PLAIN)
        for leaf in _leaves(value)
    )


def _leaves(value: object) -> Iterable[object]:
    """Yield the items of nested containers, or the value itself."""
    left, seen = [value], set[int]()
    while left:
        item = left.pop()
        if type(item) not in _CONTAINERS:
            yield item
        elif id(item) not in seen:
            seen.add(id(item))
            left += item.values() if isinstance(item, dict) else cast(Iterable[object], item)


# Symbolic sizes: find the nodes that define a shape's symbols, and replace symbols by numbers.


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def value_of(node: Node) -> Any:
    """Return the node's value at capture: ``meta["val"]``, else ``meta["example_value"]``, else ``None``."""
    meta = node.meta
    return meta["val"] if "val" in meta else meta.get("example_value")


def is_symbolic(value: object) -> bool:
    """Whether a value or one of its sizes is a symbolic expression."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    if isinstance(value, (tuple, list)):
        return any(map(is_symbolic, value))
    return isinstance(value, _SYMBOLIC)


def symbol_nodes(graph: fx.Graph) -> Mapping[Any, Node]:
    """Return symbol -> the first node whose value is that symbol: a placeholder, or the ``sym_size`` of a tensor."""
    found: dict[Any, Node] = {}
    for node in graph.nodes:
        value = value_of(node)
        if isinstance(value, _SYMBOLIC):
            expression = value.node.expr
            if expression.is_Symbol:
                found.setdefault(expression, node)
    return found


def symbols_of(value: object) -> list[Any]:
    """Return the symbols in a value and its sizes, sorted by name."""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return sorted(free_symbols(value), key=str) if is_symbolic(value) else []


def plain_size(value: int | torch.SymInt, sizes: Mapping[str, int]) -> int:
    """Return a size as a plain int.

    A symbol is replaced by its entry in ``sizes``, else by its value at capture (its hint). A size that depends on data
    (``u0``) has no hint: it is replaced by the upper bound that the model states with ``torch._check(u0 <= 128)``.

    Raises:
        LookupError: with the names of the symbols that have none of these.
    """
    if isinstance(value, int):
        return value
    node: Any = value.node  # SymNode.expr, .shape_env, .hint: 2.11, 2.13, 2.15
    if not sizes and node.hint is not None:
        return int(node.hint)
    known = {symbol: _size_of_symbol(symbol, node.shape_env, sizes) for symbol in node.expr.free_symbols}
    unknown = sorted(str(symbol) for symbol, size in known.items() if size is None)
    if unknown:
        raise LookupError(*unknown)
    return int(node.expr.subs(known))


def assumed_upper_bounds(value: int | torch.SymInt, sizes: Mapping[str, int]) -> dict[str, int]:
    """Return symbol name -> upper bound, for the data-dependent symbols that `plain_size` replaces by a bound."""
    if isinstance(value, int) or value.node.hint is not None:  # SymNode.hint: 2.11, 2.13, 2.15
        return {}
    node: Any = value.node
    open_ = (s for s in node.expr.free_symbols if s not in node.shape_env.backed_var_to_val)
    found = {str(symbol): _size_of_symbol(symbol, node.shape_env, sizes) for symbol in open_}
    return {name: size for name, size in sorted(found.items()) if size is not None}


def _size_of_symbol(symbol: Any, shape_env: Any, sizes: Mapping[str, int]) -> int | None:
    if str(symbol) in sizes:
        return sizes[str(symbol)]
    if symbol in shape_env.backed_var_to_val:  # 2.11, 2.13, 2.15
        return int(shape_env.backed_var_to_val[symbol])
    upper = shape_env.var_to_range[symbol].upper  # 2.11, 2.13, 2.15
    return int(upper) if upper.is_number and upper.is_finite and upper < 2**48 else None


# Keep the values of buffers that no checkpoint has beside a graph that was captured on ``meta``.


_UNSAVED = "splitkit.unsaved_buffers"


def keep_values(gm: torch.nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Note the values of buffers of a graph module that are on ``meta`` and in no state dict.

    Args:
        gm: the graph module.
        values: name of a buffer -> its value, on the CPU.
    """
    if values:
        _torch.meta_of(gm)[_UNSAVED] = dict(values)


def kept_values(root: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return what `keep_values` noted: name of a buffer -> its value; empty for a module with nothing noted."""
    found: Mapping[str, torch.Tensor] = getattr(root, "meta", {}).get(_UNSAVED, {})
    return found


def known_value(root: torch.nn.Module, names: Iterable[str], tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a tensor on ``meta`` on the CPU, if no checkpoint is needed for it.

    Args:
        root: the graph module.
        names: the names of the tensor.
        tensor: the tensor. Without elements, it has no value that could be lost: caches begin with such constants.
    """
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    kept = kept_values(root)
    return next((kept[name] for name in names if name in kept), None)
