"""Whether tensors share memory, byte for byte, and the check by which a graph refuses a call whose inputs do.

The check is a node of the graph (`refuse_shared`), so that it is copied, traced, pickled and interpreted with the
graph. Under a compiler or another dispatch mode it calls an operator that does the same, which compiled and exported
programs keep.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, List, NamedTuple, cast  # noqa: UP035

import numpy as np
import torch
from torch import Tensor, fx
from torch.fx import Node
from torch.overrides import handle_torch_function, has_torch_function

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.errors import PlanError
from splitkit.graph.storages import address_range, hides_memory, tensors, tensors_inside

# Find the nodes of a split's parent that check its inputs and compute nothing.


_INPUT_OVERLAP_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)

_LIMIT = 10_000
"""The most candidates that numpy tries to decide whether two strided tensors overlap; beyond that they count as one.

The exact question is NP-hard (``numpy.shares_memory``), and a call of the model must not hang on it. Not tuned.
"""


class ByteRange(NamedTuple):
    """The bytes of a strided tensor.

    Attributes:
        space: the space that addresses refer to: a device, or a storage that has no address (meta, fake).
        start: the address of the first byte.
        end: the address behind the last byte.
        shape: the shape of the tensor.
        strides: the strides in bytes.
        width: the bytes of an element.
    """

    space: Hashable
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    width: int


_ANYWHERE = ByteRange("anywhere", 0, 1 << 64, (1,), (1,), 1)
"""The memory of a wrapper subclass that does not say which tensors it holds: it may overlap any other."""

_Row = tuple[str, int, list[list[Any]], bool]


class Use(NamedTuple):
    """A node that reads or writes memory: its place in the graph, and when it first and last runs in the split."""

    place: int
    first: int
    last: int
    writes: bool
    name: str


def out_of_order(uses: Iterable[Use]) -> tuple[Use, Use] | None:
    """Return two uses, one of them a write, that run in another order than in the graph, or ``None``."""
    latest: Use | None = None
    latest_write: Use | None = None
    for use in _by_node(uses):
        before = latest if use.writes else latest_write
        if before is not None and before.last >= use.first:
            return before, use
        if latest is None or use.last > latest.last:
            latest = use
        if use.writes and (latest_write is None or use.last > latest_write.last):
            latest_write = use
    return None


def _by_node(uses: Iterable[Use]) -> list[Use]:
    """Return one use per node, in graph order, since a node may use several of the compared values."""
    found: dict[int, Use] = {}
    for use in uses:
        if use.place not in found or use.writes:
            found[use.place] = use
    return [found[place] for place in sorted(found)]


def blocks(value: object, whole: bool = False) -> Iterator[ByteRange]:
    """Yield the memory of the tensors in ``value``; a wrapper subclass counts as the tensors inside it.

    Args:
        value: a tensor or a pytree of them.
        whole: count the whole storage of each tensor, not only the bytes that the tensor shows.
    """
    for tensor in (inner for leaf in tensors(value) for inner in tensors_inside(leaf)):
        if (block := _block(tensor, whole)) is not None:
            yield block


def _block(tensor: Tensor, whole: bool) -> ByteRange | None:
    """Return the memory of a plain tensor: ``None`` if it has no elements, its identity if it has no strides."""
    if not tensor.numel():
        return None
    try:
        if hides_memory(tensor):
            return _ANYWHERE
        storage = tensor.untyped_storage()
        size, width = storage.nbytes(), tensor.element_size()
        place = address_range(storage)
        space: Hashable = place[0] if place else ("storage", _torch.storage_id(storage))
        start = place[1] if place else 0
        if whole:
            return ByteRange(space, start, start + size, (size,), (1,), 1) if size else None
        start += int(tensor.storage_offset()) * width
        shape, strides = tuple(tensor.shape), tuple(stride * width for stride in tensor.stride())
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        return ByteRange(space, start, start + last + width, shape, strides, width)
    except (NotImplementedError, RuntimeError, ValueError):
        return ByteRange("object", id(tensor), id(tensor) + 1, (1,), (1,), 1)


def overlap(a: ByteRange, b: ByteRange) -> bool:
    """Return whether two tensors have a byte in common: exactly, unless numpy would need too long (`_LIMIT`)."""
    hidden = a is _ANYWHERE or b is _ANYWHERE
    if not hidden and (a.space != b.space or a.start >= b.end or b.start >= a.end):
        return False
    if hidden or a == b:
        return True
    try:
        base = min(a.start, b.start)
        return bool(np.shares_memory(_as_array(a, base), _as_array(b, base), max_work=cast(Any, _LIMIT)))
    except np.exceptions.TooHardError:
        return True


def _as_array(block: ByteRange, base: int) -> Any:
    """Return a block as a numpy array of which only the addresses are used; its bytes are never read."""
    described = {
        "version": 3,
        "typestr": "|u1",
        "data": (block.start - base + 4096, True),  # not 0, which numpy takes for a missing address
        "shape": (*block.shape, block.width),
        "strides": (*block.strides, 1),
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))


def refuse_shared(given: List[Tensor], whole: bool, table: str) -> None:  # noqa: UP006
    """Refuse a call whose inputs share memory that the parts of a split would use in another order than the graph.

    The annotations are for TorchScript, which compiles this function. Elsewhere ``given`` may hold any inputs: pytrees
    of tensors, and ``None`` for a missing one.

    Args:
        given: the inputs and attributes to compare.
        whole: whether the whole storages of some of them count, not only the bytes that the tensors show.
        table: as JSON, ``[name, class, uses, whole]`` for each of them; values of one class may share memory.

    Raises:
        PlanError: SK212.
    """
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        torch.ops.splitkit.refuse_shared(given, [i for i in range(len(given))], whole, table)  # noqa: C416
    else:
        _refuse_shared(given, whole, table)


def _refuse_shared(given: Sequence[Any], whole: bool, table: str) -> None:
    if not torch.compiler.is_compiling():
        if has_torch_function(given):
            handle_torch_function(cast(Any, refuse_shared), given, given, whole, table)
            return
        if not _torch.is_dispatched() and not torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            if not _are_apart(given, whole):
                _compare(given, range(len(given)), whole, table)
            return
    leaves, owners = [], []
    for owner, value in enumerate(given):
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, Tensor):
                leaves.append(leaf)
                owners.append(owner)
    torch.ops.splitkit.refuse_shared(leaves, owners, whole, table)


def _are_apart(given: Sequence[Any], whole: bool) -> bool:
    """Return whether addresses alone show that nothing is shared: a quick test, false for other than plain tensors."""
    spans = []
    try:
        for tensor in given:
            if tensor is None:
                continue
            if type(tensor) not in _INPUT_OVERLAP_PLAIN:
                return False
            if whole:
                storage = tensor.untyped_storage()
                start, size = storage.data_ptr(), storage.nbytes()
            else:
                start, size = tensor.data_ptr(), _extent(tensor)
            spans.append((start, start + size))
    except (NotImplementedError, RuntimeError, ValueError):
        return False
    spans.sort()
    return all(one[1] <= other[0] for one, other in pairwise(spans))


def _extent(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _compare(given: Sequence[Any], owners: Sequence[int], whole: bool, table: str) -> None:
    """Check all pairs of blocks; sorted by address, so only pairs that may overlap are compared."""
    known: list[_Row] = json.loads(table)
    owned = zip(given, owners, strict=True)
    found = [(block, owner) for value, owner in owned for block in blocks(value, whole and known[owner][3])]
    found.sort(key=lambda entry: entry[0].start)
    for i, (one, owner) in enumerate(found):
        for other, reader in found[i + 1 :]:
            if other.start >= one.end:
                break
            if known[owner][1] != known[reader][1] and overlap(one, other):
                _refuse(known[owner], known[reader], hidden=_ANYWHERE in (one, other))


_COPY = "Pass a copy (x.clone()) as one of them"
_NAME = "Let the subclass of one of them name the tensors that it wraps (__tensor_flatten__)"


def _refuse(*items: _Row, hidden: bool = False) -> None:
    found = out_of_order(Use(*use) for _, _, uses, _ in items for use in uses)
    if found is None:
        return
    one, other = found
    writer = one if one.writes else other
    raise PlanError(
        "SK212",
        f"{' and '.join(name for name, _, _, _ in items)} {'may ' if hidden else ''}share memory in this call, and "
        f"{writer.name} writes it: the graph runs {one.name} before {other.name}, the parts do not",
        f"{_NAME if hidden else _COPY}, or split into parts that keep the order of the graph. "
        "splitkit.split(..., check_inputs=False) leaves this check out.",
        [one.name, other.name],
    )


_REFUSE_SHARED = _torch.define_op(
    "refuse_shared(Tensor[] given, int[] owners, bool whole, str table) -> ()",
    _compare,
    lambda given, owners, whole, table: None,
    alias_analysis="CONSERVATIVE",  # otherwise TorchScript assumes that it has no effects, and removes it
)
CHECKS: tuple[Any, ...] = (refuse_shared, torch.ops.splitkit.refuse_shared, _REFUSE_SHARED)
"""The targets of nodes that are such checks."""
for _check in CHECKS:
    torch.fx.node.has_side_effect(_check)


def check_nodes(graph: fx.Graph) -> dict[Node, None]:
    """Return the nodes of a parent that check its inputs, and those that only read attributes for such checks."""
    found = {n: None for check in (*CHECKS, refuse_objects) for n in graph.find_nodes(op="call_function", target=check)}
    left = list(found)
    while left:
        for node in left.pop().all_input_nodes:
            reads = node.op == "get_attr" or node.target is getattr
            if reads and node not in found and all(user in found for user in node.users):
                found[node] = None
                left.append(node)
    return found


# The check by which a graph refuses a call that passes an object where its parts rely on a tensor.
#
# The check is a node of the graph, like the check of memory above.


_PLAIN = (
    *(Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, complex, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, np.generic, slice, range),
)


def refuse_objects(given: List[Tensor], table: str) -> None:  # noqa: UP006
    """Refuse a call that passes an object, or an array, as an input that was assumed to be a tensor.

    The annotations are for TorchScript, whose inputs are tensors. Elsewhere ``given`` may hold any inputs.

    Args:
        given: the inputs to check.
        table: as JSON, for each input its name and the values in it that were assumed to be tensors: the attributes and
            items that lead there, the node that relies on it, and whether an array is refused too.

    Raises:
        PlanError: SK219.
    """
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        pass
    else:
        _refuse_objects(given, table)


torch.fx.node.has_side_effect(refuse_objects)


def _refuse_objects(given: Sequence[Any], table: str) -> None:
    if not torch.compiler.is_compiling() and has_torch_function(given):
        handle_torch_function(cast(Any, refuse_objects), given, given, table)
        return
    if all(isinstance(value, Tensor) for value in given):
        return
    for value, (name, assumed) in zip(given, json.loads(table), strict=True):
        for path, by, no_array in assumed:
            for leaf in pytree.tree_leaves(_read(value, path)):
                if not isinstance(leaf, _PLAIN) and (no_array or not isinstance(leaf, np.ndarray)):
                    raise _refused(name, path, leaf, by)


def _read(value: Any, path: Sequence[tuple[bool, int | str]]) -> Any:
    """Return the value at a path, or a tensor on the way to it.

    The result is ``None`` if the path does not exist; the graph itself then says what is missing.
    """
    for is_attribute, key in path:
        if isinstance(value, Tensor):
            return value
        try:
            value = getattr(value, str(key)) if is_attribute else value[key]
        except (AttributeError, LookupError, TypeError):
            return None
    return value


def _refused(name: str, path: Sequence[tuple[bool, int | str]], leaf: object, by: str) -> PlanError:
    where = name + "".join(f".{key}" if is_attribute else f"[{key!r}]" for is_attribute, key in path)
    return PlanError(
        "SK219",
        f"{where} is a {type(leaf).__name__} in this call, but {by} was split as if it were a tensor, "
        "and on another object it may do anything",
        f"Annotate the input in forward ({name}: {type(leaf).__name__}), so that the graph knows it, and split again. "
        "splitkit.split(..., check_inputs=False) leaves this check out.",
        [by],
    )
