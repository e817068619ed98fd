"""The policy `Expert`: a human's split, with a given number of the model's blocks in each stage."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch.fx import Node

from splitkit.checks import count, is_whole, settle
from splitkit.costs import Costs
from splitkit.errors import NoPlanError, PolicyError
from splitkit.graph.dataflow import Dataflow, enough_nodes, module_path, nodes_after, readers_of, waits_for
from splitkit.graph.node_selection import no_module
from splitkit.plans.record import Plan
from splitkit.prices import checked
from splitkit.search.model_blocks import Block, model_blocks
from splitkit.search.placement_model import PlacementModel


@dataclass(frozen=True)
class Expert:
    """Make stages of whole blocks, as in a split by hand, without balancing and without a claim.

    The blocks are the members of the list of modules (``transformer.h.0``, ``transformer.h.1`` ...) that does the work,
    or of all such lists if there are several (an encoder's and a decoder's), in the order in which they run. Nodes
    before the first block join it, nodes after the last block are in the last stage, and nodes in between
    (masks, tables, the embedding of a decoder) are in the first stage that reads them.

    Attributes:
        layers: the number of stages, which then have equal numbers of blocks; if they cannot be equal, the first stages
            have one more (as in torchtitan if embedding and head weigh nothing; Megatron-LM requires equal numbers). Or
            the number of blocks of each stage: ``[3, 3, 4, 2]``. Or the paths of the modules with which the second and
            all further stages begin, as with ``SplitPoint.BEGINNING`` of `torch.distributed.pipelining`:
            ``["transformer.h.3"]``; then only nodes that depend on inputs and constants alone and are read in several
            places move to their first reader.
    """

    layers: int | Sequence[int] | Sequence[str]

    def __post_init__(self) -> None:
        layers: object = self.layers
        if isinstance(layers, str | bytes) or not isinstance(layers, Sequence):
            settle(self, "layers", count)
        elif not layers or not (
            all(is_whole(item, 1) for item in layers) or all(isinstance(item, str) for item in layers)
        ):
            raise PolicyError(
                "SK302",
                f"Expert: layers is {layers!r:.200}",
                'Give a number of stages, numbers of blocks >= 1 ([3, 3, 4, 2]), or module paths (["h.3", "h.6"]).',
            )

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with the stages ``0 .. n - 1``.

        Raises:
            NoPlanError: SK303 if the graph has fewer blocks than stages, or none.
            PolicyError: SK302 if the numbers of blocks do not add up, or two stages begin at the same node; SK304 for
                a path that is not a module of the graph.
        """
        enough_nodes(flow, 1)
        costs = checked(costs)
        if isinstance(self.layers, Sequence) and isinstance(self.layers[0], str):
            names = [str(name) for name in self.layers]
            shared = set(PlacementModel(flow, costs, [dict.fromkeys(flow.nodes, 0.0)], repeat=True).shared)
            starts = _starts_of(flow, names, next((n for n in flow.nodes if n not in shared), flow.nodes[0]))
            note = f"{len(starts)} stages by hand, from {', '.join(names)}"
            return _plan(flow, starts, shared.difference(starts), note)
        blocks = model_blocks(flow, costs)
        first = {block: nodes[0] for block, nodes in blocks.items()}
        order = sorted(first, key=lambda block: flow.index[first[block]])
        counts = self._counts(order)
        begins = [order[before] for before in accumulate(counts[:-1])]
        starts = [flow.nodes[0], *(first[block] for block in begins)]
        inside = {node for nodes in blocks.values() for node in nodes}
        lists = ", ".join(f"{number} in {name or 'the model'}" for name, number in Counter(n for n, _ in order).items())
        note = f"{len(counts)} stages by hand, of {', '.join(map(str, counts))} blocks ({lists})"
        return _plan(flow, starts, [node for node in flow.nodes if node not in inside], note)

    def _counts(self, blocks: Sequence[Block]) -> list[int]:
        """Return the number of blocks of each stage."""
        have = len(blocks)
        if isinstance(self.layers, int):
            if have < self.layers:
                reason = f"Expert: {self.layers} stages were asked for, but the model has {have} blocks"
                fewer = f"Ask for at most {have}, or name modules." if have else "Name the modules that begin stages."
                raise NoPlanError("SK303", reason, fewer)
            return [have // self.layers + (stage < have % self.layers) for stage in range(self.layers)]
        counts = [int(number) for number in self.layers]
        if sum(counts) != have:
            raise PolicyError(
                "SK302",
                f"Expert: {' + '.join(map(str, counts))} = {sum(counts)} blocks, but the model has {have}",
                f"Blocks are {', '.join(dict.fromkeys(f'{name}.*' for name, _ in blocks)) or 'in no list'}.",
            )
        return counts


def _plan(flow: Dataflow, starts: Sequence[Node], loose: Collection[Node], note: str) -> Plan:
    """Make stages that begin with these nodes in graph order; ``loose`` nodes move to the first stage that reads them.

    That is legal: a node's readers are never in an earlier stage than it is itself.
    """
    begin = [flow.index[node] for node in starts]
    stage = {node: max(0, bisect_right(begin, flow.index[node]) - 1) for node in flow.nodes}
    free, readers = set(loose), readers_of(flow)
    behind = nodes_after({node: waits_for(flow, node) for node in flow.nodes})
    for node in reversed(flow.nodes):
        if node in free and readers[node]:
            stage[node] = min(stage[later] for later in behind[node])
    return Plan.of(stage, note)


def _starts_of(flow: Dataflow, names: Sequence[str], start: Node) -> list[Node]:
    """Return the start of the first stage and the first node of each of these modules, in graph order."""
    first: dict[str, Node] = {}
    for node in flow.nodes:
        atoms = module_path(node).split(".")
        for end in range(len(atoms), 0, -1):
            first.setdefault(".".join(atoms[:end]), node)
    for name in names:
        if not name or name not in first:
            raise no_module(f"Expert: {name!r} is not a module of the graph", name, first)
    owner: dict[Node, str] = {}
    for name in names:
        node = first[name]
        if flow.index[node] <= flow.index[start] or node in owner:
            reason = f"begins where {owner[node]} does" if node in owner else "begins the graph"
            raise PolicyError(
                "SK302", f"Expert: {name} {reason}, at {node.name}: a stage is empty", "Name a later module.", [name]
            )
        owner[node] = name
    return sorted([start, *owner], key=flow.index.__getitem__)
