"""A replacement for torch's ``CapabilityBasedPartitioner``: the same partitions, in linear time, effects respected."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import fx
from torch.fx import Node
from torch.fx.passes.infra.partitioner import Partition
from torch.fx.passes.operator_support import OperatorSupportBase

from splitkit.checks import are_texts, count, nbytes, shown
from splitkit.engine.fuse_partitions import fuse_partitions, fusible_nodes
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow, analyze, require_graph
from splitkit.graph.dependences import Before, all_dependences
from splitkit.search.adjacent import (
    ALWAYS_TRANSPARENT,
    Load,
    PartitionLimits,
    Partitions,
    border_nodes,
    by_levels,
    by_readers,
    computing_calls,
    fewest_partitions,
    loads_of,
    move_members,
    owners_of,
)


class CapabilityBasedPartitioner:
    """Divide a graph into partitions of supported nodes, as ``torch.fx.passes.infra.partitioner`` does, and fuse them.

    The partitions, their ids and the order of their nodes equal torch's wherever torch's can be fused without changing
    results. ``docs/partitioner.md`` lists what differs. Time is linear in nodes and edges, except with
    ``skip_horizontal_fusion`` on graphs that are made to be hard.

    Args:
        graph_module: the graph. `fuse_partitions` modifies it.
        operator_support: what the backend can run: an object with ``is_node_supported(submodules, node)``.
        allows_single_node_partition: keep partitions that compute only one thing.
        non_compute_ops: qualified names of functions that compute nothing (``"torch.ops.aten.permute"``), besides views
            and ``getitem``.
        allowed_single_node_partition_ops: qualified names of functions that are worth a partition of their own.
        skip_horizontal_fusion: put nodes together only if they read each other.
        max_nodes: the most nodes of a partition.
        max_parameter_bytes: the most bytes of parameters, buffers and constants that the nodes of a partition read,
            each tensor counted once per partition: a number or a text (``"2GiB"``). A node that exceeds a limit alone
            counts as unsupported.

    Raises:
        GraphError: SK101 if ``graph_module`` is not a graph module.
        PolicyError: SK302 if a limit is not a positive number, names are a single string, or ``operator_support`` has
            no ``is_node_supported``.
    """

    def __init__(
        self,
        graph_module: fx.GraphModule,
        operator_support: OperatorSupportBase,
        allows_single_node_partition: bool = False,
        non_compute_ops: Sequence[str] | None = None,
        allowed_single_node_partition_ops: Sequence[str] | None = None,
        skip_horizontal_fusion: bool = False,
        *,
        max_nodes: int | None = None,
        max_parameter_bytes: int | str | None = None,
    ) -> None:
        owner = type(self).__name__
        if not hasattr(operator_support, "is_node_supported"):
            raise PolicyError(
                "SK302",
                f"{owner}(operator_support={shown(operator_support)})",
                "Give an object with is_node_supported(submodules, node), such as "
                "torch.fx.passes.operator_support.create_op_support(lambda submodules, node: ...).",
            )
        self.graph_module = require_graph(graph_module)
        self.operator_support = operator_support
        self.allows_single_node_partition = allows_single_node_partition
        self.non_compute_ops = _names(owner, "non_compute_ops", non_compute_ops)
        self.allowed_single_node_partition_ops = _names(
            owner, "allowed_single_node_partition_ops", allowed_single_node_partition_ops
        )
        self.skip_horizontal_fusion = skip_horizontal_fusion
        self.max_nodes = None if max_nodes is None else count(owner, "max_nodes", max_nodes)
        self.max_parameter_bytes = (
            None if max_parameter_bytes is None else nbytes(owner, "max_parameter_bytes", max_parameter_bytes, least=1)
        )

    def propose_partitions(self) -> list[Partition]:
        """Return the partitions, ordered by id. Each maps its nodes to their places from the end of the graph."""
        flow = analyze(self.graph_module)
        before = all_dependences(flow)
        supported = self._supported(flow)
        if self._limits:
            made = self._limited(flow, before, supported)
        else:
            made = move_members(_with_places(before, self._divided(before, supported, {})), before)
        if not self.allows_single_node_partition:
            transparent = ALWAYS_TRANSPARENT.union(self.non_compute_ops)
            worth = self.allowed_single_node_partition_ops
            made = {i: nodes for i, nodes in made.items() if computing_calls(nodes, transparent, worth) > 1}
        rows: list[tuple[int, Any]] = sorted(made.items())
        return [Partition(number, nodes, nodes.values()) for number, nodes in rows if nodes]

    def fuse_partitions(self, partitions: Sequence[Partition], prefix: str = "fused_") -> fx.GraphModule:
        """Replace each partition by a call of a module ``prefix0``, ``prefix1`` ...; return the graph module.

        The fused graph computes the same results, including writes and random numbers. Inputs of the graph and its
        output are never fused.

        Raises:
            PlanError: SK310 if a node is in two partitions, or is not a node of the graph.
            CycleError: SK311 if partitions wait for each other. Nothing has been changed.
        """
        return fuse_partitions(analyze(self.graph_module), [partition.nodes for partition in partitions], prefix)

    def partition_and_fuse(self, prefix: str = "fused_") -> fx.GraphModule:
        """Propose partitions and fuse them."""
        return self.fuse_partitions(self.propose_partitions(), prefix=prefix)

    def remove_bookend_non_compute_ops(self, partitions: Sequence[Partition]) -> None:
        """Remove from each partition the nodes in ``non_compute_ops`` that no computing node precedes, or follows."""
        flow = analyze(self.graph_module)
        before, transparent = all_dependences(flow), set(self.non_compute_ops)
        fusible_nodes(flow, [partition.nodes for partition in partitions])
        for partition in partitions:
            for node in border_nodes(partition.nodes, before, flow.index, transparent):
                del partition.nodes[node]

    def fewest_partitions(self, partitions: Sequence[Partition]) -> int:
        """Return a lower bound on the number of partitions that hold the nodes of ``partitions`` within the limits.

        No algorithm divides these nodes into fewer partitions, if the other nodes stay outside. Without limits, the
        bound is the minimum.
        """
        flow = analyze(self.graph_module)
        before = all_dependences(flow)
        found = fusible_nodes(flow, [partition.nodes for partition in partitions])
        inside = [node for nodes in found.values() for node in nodes]
        members = dict.fromkeys(before, False) | dict.fromkeys(inside, True)
        loads = loads_of(flow, inside, self._limits, {})
        return fewest_partitions(before, members, self._limits, loads)

    def _is_node_supported(self, node: Node) -> bool:
        """Return whether the backend can run a node. Subclasses of torch's class call and override this."""
        return self.operator_support.is_node_supported(dict(self.graph_module.named_modules()), node)

    @property
    def _limits(self) -> PartitionLimits:
        return PartitionLimits(self.max_nodes, self.max_parameter_bytes)

    def _supported(self, flow: Dataflow) -> dict[Node, bool]:
        """Return which nodes may be in a partition; a module of its own would not see attributes bound anew."""
        ask = self._is_node_supported
        if type(self)._is_node_supported is CapabilityBasedPartitioner._is_node_supported:
            submodules = dict(self.graph_module.named_modules())  # once, not for every node
            ask = partial(self.operator_support.is_node_supported, submodules)
        answers = {node: bool(ask(node)) for node in reversed(list(flow.index))}
        rebound = {*flow.bindings.reads, *flow.bindings.calls}
        return {node: answers[node] and node not in rebound for node in flow.index}

    def _limited(self, flow: Dataflow, before: Before, supported: dict[Node, bool]) -> Partitions:
        owners = owners_of(before)
        loads = loads_of(flow, [node for node, yes in supported.items() if yes], self._limits, owners)
        supported = supported | {n: False for n, load in loads.items() if not Load().fits_with(load, self._limits)}
        made = _with_places(before, self._divided(before, supported, loads))
        number_of = {node: number for number, nodes in made.items() for node in nodes}
        for member, owner in owners.items():
            if (number := number_of.get(member)) != number_of.get(owner):
                if number is not None:
                    del made[number][member]
                if owner in number_of:
                    made[number_of[owner]][member] = None
        return made

    def _divided(self, before: Before, supported: dict[Node, bool], loads: dict[Node, Load]) -> dict[int, list[Node]]:
        """Return torch's id of each partition -> its nodes."""
        if self.skip_horizontal_fusion:
            return by_readers(before, supported, self._limits, loads)
        numbers = {node: i for i, node in enumerate(n for n in reversed(list(before)) if supported[n])}
        # A merged partition keeps the id of the larger one, of the earlier node's if both are equal.
        row = by_levels(before, supported, self._limits, loads)
        return {numbers[nodes[min(1, len(nodes) - 1)]]: nodes for nodes in row}


def _names(owner: str, field: str, given: Sequence[str] | None) -> Sequence[str]:
    if given is not None and not are_texts(given):
        remedy = f'{field} lists qualified names of functions, such as ["torch.ops.aten.permute"].'
        raise PolicyError("SK302", f"{owner}({field}={shown(given)})", remedy)
    return [] if given is None else given


def _with_places(before: Before, partitions: dict[int, list[Node]]) -> Partitions:
    """Return the partitions in the order of the graph, and each node's place from its end."""
    places = {node: place for place, node in enumerate(reversed(list(before)))}
    return {
        number: {node: places[node] for node in sorted(nodes, key=places.__getitem__, reverse=True)}
        for number, nodes in partitions.items()
    }
