"""Describe the values that forward saves for backward by module and op."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from splitkit.graph.dataflow import module_path
from splitkit.graph.node_values import storage_bytes
from splitkit.graph.storages import storage_key, tensors, value_of
from splitkit.units import size


@dataclass(frozen=True)
class SavedValue:
    """A value that forward saves for backward.

    Attributes:
        name: the name of the node that makes it.
        module: the innermost module that computes it, ``""`` for the model itself.
        op: the op that computes it, such as ``"softmax"``; ``"input"`` for inputs and parameters.
        nbytes: the bytes of its storage; 0 for inputs, parameters and views of them.
    """

    name: str
    module: str
    op: str
    nbytes: int

    @classmethod
    def of(cls, node: Node, held: Collection[object]) -> SavedValue:
        """Describe a node of forward; storages in ``held`` are the caller's."""
        if node.op in ("placeholder", "get_attr"):
            return cls(node.name, "", "input", 0)
        own = [t for t in tensors(value_of(node)) if storage_key(t) not in held]
        return cls(node.name, module_path(node), op_of(node), sum(map(storage_bytes, own)))

    def __str__(self) -> str:
        return f"{self.label} ({size(self.nbytes)})"

    @property
    def label(self) -> str:
        """Module and op: ``"transformer.h.0.attn: softmax"``."""
        return f"{self.module or 'the model'}: {self.op}"


def op_of(node: Node) -> str:
    """Return the short name of the op that computes a node; for a member of a tuple, of the tuple's op."""
    target: Any = node.target
    if getattr(target, "__name__", "") == "getitem" and node.args and isinstance(node.args[0], Node):
        return op_of(node.args[0])
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).strip("_")
