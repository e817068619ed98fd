"""What formats can carry of a joint plan in stages: the blocks of each stage, and which of them backward recomputes.

Nothing is rounded here: what a stage saves was decided for its own cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.fx import Node

from splitkit.costs import unit
from splitkit.exports.carried_plan import cannot_carry
from splitkit.exports.export_format import ExportFormat
from splitkit.exports.layer_sequence import Layer, LayerSequence
from splitkit.graph.dataflow import Dataflow, module_path
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.search.model_blocks import Block, model_blocks
from splitkit.training.stage_parts import stage_part

PLAN_FORWARD = "Plan the forward graph (splitkit plan MODEL --stages N), or run the plan with `splitkit train`."


def joint_sequence(form: ExportFormat, flow: Dataflow, plan: Plan) -> tuple[LayerSequence, tuple[int, ...], int]:
    """Return the layers of a joint graph, the cuts of its plan between them, and the number of stages.

    The layers have the nodes of forward that are in blocks; what runs before and after the blocks is at the ends.

    Raises:
        PlanError: SK523 if the format needs more than numbers of blocks, or a cut is not between two blocks.
    """
    if form.level not in ("ends", "blocks"):
        tool = form.tool
        raise cannot_carry(tool, "it divides a training step, and the format names modules of a forward", PLAN_FORWARD)
    stages = {
        node: part.stage for node in flow.nodes if (part := stage_part(plan.home(node))) and part.half == "forward"
    }
    blocks = {
        block: own
        for block, nodes in model_blocks(flow, unit(flow)).items()
        if (own := [n for n in nodes if n in stages and _computes(n)])
    }
    where = {block: {stages[node] for node in own} for block, own in blocks.items()}
    if split := next((block for block, found in where.items() if len(found) > 1), None):
        name = f"{split[0]}.{split[1]}"
        raise cannot_carry(
            form.tool,
            f"a cut falls inside {name}, and what its stages save was decided for this cut",
            f"{PLAN_FORWARD} Forward plans are rounded to whole layers.",
            [name],
        )
    count = max(stages.values(), default=-1) + 1
    sequence = _sequence(form, flow, blocks)
    _require_ends(form, stages, blocks, count)
    return sequence, _cuts(sequence, {block: found.pop() for block, found in where.items()}, count), count


def _computes(node: Node) -> bool:
    """Whether a node reads anything but inputs: views of parameters run wherever they are read."""
    return any(read.op != "placeholder" for read in node.all_input_nodes)


def _sequence(form: ExportFormat, flow: Dataflow, blocks: Mapping[Block, Sequence[Node]]) -> LayerSequence:
    layers = [
        Layer((f"{name}.{number}" if name else str(number),), tuple(own), (name, number))
        for (name, number), own in blocks.items()
    ]
    if form.level == "ends":
        layers = [Layer(("embedding",), ()), *layers, Layer(("head",), ())]
    return LayerSequence(flow, tuple(layers), (), form.level)


def _cuts(sequence: LayerSequence, where: Mapping[Block, int], count: int) -> tuple[int, ...]:
    stages = []
    for i, layer in enumerate(sequence.layers):
        stages.append(where[layer.block] if layer.block is not None else 0 if i == 0 else count - 1)
    if stages != sorted(stages):
        raise cannot_carry("the format", "its blocks do not run in the order of their stages", PLAN_FORWARD)
    cuts = tuple(i for i in range(1, len(stages)) if stages[i] != stages[i - 1])
    if {*stages} != {*range(count)}:
        raise cannot_carry("the format", "a stage has no whole block", PLAN_FORWARD)
    return cuts


def _require_ends(
    form: ExportFormat, stages: Mapping[Node, int], blocks: Mapping[Block, Sequence[Node]], count: int
) -> None:
    """Refuse a cut among the modules behind the last block: they are one thing in the formats with blocks."""
    inside = {node for own in blocks.values() for node in own}
    order = {node: i for i, node in enumerate(stages)}
    last = max((order[node] for node in inside), default=-1)
    behind = {stages[n] for n in stages if order[n] > last and module_path(n) and n not in inside and _computes(n)}
    if behind - {count - 1}:
        raise cannot_carry(form.tool, "a cut falls behind the last block, inside norm and head", PLAN_FORWARD)


def joint_recompute(form: ExportFormat, sequence: LayerSequence, plan: Plan) -> tuple[bool, ...]:
    """Return layer -> whether backward computes it again, from its input.

    Raises:
        PlanError: SK523 if a layer is recomputed in part.
    """
    home = {node: i for i, layer in enumerate(sequence.layers) for node in layer.nodes}
    again = {home[node] for node in home if any(_is_backward(key) for key in plan.places[node])}
    kept: dict[int, list[Node]] = {}
    for node in plan.places:
        for key in plan.places[node]:
            for read in node.all_input_nodes if _is_backward(key) else ():
                if read in home and not _is_backward(plan.source(read, key)) and not _goes_on(read, home, plan):
                    kept.setdefault(home[read], []).append(read)
    partly = sorted(again & kept.keys())
    if partly:
        names = [sequence.layers[i].names[0] for i in partly]
        raise cannot_carry(
            form.tool,
            f"{names[0]} is recomputed in part ({len(partly)} such layers; {kept[partly[0]][0].name} is saved), and "
            "the format knows whole layers",
            "Use splitkit.policies.RecomputeAll within the stages, or run the plan with `splitkit train`.",
            names,
        )
    return tuple(i in again for i in range(len(sequence.layers)))


def saves_stage_inputs_only(sequence: LayerSequence, plan: Plan) -> bool:
    """Whether what one layer hands to the next layer of its stage is computed again as well."""
    home = {node: i for i, layer in enumerate(sequence.layers) for node in layer.nodes}
    return any(_is_backward(key) for node in home if _leaves(node, home) for key in plan.places[node])


def _is_backward(key: PartKey) -> bool:
    part = stage_part(key)
    return part is not None and part.half != "forward"


def _goes_on(node: Node, home: Mapping[Node, int], plan: Plan) -> bool:
    """Whether another layer, or what runs behind the last one, reads a value in forward: its input is saved anyway."""
    return any(
        home.get(user) != home[node] and any(not _is_backward(key) for key in plan.places.get(user, ()))
        for user in node.users
    )


def _leaves(node: Node, home: Mapping[Node, int]) -> bool:
    """Whether another layer reads a value in forward."""
    return any(user in home and home[user] != home[node] for user in node.users)
