"""As few consecutive parts as hold so many bytes of parameters each."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from splitkit.extend import (
    Claim,
    Costs,
    Dataflow,
    NoPlanError,
    Plan,
    checks,
    is_small,
    module_path,
    size,
    storage_bytes,
    storage_key,
)


@dataclass(frozen=True)
class ByParameterBytes:
    """As few consecutive parts, along graph order, as hold at most ``limit`` bytes of parameters and buffers each.

    A storage counts whole, once in every part that reads it, however many of its nodes do and under whatever names.
    Nodes that read none go with the part before; those before the first parameter are in the first part::

        relu   w1 (4)   sin   w2 (4)   w1 (tied)   w3 (4)    limit = 8
        ──0─────────────────────────────────────  ──1───

    Fewest: no plan of consecutive parts along graph order has fewer; parts along another order might. Activations do
    not count (`splitkit.policies.MemoryBudget` weighs them), nor do parameters that are inputs of the graph.

    Attributes:
        limit: bytes, as a number or a text (``"1GiB"``).
    """

    limit: int | str

    def __post_init__(self) -> None:
        self._limit()

    def _limit(self) -> int:
        return checks.nbytes(self, "limit", self.limit, 1)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Parts are ``0, 1, ...``; needs no costs.

        Raises:
            NoPlanError: SK303 if one node alone reads more than the limit; says the least limit that has a plan.
        """
        limit, held = self._limit(), _storages(flow)
        if not held:
            return Plan.of({}, "no parts: the graph has no nodes to place")
        _require_room(limit, held)
        # Legal: values and `flow.after` lead from earlier nodes to later ones, nothing is copied; so parts along graph
        # order depend on earlier parts alone.
        # Optimal: a run of nodes within one that fits fits too. So, part by part, greedy ends no earlier than any other
        # plan (it begins no earlier, and goes on as far as fits), and is through with no more parts.
        labels: dict[Node, int] = {}
        full: list[int] = [0]
        part: set[Hashable] = set()
        for node, storages in held.items():
            if full[-1] + sum(nbytes for key, nbytes in storages.items() if key not in part) > limit:
                full.append(0)
                part = set()
            full[-1] += sum(nbytes for key, nbytes in storages.items() if key not in part)
            part |= storages.keys()
            labels[node] = len(full) - 1
        count, fullest = len(full), full.index(max(full))
        note = (
            f"{count} part{'s' * (count > 1)} along graph order; part {fullest} is fullest: "
            f"{size(full[fullest])} of {size(limit)} of parameters"
        )
        return replace(Plan.of(labels, note), claim=Claim("parts", count, count, "greedy", fullest))


def _storages(flow: Dataflow) -> dict[Node, dict[Hashable, int]]:
    """Node -> the storages that its part then holds, and their bytes."""
    held: dict[Node, dict[Hashable, int]] = {}
    for node in flow.nodes:
        held[node] = {storage_key(tensor): storage_bytes(tensor) for tensor in flow.owned(node)}
        for read in node.all_input_nodes:
            if read in held and is_small(read):  # `w.size()` is asked again where it is read: w comes along
                held[node] |= held[read]
    return held


def _require_room(limit: int, held: Mapping[Node, Mapping[Hashable, int]]) -> None:
    """Refuse a limit that one node alone exceeds; any other has a plan: each node a part."""
    node = max(held, key=lambda node: sum(held[node].values()))
    need = sum(held[node].values())
    if need > limit:
        where = f" in {module_path(node)}" if module_path(node) else ""
        raise NoPlanError(
            "SK303",
            f"{node.name}{where} alone reads {need} bytes of parameters ({size(need)}), and a part may hold {limit}",
            f"ByParameterBytes({need}) is the least limit that has a plan.",
            [node],
        )
