"""The policy `ByParameterBytes`: the fewest consecutive parts under a limit on parameter bytes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from splitkit.extend import Claim, Costs, Dataflow, NoPlanError, Plan, checks, module_path, size, storage_bytes
from splitkit.graph.storages import storage_key
from splitkit.plans.rewrite import is_small


@dataclass(frozen=True)
class ByParameterBytes:
    """Make the fewest consecutive parts, in graph order, with at most ``limit`` bytes of parameters and buffers each.

    The whole storage of a parameter counts, once in every part that reads it, however many of its nodes do so and under
    whatever names. Nodes without parameters join the part before; nodes before the first parameter are in the first::

        relu   w1 (4)   sin   w2 (4)   w1 (tied)   w3 (4)    limit = 8
        ──0─────────────────────────────────────  ──1───

    No plan of consecutive parts in graph order has fewer parts; a plan in another order might. Activations do
    not count (they do in `splitkit.policies.MemoryBudget`), nor do parameters that are inputs of the graph.

    Attributes:
        limit: the bytes, as a number or a text (``"1GiB"``).
    """

    limit: int | str

    def __post_init__(self) -> None:
        self._limit()

    def _limit(self) -> int:
        return checks.nbytes(self, "limit", self.limit, 1)

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the parts ``0, 1, ...``; the costs are not used.

        Raises:
            NoPlanError: SK303 if one node alone reads more than the limit; it says the lowest limit that has a plan.
        """
        limit, held = self._limit(), _storages(flow)
        if not held:
            return Plan.of({}, "no parts: the graph has no nodes to place")
        _require_room(limit, held)
        # Legal: values and `flow.after` lead from earlier nodes to later ones, and nothing is copied. Parts in graph
        # order therefore depend on earlier parts only.
        # Optimal: every segment of a segment that fits also fits. By induction the k-th greedy part ends no earlier
        # than the k-th part of any other plan, since it begins no earlier and is as long as possible. So greedy has no
        # more parts.
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
    """Return node -> {storage that the part of the node must hold: its bytes}."""
    held: dict[Node, dict[Hashable, int]] = {}
    for node in flow.nodes:
        held[node] = {storage_key(tensor): storage_bytes(tensor) for tensor in flow.owned(node)}
        for read in node.all_input_nodes:
            if read in held and is_small(read):  # each reader computes `w.size()` again, so it needs w
                held[node] |= held[read]
    return held


def _require_room(limit: int, held: Mapping[Node, Mapping[Hashable, int]]) -> None:
    """Refuse a limit that one node alone exceeds. Any other limit has a plan: one part per node."""
    node = max(held, key=lambda node: sum(held[node].values()))
    need = sum(held[node].values())
    if need > limit:
        where = f" in {module_path(node)}" if module_path(node) else ""
        raise NoPlanError(
            "SK303",
            f"{node.name}{where} alone reads {need} bytes of parameters ({size(need)}), the limit is {limit}",
            f"ByParameterBytes({need}) is the smallest limit that has a plan.",
            [node],
        )
