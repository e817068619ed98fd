"""Divides the backward of a stage into its input and weight parts, for schedules that run these apart.

The input part computes the gradients that go to earlier stages, and what these need. The rest is the weight part, as in
torchtitan's GraphPP. What the weight part reads waits for it. `StageBackward.waiting` is the one place that knows this
rule.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch.fx import Node

from splitkit.search.pipelines.stage_members import StageMembers

Ints = NDArray[np.int64]


class StageBackward:
    """The two parts of backward of all stages of a joint graph."""

    def __init__(self, members: StageMembers) -> None:
        self.members, positions = members, members.positions
        self.positions = positions
        forward = set(positions.forward)
        place = positions.place
        nodes = [n for n in positions.flow.nodes if n in place and n not in forward]
        reach: dict[Node, int] = {}
        for node in reversed(nodes):
            readers = [reach[r] for r in positions.readers(node) if r in reach and r not in positions.ties]
            reach[node] = min([place[node], *readers])
        self._nodes = nodes
        self._at = np.array([place[n] for n in nodes], np.int64)
        self._reach = np.array([reach[n] for n in nodes], np.int64)
        self._numbers = np.array([members.order.number[n] for n in nodes], np.int64)

    def _weights(self, start: int, end: int) -> np.ndarray:
        return np.flatnonzero((self._at >= start) & (self._at < end) & (self._reach >= start))

    def nodes_of_backward(self) -> tuple[Ints, Ints, Ints]:
        """Return (n,) position, reach and number of all nodes of backward.

        A node is in the weight part of each stage that starts at its reach or before and contains its position.
        """
        return self._at, self._reach, self._numbers

    def reads_of_backward(self) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
        """Return (r,) arrays, one entry for each storage that a node of backward reads.

        The reader's position and reach; the storage, its bytes, and the position and reach of its maker, -1 if
        forward makes it.
        """
        flow, place = self.positions.flow, self.positions.place
        reach = dict(zip(self._nodes, self._reach.tolist(), strict=True))
        rows = [
            (place[node], reach[node], root, flow.storages.nbytes[root], place.get(maker, -1), reach.get(maker, -1))
            for node in self._nodes
            for read in node.all_input_nodes
            for maker in [flow.producer(read)]
            for root in flow.storages.under(read)
        ]
        at, own, root, nbytes, made, makers = np.array(rows, np.int64).reshape(-1, 6).T
        return at, own, root, nbytes, made, makers

    def weight_nodes(self, start: int, end: int) -> list[Node]:
        """Return the nodes of the weight part of a stage that is not the first."""
        return [self._nodes[i] for i in self._weights(start, end).tolist()]

    def weights(self, start: int, end: int) -> frozenset[int]:
        """Return the numbers of the ops that a stage runs in its weight part if it computes them in backward."""
        return frozenset(self._numbers[self._weights(start, end) if start else self._at < end].tolist())

    def waiting(self, start: int, end: int, received: int) -> int:
        """Return the bytes that wait for the weight part: the storages that it reads and does not make.

        Args:
            start: the first position of the stage, not 0.
            end: the position behind its last.
            received: bytes that the stage received, which are held to the end of its backward.
        """
        flow = self.positions.flow
        weights = self.weight_nodes(start, end)
        own = set(weights)
        reads = {r for node in weights for r in node.all_input_nodes if flow.producer(r) not in own}
        place = self.positions.place
        inside = (r for r in reads if place.get(flow.producer(r), -1) >= start)
        roots = {root for r in inside for root in flow.storages.under(r)}
        return received + sum(flow.storages.nbytes[root] for root in roots)
