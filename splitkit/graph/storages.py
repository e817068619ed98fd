"""Whether the values of a graph (``meta["val"]``) show which nodes share memory, and which inputs are one tensor."""

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
    """Whether values show who shares memory: they do not if an op that must share has a storage of its own."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and must_share(node.target) and node.all_input_nodes:
            first = node.all_input_nodes[0]
            mine, other = storages_shown([node]), storages_shown([first])
            if first.op != "get_attr" and mine.isdisjoint(other):
                return False
    return True


def storages_shown(nodes: Iterable[Node]) -> set[Hashable]:
    """The storages that the values of nodes lie in."""
    return {storage_key(t) for n in nodes for t in tensors(value_of(n))}


_ONE = "splitkit.one_tensor"


def mark_repeated(inputs: Iterable[tuple[Node, object]]) -> None:
    """Note on placeholders which of them were given one tensor at capture, such as ``labels=input_ids``.

    They are inputs of their own all the same, and may be given two; but what is there for both counts once.

    Args:
        inputs: placeholders, and what was given for them.
    """
    groups: dict[int, list[Node]] = {}
    for node, given in inputs:
        if isinstance(given, torch.Tensor):
            groups.setdefault(id(given), []).append(node)
    for number, nodes in enumerate(group for group in groups.values() if len(group) > 1):
        for node in nodes:
            node.meta[_ONE] = number


def one_tensor(node: Node) -> int | None:
    """Equal for placeholders that were given one tensor at capture, ``None`` for one with a tensor of its own."""
    found: int | None = node.meta.get(_ONE)
    return found


# Ops whose result is a view, whatever they are given; `reshape` and `to` may copy.
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
def must_share(target: object) -> bool:
    """Whether the result of an op is always (a view of) its first argument."""
    if not isinstance(target, _torch.OpOverload):
        return False
    packet = target.overloadpacket
    if str(packet).removeprefix("aten.") in _VIEWS:
        return True
    returned = _torch.schema_of(target).returns  # .alias_info: 2.11, 2.13, 2.15
    return len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write


def attribute(root: torch.nn.Module, target: str) -> object:
    """The object behind a dotted attribute name.

    Raises:
        GraphError: SK104 when there is none.
    """
    return Lookup(root)(target)


class Lookup:
    """Finds many attributes of one module by their dotted names, and each module on the way once.

    It belongs to one question: while it is used, no module may be replaced.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._owners: dict[str, object] = {"": root}

    def __call__(self, target: str) -> object:
        """The object behind a name.

        Raises:
            GraphError: SK104 when there is none.
        """
        path, _, name = target.rpartition(".")
        try:
            return getattr(self._owners[path] if path in self._owners else self.owner(path), name)
        except AttributeError as error:
            reason = f"the graph reads {target!r}, but its module has no such attribute"
            raise GraphError("SK104", reason, "", [target]) from error

    def owner(self, path: str) -> object:
        """The object at ``path``, mostly a module; AttributeError where there is none."""
        if path not in self._owners:
            above, _, name = path.rpartition(".")
            self._owners[path] = getattr(self.owner(above), name)
        return self._owners[path]


_REAL = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def storage_key(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that share memory.

    The tensor's identity where it has no storage: sparse ones, some subclasses, and those that a lazy module makes.
    """
    try:
        storage = tensor.untyped_storage()
        if type(tensor) in _REAL and storage.device.type != "meta" and storage.nbytes():
            return storage.device, storage.data_ptr()  # one memory may have several storages: torch.from_numpy
        return StorageWeakRef(storage)  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError, ValueError):
        return id(tensor)


def start_of(tensor: torch.Tensor) -> Hashable:
    """Equal for tensors that begin at one place in memory; views of one storage may begin at several."""
    try:
        return storage_key(tensor), tensor.storage_offset()
    except (NotImplementedError, RuntimeError, ValueError):
        return storage_key(tensor)


def parameters_and_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All of a module, under each of their names."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return found | dict(module.named_buffers(remove_duplicate=False))


def require_made(named: Mapping[str, torch.Tensor]) -> None:
    """Refuse parameters and buffers that a lazy module has yet to make.

    Raises:
        GraphError: SK112.
    """
    if waiting := [name for name, tensor in named.items() if is_lazy(tensor)]:
        raise GraphError(
            "SK112",
            f"{waiting[0]} has no size yet: a lazy module makes it at its first call",
            "Call the model once on real inputs; it may be captured and split before that.",
            waiting,
        )


def registered(value: object) -> tuple[torch.Tensor, ...]:
    """The parameters and buffers of a module, or the tensor itself."""
    if isinstance(value, torch.nn.Module):
        return (*value.parameters(), *value.buffers())
    return (value,) if isinstance(value, torch.Tensor) else ()


def owned(root: torch.nn.Module, nodes: Iterable[Node]) -> tuple[torch.Tensor, ...]:
    """The parameters, buffers and constants that nodes read; see `splitkit.graph.dataflow.Dataflow.owned`."""
    found: dict[Hashable, torch.Tensor] = {}
    for node in nodes:
        for tensor in (t for value in _held(root, node) for t in registered(value)):
            if is_lazy(tensor):
                require_made({f"a tensor of {node.name}": tensor})
            start = start_of(tensor)
            found[start] = max(found.get(start, tensor), tensor, key=_weight)
    return tuple(found.values())


def _held(root: torch.nn.Module, node: Node) -> Iterator[object]:
    """Attributes among a node and its arguments, the module that it calls, and bodies that it is given as they are."""
    for read in (node, *node.all_input_nodes):
        if read.op == "get_attr" or (read is node and node.op == "call_module"):
            yield attribute(root, str(read.target))
    yield from (a for a in node.args if isinstance(a, torch.nn.Module))


def _weight(tensor: torch.Tensor) -> tuple[bool, bool, int]:
    return isinstance(tensor, torch.nn.Parameter), tensor.requires_grad, tensor.numel()


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in ``value``, a tensor or a tree of them."""
    if isinstance(value, torch.Tensor):
        return iter((value,))
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
