"""What forward saves for backward, as people know it: by module and op."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from splitkit.graph.dataflow import module_path
from splitkit.graph.sizes import storage_bytes
from splitkit.graph.storages import storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.units import size


@dataclass(frozen=True)
class SavedValue:
    """A value that forward hands to backward.

    Attributes:
        name: the name of the node that makes the value.
        module: the innermost module that computes it, ``""`` for the model itself.
        op: what computes it, such as ``"softmax"``; ``"input"`` for what the caller holds: inputs and parameters.
        nbytes: of its storage; 0 for what the caller holds, and views of it.
    """

    name: str
    module: str
    op: str
    nbytes: int

    @classmethod
    def of(cls, node: Node, held: Collection[object]) -> SavedValue:
        """Of a node of forward, given the storages that its caller holds."""
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
    """What computes a node, as people call it: for a member of a tuple, what computes the tuple."""
    target: Any = node.target
    if getattr(target, "__name__", "") == "getitem" and node.args and isinstance(node.args[0], Node):
        return op_of(node.args[0])
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", packet)).strip("_")
