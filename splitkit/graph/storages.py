"""Identify storages: which tensors, values and attributes of a graph share memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.errors import GraphError
from splitkit.graph.symbols import value_of


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


# Ops whose result is a view for all arguments; `reshape` and `to` may copy.
_VIEWS = frozenset(
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


@cache
def always_aliases(target: object) -> bool:
    """Whether the result of an op is always (a view of) its first argument."""
    if not isinstance(target, _torch.OpOverload):
        return False
    packet = target.overloadpacket
    if str(packet).removeprefix("aten.") in _VIEWS:
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


_REAL = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def storage_key(tensor: torch.Tensor) -> Hashable:
    """Return a key equal for tensors that share memory.

    Sparse tensors, some subclasses and tensors of lazy modules have no storage: their key is their id.
    """
    try:
        storage = tensor.untyped_storage()
        if type(tensor) in _REAL and storage.device.type != "meta" and storage.nbytes():
            # by address, not by storage object: torch.from_numpy makes several storages of one memory
            return storage.device, storage.data_ptr()
        return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError, ValueError):
        return id(tensor)


def start_of(tensor: torch.Tensor) -> Hashable:
    """Return a key equal for tensors that begin at the same place in memory."""
    try:
        return storage_key(tensor), tensor.storage_offset()
    except (NotImplementedError, RuntimeError, ValueError):
        return storage_key(tensor)


def parameters_and_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> tensor for all parameters and buffers of a module; tied tensors have several names."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return found | dict(module.named_buffers(remove_duplicate=False))


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
