"""Count the bytes of the values that nodes yield, and of the parameters and buffers that they read."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import HigherOrderOperator, OpOverload
from splitkit.errors import GraphError, listed
from splitkit.graph.check_nodes import check_nodes
from splitkit.graph.fake_calls import hint
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import owned_tensors, tensors
from splitkit.graph.symbols import value_of


def elements(tensor: torch.Tensor) -> int:
    """Return the number of elements; a symbolic size counts as its value at capture.

    A data-dependent size counts as the upper bound that the model states, or as 1 if it states none.
    """
    return prod(map(hint, tensor.shape))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of ``tensor``, whatever the size of its storage."""
    return elements(tensor) * tensor.element_size()


def storage_nbytes(tensor: torch.Tensor) -> int | torch.SymInt:
    """Return the bytes of the storage of ``tensor``, perhaps symbolic.

    Sparse tensors and some subclasses have no storage: for them, the bytes of the tensor's elements.
    """
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor.numel() * tensor.element_size()


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return `storage_nbytes` as a plain number: its value at capture, or `tensor_bytes` if it depends on data."""
    try:
        return _torch.size_hint(storage_nbytes(tensor))
    except TypeError:
        return tensor_bytes(tensor)


def value_bytes(node: Node) -> int:
    """Return the bytes of the tensors that ``node`` yields, 0 if its value is unknown (see `value_of`)."""
    return sum(tensor_bytes(t) for t in tensors(value_of(node)))


def read_bytes(root: nn.Module, node: Node) -> int:
    """Return the bytes of the parameters and buffers that ``node`` reads; see `Dataflow.owned`."""
    return sum(map(tensor_bytes, owned_tensors(root, [node])))


def nodes_without_values(graph: fx.Graph) -> list[Node]:
    """Return the nodes that lack a ``meta["val"]`` that their price needs."""
    inert = ("get_attr", "output")
    found = [
        node
        for node in graph.nodes
        if "val" not in node.meta and node.op not in inert and not is_state_op(node) and not _yields_nothing(node)
    ]
    checks = check_nodes(graph) if found else {}
    return [node for node in found if node not in checks]


def _yields_nothing(node: Node) -> bool:
    """Whether a node yields no value: checks (``_assert_async``), prints, and torch.export's check of the inputs."""
    if node.op == "call_module":
        return not node.users and node.target == "_guards_fn"  # 2.11, 2.13, 2.15
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return bool(target.name() == "print")  # type: ignore[no-untyped-call]
    return isinstance(target, OpOverload) and not _torch.schema_of(target).returns


def require_values(graph: fx.Graph, but: Callable[[Node], bool] = lambda node: False) -> None:
    """Raise unless all nodes have a ``meta["val"]``, except those for which ``but`` holds.

    Raises:
        GraphError: SK102 with the nodes that lack one.
    """
    nodes = [node for node in nodes_without_values(graph) if not but(node)]
    if not nodes:
        return
    raise GraphError(
        "SK102",
        f"{listed(nodes, 5)} have no meta['val'], so that their sizes are unknown",
        "Capture the model with splitkit.capture(model, *inputs), or add them: splitkit.extend.propagate(gm, *inputs).",
        nodes,
    )
