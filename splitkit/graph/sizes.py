"""Bytes: of the values that nodes yield, and of the parameters and buffers that they read."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import HigherOrderOperator, OpOverload
from splitkit.errors import GraphError, listed
from splitkit.graph.checks import check_nodes
from splitkit.graph.fakecalls import hint
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import owned, tensors
from splitkit.graph.symbols import value_of


def elements(tensor: torch.Tensor) -> int:
    """Number of elements; a symbolic size is taken as seen at capture.

    One that only the data decides counts as the upper bound that the model states, as 1 where it states none.
    """
    return prod(map(hint, tensor.shape))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of ``tensor``, whatever storage it is a view of."""
    return elements(tensor) * tensor.element_size()


def storage_nbytes(tensor: torch.Tensor) -> int | torch.SymInt:
    """Bytes of the storage that ``tensor`` lies in, perhaps symbolic.

    Of the tensor where it has no storage, as sparse ones and some subclasses.
    """
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size()


def storage_bytes(tensor: torch.Tensor) -> int:
    """The same as a plain number: as seen at capture, or `tensor_bytes` where only the data decides."""
    try:
        return _torch.size_hint(storage_nbytes(tensor))
    except TypeError:
        return tensor_bytes(tensor)


def value_bytes(node: Node) -> int:
    """Bytes of the tensors that ``node`` yields, 0 if neither ``meta["val"]`` nor ``meta["example_value"]`` tells."""
    return sum(tensor_bytes(t) for t in tensors(value_of(node)))


def read_bytes(root: nn.Module, node: Node) -> int:
    """Bytes of the parameters and buffers that ``node`` reads: see `Dataflow.owned`."""
    return sum(map(tensor_bytes, owned(root, [node])))


def missing(graph: fx.Graph) -> list[Node]:
    """The nodes whose price needs a ``meta["val"]`` that is not there."""
    inert = ("get_attr", "output")
    found = [
        node
        for node in graph.nodes
        if "val" not in node.meta and node.op not in inert and not is_state_op(node) and not _yields_nothing(node)
    ]
    checks = check_nodes(graph) if found else {}
    return [node for node in found if node not in checks]


def _yields_nothing(node: Node) -> bool:
    """Whether there is no value to know of: checks (``_assert_async``), prints, and export's check of the inputs."""
    if node.op == "call_module":
        return not node.users and node.target == "_guards_fn"  # 2.11, 2.13, 2.15
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return bool(target.name() == "print")  # type: ignore[no-untyped-call]
    return isinstance(target, OpOverload) and not _torch.schema_of(target).returns


def require_values(graph: fx.Graph, but: Callable[[Node], bool] = lambda node: False) -> None:
    """Refuse a graph of which some nodes have no ``meta["val"]``, ``but`` those that need none.

    Raises:
        GraphError: SK102, naming them.
    """
    nodes = [node for node in missing(graph) if not but(node)]
    if not nodes:
        return
    raise GraphError(
        "SK102",
        f"{listed(nodes, 5)} have no meta['val'], so that their sizes are unknown",
        "Capture the model with splitkit.capture(model, *inputs), or add them: splitkit.propagate(gm, *inputs).",
        nodes,
    )
