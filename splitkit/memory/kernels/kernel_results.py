"""Where kernels differ from the fake tensors of a graph: whose memory a result shares, and how much it takes.

The values of a captured graph come from decompositions in Python, which guarantee shapes and dtypes only::

    op                     fake                      kernel
    dropout(x, p, False)   a copy                    x itself
    channel_shuffle(x, 1)  a view of x               a copy
    mse_loss(x, y)         one number                one number, in the memory of all the differences

The C++ code of a composite op is run on fake tensors (`splitkit.memory.kernels.temporaries`). For all others the schema
says whether they return new memory, and the table below which of them allocate more than they show. The table was found
by running every op that torch has samples of, and comparing by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import FakeTensor, pytree
from splitkit.graph.node_values import storage_bytes, storage_nbytes, value_in
from splitkit.graph.ops import effects_of
from splitkit.graph.storages import always_aliases, storage_key, tensors, value_of

# The ops that move a saved value to the host and back, beside the computation.
#
# ``to_host`` and ``to_device`` start a copy on the stream of their direction, and ``arrived`` lets the computation wait
# for it::
#
#     forward     x = ...    host = to_host(x)    ...    saved = arrived(host, x)       x is free from here on
#     backward    copy = to_device(saved)         ...    x = arrived(copy, saved)       x is read from here on
#
# ``arrived`` takes the source of the copy too, so that its memory is not freed before. On the CPU copies are complete
# at once. Torch's ops ``ao::offload`` and ``ao::wait_tensor`` do the same in private.


_PINNED = ("cuda", "xpu")  # devices that copy from and to page-locked memory beside their work
_DONE = "splitkit_copy_done"
"""The attribute of a copy that holds the event of its end. It lives as long as the copy."""


@cache
def _copy_stream(device: torch.device, back: bool) -> torch.Stream | None:
    """Return the stream of one direction; ``None`` for the CPU, and for devices that have one stream."""
    if device.type == "cpu":
        return None
    make: Any = torch.Stream
    try:
        found: torch.Stream = make(device=device)
    except RuntimeError:
        return None
    return found


def _copied(made: Tensor, source: Tensor, device: torch.device, back: bool) -> Tensor:
    """Copy ``source`` into ``made``, after what the device has been asked to do so far."""
    stream = _copy_stream(device, back)
    if stream is None:
        return made.copy_(source)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        # without page-locked memory, what the host holds could be written or freed before the copy ends
        made.copy_(source, non_blocking=device.type in _PINNED)
    setattr(made, _DONE, stream.record_event())
    return made


def _like(x: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device, pin_memory=pinned)


def _to_host(x: Tensor) -> Tensor:
    return _copied(_like(x, torch.device("cpu"), x.device.type in _PINNED), x, x.device, back=False)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    return _copied(_like(x, device), x, device, back=True)


def _arrived(copy: Tensor, source: Tensor) -> Tensor:
    done = getattr(copy, _DONE, None)
    if done is not None:
        device = source.device if copy.device.type == "cpu" else copy.device
        torch.accelerator.current_stream(device).wait_event(done)
    return copy


TO_HOST = _torch.define_op("to_host(Tensor x) -> Tensor", _to_host, lambda x: _like(x, torch.device("cpu")))
TO_DEVICE = _torch.define_op("to_device(Tensor x, Device device) -> Tensor", _to_device, _like)
ARRIVED = _torch.define_op("arrived(Tensor(a) copy, Tensor source) -> Tensor(a)", _arrived, lambda copy, source: copy)


def host_value(value: Tensor) -> Tensor:
    """Return the value of a copy on the host, for ``meta["val"]``; on the meta device it stays there."""
    if isinstance(value, FakeTensor):
        with value.fake_mode:
            return _like(value, torch.device("cpu"))
    return _like(value, value.device if value.device.type == "meta" else torch.device("cpu"))


Bytes = int | torch.SymInt
Lender = tuple[Node, Hashable]
"""A node that is read, and the key of one of its storages."""


ResultAliases = Sequence[int | None] | None
"""For each tensor of a result, the index of the argument tensor that shares its memory, or ``None``."""


@dataclass(frozen=True)
class ResultStorage:
    """One storage of a result.

    Attributes:
        key: its key in the node's value.
        held: the number of the argument's storage that it is; ``None`` if it is new.
        nbytes: its bytes if it is new, perhaps symbolic.
        tensor: the first tensor of the result that lies in it.
    """

    key: Hashable
    held: int | None
    nbytes: Bytes
    tensor: torch.Tensor


def storages_of(
    root: nn.Module,
    node: Node,
    value: Sequence[torch.Tensor],
    read: Mapping[Node, Mapping[Hashable, int]],
    aliases: ResultAliases = None,
) -> list[ResultStorage]:
    """Return the storages of a result, each once.

    Args:
        root: the module of the graph.
        node: the node that yields the result.
        value: the tensors of the result, as the graph has them.
        read: node that is read -> storage key -> number.
        aliases: what was observed when the node ran on fake tensors; ``None`` if it did not run.
    """
    found: dict[Hashable, ResultStorage] = {}
    origins = _origins(root, node, aliases)
    if origins is None or len(origins) != len(value):
        origins = [_AS_SHOWN] * len(value)
    for tensor, origin in zip(value, origins, strict=True):
        key = storage_key(tensor)
        shown = next((held[key] for held in read.values() if key in held), None)
        held = _viewed(node, read) if shown is None else shown
        if origin is None:
            held = None
        elif origin is not _AS_SHOWN:
            held = read.get(origin[0], {}).get(origin[1], shown)
        copied = held is None and shown is not None  # the fake shares the storage that the kernel copies
        nbytes = tensor.numel() * tensor.element_size() if copied else bytes_made(node, tensor)
        found.setdefault(key, ResultStorage(key, held, nbytes, tensor))
    return list(found.values())


_AS_SHOWN: Any = object()


def _viewed(node: Node, read: Mapping[Node, Mapping[Hashable, int]]) -> int | None:
    """Return the storage of a view's base where its value does not show it: constants get a new fake each time."""
    if not node.all_input_nodes or not always_aliases(node.target):
        return None
    numbers = set(read.get(node.all_input_nodes[0], {}).values())
    return numbers.pop() if len(numbers) == 1 else None


