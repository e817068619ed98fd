"""What a format can carry of a plan: modules and layers of each stage, placement, schedule, and what is recomputed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from splitkit.errors import PlanError
from splitkit.exports.layer_sequence import LayerSequence
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.storages import storage_key
from splitkit.pipeline.order import PipelineOrder
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan


@dataclass(frozen=True, eq=False)
class CarriedPlan:
    """A plan whose cuts a format can name, with all that formats write.

    Attributes:
        sequence: the layers of the model, as the format sees them.
        cuts: the number of layers before each cut, increasing.
        plan: the plan with these cuts.
        keys: its parts in the order in which they run, which are the stages.
        order: the schedule; ``None`` for none.
        recompute: layer -> whether backward computes it again.
        by_stage: whether a stage that is recomputed saves only its inputs, not the inputs of each layer.
        devices: the device of each stage, as the plan names it; empty where it names none.
        training: whether the plan is for training.
        microbatch: the samples in a microbatch, if the graph says so.
    """

    sequence: LayerSequence
    cuts: tuple[int, ...]
    plan: Plan
    keys: tuple[PartKey, ...]
    order: PipelineOrder | None = None
    recompute: tuple[bool, ...] = ()
    by_stage: bool = False
    devices: tuple[str, ...] = ()
    training: bool = False
    microbatch: int = 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.keys)

    @property
    def names(self) -> list[list[str]]:
        """The modules of each stage."""
        return self.sequence.names_of(self.cuts)

    @property
    def embeds_tokens(self) -> bool:
        """Whether what runs before the blocks looks up embeddings; of a joint graph, whether anything does."""
        first = self.sequence.layers[0].nodes or self.sequence.flow.nodes
        return any("embedding" in str(node.target) for node in first)

    @property
    def blocks(self) -> list[int]:
        """How many blocks each stage has."""
        return self.sequence.blocks_of(self.cuts)

    @property
    def starts(self) -> list[str]:
        """The module with which each stage but the first begins."""
        return [self.sequence.layers[cut].names[0] for cut in self.cuts]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first layer of each stage, and the one behind its last."""
        return list(pairwise([0, *self.cuts, len(self.sequence.layers)]))

    def stage_of(self, layer: int) -> int:
        """Return the stage of a layer."""
        return sum(cut <= layer for cut in self.cuts)

    @property
    def recomputed_blocks(self) -> list[list[bool]]:
        """Of the blocks of each stage, which backward computes again."""
        layers = self.sequence.layers
        flags = self.recompute or (False,) * len(layers)
        return [[flags[i] for i in range(*span) if layers[i].block is not None] for span in self.spans]

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage; without a schedule each stage has its own."""
        return tuple(range(self.stages)) if self.order is None else self.order.rank_of

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return max(self.rank_of) + 1


@dataclass(frozen=True)
class StagesInText:
    """The stages that a text of another tool describes: one of the fields says where the cuts are.

    Attributes:
        modules: the modules of each stage.
        blocks: how many blocks each stage has; what runs before the first block is in the first stage, and what runs
            after the last block in the last stage.
        starts: the modules before which a cut falls; with ``True`` it falls after the module.
        layers: the number of layers before each cut.
        total: the number of layers, which goes with ``layers``.
        nodes: node -> stage.
        devices: module -> its device; a stage ends where the device changes.
        recompute: block -> whether it is computed again.
    """

    modules: tuple[tuple[str, ...], ...] | None = None
    blocks: tuple[int, ...] | None = None
    starts: tuple[tuple[str, bool], ...] | None = None
    layers: tuple[int, ...] | None = None
    total: int = 0
    nodes: Mapping[str, int] | None = None
    devices: Mapping[str, str] | None = None
    recompute: tuple[bool, ...] = ()


def cannot_carry(tool: str, reason: str, remedy: str, nodes: Sequence[object] = ()) -> PlanError:
    """Return the refusal of a plan that a format cannot carry (SK523)."""
    return PlanError("SK523", f"{tool} cannot carry the plan: {reason}", remedy, nodes)


def parameters_in_stages(flow: Dataflow, plan: Plan, keys: Sequence[PartKey]) -> dict[str, tuple[int, ...]]:
    """Return parameter -> the stages that hold it, of the parameters that several stages hold."""
    parameters = flow.root.named_parameters(remove_duplicate=False)
    name_of = {storage_key(held): name for name, held in reversed([*parameters])}
    stages: dict[Hashable, set[int]] = {}
    number = {key: i for i, key in enumerate(keys)}
    for node in flow.nodes:
        for held in flow.owned(node):
            key = storage_key(held)
            if key in name_of:
                stages.setdefault(key, set()).update(number[k] for k in plan.places[node] if k in number)
    return {name_of[key]: tuple(sorted(found)) for key, found in stages.items() if len(found) > 1}
