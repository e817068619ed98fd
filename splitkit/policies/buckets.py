"""The policy `Buckets`: parts whose gradients become ready together, to all-reduce while backward runs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from splitkit.extend import Costs, Dataflow, Plan, checks, readers_of
from splitkit.graph.dataflow import given_back
from splitkit.graph.node_values import tensor_bytes
from splitkit.graph.storages import start_of
from splitkit.plans.record import keep_books


@dataclass(frozen=True)
class Buckets:
    """Make consecutive parts whose parameters fill a bucket, from the end of the graph, where backward begins.

    A bucket is closed as soon as it has ``bytes`` or more and one of its values is used outside. Nodes before the
    first parameter belong to the first part. Parts are numbered in graph order, so the *last* one is ready first::

        w1 (4)   w2 (4)   w3 (4)   w4 (4)    bytes = 8, first = 4
        ──0───  ──1────────────── ──2───

    The rule and the parts are as in ``torch._dynamo.backends.distributed.DDPOptimizer``, except for parameters with
    several readers. Such a parameter counts once, at its first reader in the graph: the backward of that reader is the
    last to add to the gradient, and only then can the gradient be sent.

    Attributes:
        bytes: the size at which a bucket is full, as a number or a text (``"25MiB"``).
        first: the size at which the bucket that is ready first is full; ``bytes`` if not given. DDP keeps it small
            (1 MiB), so that sending begins early.
    """

    bytes: int | str
    first: int | str | None = None

    def __post_init__(self) -> None:
        self._caps()

    def _caps(self) -> tuple[int, int]:
        """The bytes at which the first bucket is full, and at which every other bucket is full."""
        cap = checks.nbytes(self, "bytes", self.bytes, 1)
        return (cap if self.first is None else checks.nbytes(self, "first", self.first, 1)), cap

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan whose parts are ints.

        Parameters that do not require grad, or that DDP was told to ignore, do not count.
        """
        cap, usual = self._caps()
        own, readers, given = _parameter_bytes(flow), readers_of(flow), given_back(flow)
        bucket: dict[Node, int] = {}
        number = size = total = 0
        is_used = False
        for node in reversed(flow.nodes):
            if size >= cap and is_used:
                number, size, cap, is_used = number + 1, 0, usual, False
            bucket[node] = number
            size, total = size + own.get(node, 0), total + own.get(node, 0)
            is_used |= node in given or any(bucket[reader] != number for reader in readers[node])
        last = number if size or not number else number - 1  # nodes before the first parameter join the first bucket
        labels = {node: max(last - bucket[node], 0) for node in flow.nodes}
        return keep_books(flow, Plan.of(labels, f"{last + 1} buckets of {total} bytes of parameters"))


def _parameter_bytes(flow: Dataflow) -> dict[Node, int]:
    """Return node -> the bytes of the parameters that it is the first to read."""
    seen: set[Hashable] = set()
    own: dict[Node, int] = {}
    for node in flow.nodes:
        made = (read.meta.get("example_value") for read in node.all_input_nodes if read.op == "placeholder")  # Dynamo's
        for tensor in (*flow.owned(node), *made):
            if not isinstance(tensor, nn.Parameter) or getattr(tensor, "_ddp_ignored", False):
                continue
            if tensor.requires_grad and (start := start_of(tensor)) not in seen:
                seen.add(start)
                own[node] = own.get(node, 0) + tensor_bytes(tensor)
    return own