def _origins(root: nn.Module, node: Node, aliases: ResultAliases) -> Sequence[Lender | None] | None:
    """Return whose memory each tensor of a result shares (``None``: new), or ``None`` if the values show it rightly."""
    target = node.target
    if not isinstance(target, _torch.OpOverload) or target.namespace != "aten":
        return None
    if not _torch.is_composite(target):
        return None if effects_of(node, root).aliases else [None] * len(list(tensors(value_of(node))))
    if aliases is None or _open(node):
        return None
    read = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(n, Node)]
    given = [(n, storage_key(t)) for n in read for t in tensors(value_in(root, n))]
    return [None if i is None else given[i] for i in aliases]


def _open(node: Node) -> bool:
    """Return whether a size of the node depends on the data, so that the run on fake tensors used another one."""
    sizes = (s for n in (node, *node.all_input_nodes) for t in tensors(value_of(n)) for s in t.shape)
    return any(node_of.hint is None for s in sizes if (node_of := getattr(s, "node", None)))  # SymInt: 2.11, 2.13, 2.15


def bytes_made(node: Node, tensor: torch.Tensor) -> Bytes:
    """Return the bytes of the storage that a node makes for a result, perhaps symbolic."""
    if node.target not in _LARGER:
        return storage_nbytes(tensor)
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    return bytes_made_by(node.target, args, kwargs, tensor)


def bytes_made_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensor: torch.Tensor) -> Bytes:
    """Return the bytes of the storage that a call of an op makes for a result, perhaps symbolic."""
    rule = _LARGER.get(op)
    return storage_nbytes(tensor) if rule is None else rule(_bound(op, args, kwargs), tensor)


def as_seen(nbytes: Bytes, tensor: torch.Tensor) -> int:
    """Return ``nbytes`` as a plain number; if it depends on the data, `storage_bytes` of the tensor."""
    try:
        return _torch.size_hint(nbytes)
    except TypeError:
        return storage_bytes(tensor)


def _bound(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return name of a parameter -> its argument or default."""
    arguments = _torch.schema_of(op).arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return {**defaults, **dict(zip((a.name for a in arguments), args, strict=False)), **kwargs}


Rule = Callable[[Mapping[str, Any], torch.Tensor], Bytes]


def _reduced(*names: str) -> Rule:
    """Return the rule of a loss that computes all elements into the result's storage and then shrinks it to one."""

    def rule(given: Mapping[str, Any], tensor: torch.Tensor) -> Bytes:
        shapes = [given[name].shape for name in names if isinstance(given[name], torch.Tensor)]
        if given["reduction"] == 0 or not shapes:
            return storage_nbytes(tensor)
        elements: Bytes = prod(_broadcast(shapes))
        return elements * tensor.element_size()

    return rule


def _whole(given: Mapping[str, Any], tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a tensor with elements replaced: its whole storage is copied, if no elements overlap."""
    copied = given["self"]
    if not isinstance(copied, torch.Tensor) or any(isinstance(s, int) and s == 0 for s in copied.stride()):
        return storage_nbytes(tensor)
    return storage_nbytes(copied)


def _resized(given: Mapping[str, Any], tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a tensor that is made like the argument and then resized, which frees no memory."""
    argument, shown = given["self"], storage_nbytes(tensor)
    most: Bytes = torch.sym_max(argument.numel() * tensor.element_size(), shown)  # type: ignore[no-untyped-call]
    return most


def _bags(given: Mapping[str, Any], tensor: torch.Tensor) -> Bytes:
    """Return the bytes of a result of ``embedding_bag``: index results have one element more than they show."""
    one_more = tensor.ndim == 1 and (tensor.shape == given["indices"].shape or given["include_last_offset"])
    return storage_nbytes(tensor) + (tensor.element_size() if one_more and tensor.dtype == torch.int64 else 0)


def _broadcast(shapes: Sequence[Sequence[Bytes]]) -> list[Bytes]:
    """Return the broadcast shape without evaluating symbols: a size that is not the constant 1 wins."""
    found: list[Bytes] = []
    for i in range(1, max(map(len, shapes)) + 1):
        sizes = [shape[-i] for shape in shapes if len(shape) >= i]
        found.append(next((size for size in sizes if not (isinstance(size, int) and size == 1)), 1))
    return found


def _op(name: str) -> Any:
    return getattr(torch.ops.aten, name).default


_aten = torch.ops.aten
_LARGER: Mapping[Any, Rule] = {
    _aten.mse_loss.default: _reduced("self", "target"),
    _aten.smooth_l1_loss.default: _reduced("self", "target"),
    _aten.binary_cross_entropy.default: _reduced("self"),
    _aten.soft_margin_loss.default: _reduced("target"),
    _aten.im2col.default: _resized,
    _aten.col2im.default: _resized,
    _op("_embedding_bag"): _bags,
    _op("_embedding_bag_forward_only"): _bags,
    _op("_efficientzerotensor"): lambda given, tensor: 0,
    TO_HOST: lambda given, tensor: 0,  # not on the device that is counted
    _aten.slice_scatter.default: _whole,
    _aten.select_scatter.default: _whole,
    _aten.diagonal_scatter.default: _whole,
}
