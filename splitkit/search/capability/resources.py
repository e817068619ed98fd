"""What a partition may hold at most: nodes, and bytes of parameters, each tensor counted once per partition."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow
from splitkit.graph.storages import start_of


@dataclass(frozen=True)
class PartitionLimits:
    """The most that a partition may hold; ``None`` is no limit.

    Attributes:
        nodes: the number of nodes, members of tuples included.
        parameter_bytes: bytes of parameters, buffers and constants.
    """

    nodes: int | None = None
    parameter_bytes: int | None = None

    def __bool__(self) -> bool:
        return self.nodes is not None or self.parameter_bytes is not None


@dataclass
class Load:
    """What a node or a partition holds.

    Attributes:
        nodes: the number of nodes.
        tensors: tensor -> its bytes.
        nbytes: their sum.
    """

    nodes: int = 0
    tensors: dict[Hashable, int] = field(default_factory=dict)
    nbytes: int = 0

    def __iadd__(self, other: Load) -> Load:
        self.nodes += other.nodes
        for tensor, nbytes in other.tensors.items():
            if tensor not in self.tensors:
                self.tensors[tensor] = nbytes
                self.nbytes += nbytes
        return self

    def fits_with(self, other: Load, limits: PartitionLimits) -> bool:
        """Return whether the two together keep to the limits."""
        if limits.nodes is not None and self.nodes + other.nodes > limits.nodes:
            return False
        if limits.parameter_bytes is None:
            return True
        new = sum(nbytes for tensor, nbytes in other.tensors.items() if tensor not in self.tensors)
        return self.nbytes + new <= limits.parameter_bytes


def loads_of(
    flow: Dataflow, nodes: Iterable[Node], limits: PartitionLimits, owners: Mapping[Node, Node]
) -> dict[Node, Load]:
    """Return what each node holds, with the members of its tuple, which hold nothing themselves.

    Args:
        flow: facts about the graph.
        nodes: the nodes of a backend.
        limits: what has no limit is not counted.
        owners: member of a tuple -> the node whose partition it joins.
    """
    found: dict[Node, Load] = {}
    for node in nodes:
        found[node] = load = Load()
        if node not in owners:
            load.nodes = 1
            if limits.parameter_bytes is not None and _reads_state(node):
                load += _tensors(flow, node)
    for owner in owners.values():
        if owner in found:
            found[owner].nodes += 1
    return found


def _reads_state(node: Node) -> bool:
    return node.op in ("call_module", "get_attr") or any(n.op == "get_attr" for n in node.all_input_nodes)


def _tensors(flow: Dataflow, node: Node) -> Load:
    sizes: dict[Hashable, int] = {start_of(t): t.numel() * t.element_size() for t in flow.owned(node)}
    return Load(tensors=sizes, nbytes=sum(sizes.values()))
