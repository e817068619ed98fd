"""Write a plan as another tool reads it: round it to what the format can name, and say what that costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs import Costs, unit
from splitkit.engine.pair import Pair
from splitkit.engine.split import Split
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import GraphError
from splitkit.exports.carried_plan import (
    CarriedPlan,
    Layer,
    LayerSequence,
    cannot_carry,
    layer_sequence,
    parameters_in_stages,
)
from splitkit.exports.export_format import ExportFormat
from splitkit.exports.import_plan import format_named
from splitkit.exports.rounding import Rounding, pricing_of, round_plan
from splitkit.files import PathLike, save_text
from splitkit.graph.dataflow import Dataflow, facts_of, module_path
from splitkit.graph.joint_marks import is_joint
from splitkit.graph.storages import value_of
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.pipeline.purpose import planned_order, purpose
from splitkit.pipeline.schedules import schedule_of
from splitkit.pipeline.stage_prices import run_order
from splitkit.pipeline.synthesize import order_to_csv
from splitkit.plans.parts import PARENT, UNSAID, Part, PartKey
from splitkit.plans.record import Plan, module_of_plan, plan_of
from splitkit.prices import Optimizer
from splitkit.search.model_blocks import Block, model_blocks
from splitkit.short_repr import brief
from splitkit.training.stage_parts import is_staged, stage_part

_NUMBERED = ("accelerate", "transformers")
"""The formats that give modules the numbers of devices; all others have ranks, one for each stage."""
_ONE_A_RANK = ("onnx", "vllm", "sglang")
"""The formats whose text says neither the device nor the rank of a stage: its number is both."""
_TOOLS_OWN = "Leave the schedule out."


@dataclass(frozen=True)
class Export:
    """A plan as another tool reads it.

    Attributes:
        to: the name of the format.
        text: what the tool reads.
        where: where the text goes.
        plan: the plan that the text expresses; the given plan if the format can express its cuts.
        rounding: what rounding to modules costs; ``None`` for a plan of a training step, which is not rounded.
        schedule_csv: the order of actions in torch's format, for tools that read one; empty without a schedule.
    """

    to: str
    text: str
    where: str
    plan: Plan
    rounding: Rounding | None
    schedule_csv: str = ""

    __repr__ = brief

    def __str__(self) -> str:
        """Return the text, as it is to be pasted."""
        return self.text

    def save(self, path: PathLike) -> None:
        """Write the text to a file, whole or not at all (SK504)."""
        save_text(path, self.text)


def export(
    split_or_plan: Split | StagedStep | Pair | Plan,
    *,
    to: str,
    schedule: str | PipelineOrder | None = None,
    microbatches: int | None = None,
    memory: int | str | None = None,
    links: str | None = None,
    optimizer: Optimizer = None,
    costs: Costs | None = None,
) -> Export:
    """Return a plan as another tool reads it.

    Most formats can only name whole modules. The plan is then rounded to cuts that the format can express: the same
    number of stages, whose slowest is as fast as possible by the plan's own prices, within ``memory``. ``rounding``
    says what that costs. A plan that already cuts between modules is written unchanged.

    Args:
        split_or_plan: a plan for a graph, or a split.
        to: the format: ``"torch"``, ``"torchtitan"``, ``"megatron"``, ``"deepspeed"``, ``"accelerate"``,
            ``"transformers"``, ``"vllm"``, ``"sglang"``, ``"galvatron"``, ``"nnscaler"`` or ``"onnx"``.
        schedule: the schedule of the pipeline, by name or as an order of your own; by default the one that the plan was
            made for. One that the tool cannot run is refused.
        microbatches: the microbatches of a step; by default what the plan was made for, else two per stage.
        memory: the memory of each rank for the rounded plan, in bytes or as text; by default there is no limit.
        links: the preset of the links between ranks; by default the one that the plan was made with.
        optimizer: the optimizer whose state counts; by default Adam if the plan is for training.
        costs: the prices; by default those that the plan was made with.

    Raises:
        FileError: SK521 for an unknown format.
        PlanError: SK522 if the model has too few modules for the cuts, SK523 if the format cannot express the plan;
            both say what would work.
        NoPlanError: SK303 if no plan of whole modules fits the memory.
        ScheduleError: SK330 for a schedule that does not allow the number of stages.
    """
    form, plan = format_named(to), plan_of(split_or_plan)
    flow = facts_of(split_or_plan) if hasattr(split_or_plan, "flow") else facts_of(graph_of(plan))
    plan = _of_placed_nodes(flow, plan)
    _require_pipeline(form, flow, plan)
    if is_staged(plan.parts):
        return _joint_export(form, flow, plan, schedule, microbatches)
    if is_joint(flow.graph):
        reason = "it divides a training step into forward and backward, and has no stages"
        raise cannot_carry(form.tool, reason, "Export a plan with stages: splitkit plan MODEL --stages N.")
    used = costs_of_plan(plan, flow) if costs is None else costs
    keys = tuple(run_order(flow, plan))
    order = _order(form, plan, schedule, microbatches, len(keys))
    _require_own_ranks(form, plan, order)
    pricing = pricing_of(flow, plan, used, order, memory, links, optimizer)
    sequence = layer_sequence(flow, used, form.level)
    cuts = round_plan(pricing, sequence, plan, keys) if form.level != "nodes" else ()
    rounded, moved = _rounded(sequence, plan, keys, cuts, form)
    training = form.use == "training" or pricing.request.training
    own = tuple(run_order(flow, rounded))
    carried = CarriedPlan(
        sequence=sequence,
        cuts=cuts,
        plan=rounded,
        keys=own,
        order=order,
        recompute=_recompute(sequence, rounded, own, cuts),
        by_stage=True,
        devices=tuple(_device(plan, rounded.parts[key]) for key in own),
        microbatch=_batch(flow.root),
    )
    if any(carried.recompute) and not form.recompute:
        raise cannot_carry(form.tool, "the format does not say what is computed again", "Plan without recompute.")
    text = form.write(carried)  # before ties: what the structure of the model forbids is the better reason
    _require_ties(form, sequence, rounded, own, training)
    before, known = pricing.price(plan), plan.request.purpose or pricing.request.training
    assumed = "" if known else f", for {purpose(None)} ({UNSAID})"
    rounding = Rounding(before, pricing.price(rounded) if moved else before, moved, assumed)
    return Export(
        form.name, text, f"{form.where}{_devices_said(form, plan, rounded, own)}", rounded, rounding, _csv(form, order)
    )


def _device(plan: Plan, part: Part) -> str:
    """Return the torch device of a part: its own, or the number of its device among the planned GPUs."""
    if part.device is not None or part.planned_on is None:
        return str(part.device or "")
    gpus = [key for key, device in plan.request.devices.items() if not device.is_cpu]
    return f"cuda:{gpus.index(part.planned_on)}" if part.planned_on in gpus else "cpu"


def _devices_said(form: ExportFormat, plan: Plan, rounded: Plan, keys: Sequence[PartKey]) -> str:
    """Return which device must be which, if they differ: a text names their numbers only."""
    if plan.request.kinds < 2:
        return ""
    on = {i: rounded.parts[key] for i, key in enumerate(keys)}
    names = {i: plan.request.devices[part.planned_on].name for i, part in on.items() if part.planned_on is not None}
    if form.name in _NUMBERED:
        said = (f"{_device(plan, on[i])} is the {name}" for i, name in names.items())
    else:
        said = (f"stage {i} runs on the {name}" for i, name in names.items())
    return f"; {', '.join(said)}"


def graph_of(plan: Plan) -> fx.GraphModule:
    """Return the graph whose nodes a plan places.

    Raises:
        GraphError: SK101 if the plan is empty or its graph has no module.
    """
    if (root := module_of_plan(plan)) is not None:
        return root
    reason = "the plan does not know the module of its graph" if plan else "the plan places no node"
    raise GraphError("SK101", reason, "Give the split: splitkit.export(splitkit.split(gm, plan), to=...).")


def _of_placed_nodes(flow: Dataflow, plan: Plan) -> Plan:
    """Return the plan without the places of inputs and attributes, which the plan of a split has; its claim stays."""
    if all(node in plan.places for node in flow.nodes) and len(plan.places) > len(flow.nodes):
        return replace(plan, places={node: plan.places[node] for node in flow.nodes})
    return plan


def _require_pipeline(form: ExportFormat, flow: Dataflow, plan: Plan) -> None:
    """Refuse what no format carries: one part, nodes without a part, replicas, offloaded values."""
    if len(plan.parts) < 2:
        raise cannot_carry(form.tool, "it has one part, and so no cut", "Plan with two stages or more.")
    left = [node for node in flow.nodes if PARENT in (plan.places.get(node) or (PARENT,))]  # empty: pruned
    if left:
        reason = f"{left[0].name} is in the parent ({len(left)} such nodes), which no stage runs"
        raise cannot_carry(form.tool, reason, "Give every node a part.", left)
    if any(part.replicas > 1 for part in plan.parts.values()):
        raise cannot_carry(
            form.tool,
            "its stages have replicas, and the format describes one pipeline",
            "Plan one pipeline without --replicas, and set the data-parallel size in the tool.",
        )
    if plan.offloaded:
        raise cannot_carry(form.tool, "it offloads saved values", "Plan without offloading.")


def _order(
    form: ExportFormat, plan: Plan, schedule: str | PipelineOrder | None, microbatches: int | None, stages: int
) -> PipelineOrder | None:
    """Return the order of a schedule, or of the plan's own, and refuse schedules that the format cannot carry."""
    if schedule is not None and form.schedules == "none":
        raise cannot_carry(form.tool, "the format has no schedule", _TOOLS_OWN)
    schedule = plan.request.schedule if schedule is None else schedule
    if schedule is None:
        return None
    if isinstance(schedule, str):
        return planned_order(plan.request, schedule, microbatches, stages)
    if len(schedule.rank_of) != stages:
        reason = f"the order {schedule.name} has {len(schedule.rank_of)} stages, but the plan has {stages}"
        raise cannot_carry(form.tool, reason, "Make the order for the stages of the plan.")
    if form.schedules == "name" and schedule_of(schedule) is None:
        reason = f"it runs schedules by name, but the order {schedule.name} has no name"
        raise cannot_carry(form.tool, reason, "Export to torch or torchtitan, which read any order.")
    return schedule


def _require_own_ranks(form: ExportFormat, plan: Plan, order: PipelineOrder | None) -> None:
    """Refuse stages that share a rank where the text gives each stage a rank of its own."""
    on = [part.planned_on for part in plan.parts.values() if part.planned_on is not None]
    ranks = () if order is None else order.rank_of
    if form.name in _ONE_A_RANK and (len({*on}) < len(on) or len({*ranks}) < len(ranks)):
        reason = "some of its stages share a rank, and the format has a rank for each stage"
        raise cannot_carry(form.tool, reason, "Plan one stage for each rank.")


def _csv(form: ExportFormat, order: PipelineOrder | None) -> str:
    return order_to_csv(order) if order is not None and form.schedules == "csv" else ""


def _rounded(
    sequence: LayerSequence, plan: Plan, keys: Sequence[PartKey], cuts: Sequence[int], form: ExportFormat
) -> tuple[Plan, int]:
    """Return the plan with these cuts, and how many nodes change their stage; the given plan if it has these cuts."""
    if form.level == "nodes" or sequence.cuts_of(plan, keys) == tuple(cuts):
        return plan, 0
    made = sequence.plan(cuts, f"{plan.note}; rounded to whole modules for {form.tool}".lstrip("; "))
    parts: dict[PartKey, Part] = {i: replace(plan.parts[key], key=i) for i, key in enumerate(keys)}
    moved = sum(made.home(node) != keys.index(plan.home(node)) for node in sequence.number)
    return replace(made, parts=parts, prices=plan.prices, request=plan.request, policy=plan.policy), moved


def _recompute(sequence: LayerSequence, plan: Plan, keys: Sequence[PartKey], cuts: Sequence[int]) -> tuple[bool, ...]:
    """Return layer -> whether its stage runs again in backward."""
    again = [plan.parts[key].call == "checkpoint" for key in keys]
    if not any(again):
        return ()
    if sequence.level == "nodes":
        return (True,)
    return tuple(again[sum(cut <= i for cut in cuts)] for i in range(len(sequence.layers)))


def _require_ties(
    form: ExportFormat, sequence: LayerSequence, plan: Plan, keys: Sequence[PartKey], training: bool
) -> None:
    """Refuse parameters in several stages whose copies the tool would let drift apart."""
    if form.ties == "any" or (form.ties == "copies" and not training):
        return
    tied = parameters_in_stages(sequence.flow, plan, keys)
    if form.ties == "ends":
        tied = {name: where for name, where in tied.items() if where != (0, len(keys) - 1)}
    if tied:
        name, where = next(iter(tied.items()))
        keeps = "keeps only the embedding and the head equal" if form.ties == "ends" else "does not keep copies equal"
        raise cannot_carry(
            form.tool,
            f"the parameter {name} is in the stages {', '.join(map(str, where))}, and the tool {keeps}",
            "Untie it (tie_word_embeddings=False), or train with splitkit, which adds up the gradients of all copies.",
            [name],
        )


def _batch(root: fx.GraphModule) -> int:
    """Return the first size of the first input, which is the samples of a microbatch in most models."""
    for node in root.graph.find_nodes(op="placeholder"):
        value: Any = value_of(node)
        if isinstance(value, torch.Tensor) and value.dim() and isinstance(value.shape[0], int):
            return int(value.shape[0])
    return 1


def _joint_export(
    form: ExportFormat, flow: Dataflow, plan: Plan, schedule: str | PipelineOrder | None, microbatches: int | None
) -> Export:
    """Export a plan of a training step in stages, which must cut between blocks."""
    if form.use == "serving":
        raise cannot_carry(form.tool, "it is for training, and the tool serves models", PLAN_FORWARD)
    sequence, cuts, stages = joint_sequence(form, flow, plan)
    order = _order(form, plan, schedule, microbatches, stages)
    recompute = joint_recompute(form, sequence, plan)
    keys = tuple(("forward", stage) for stage in range(stages))
    whole = saves_stage_inputs_only(sequence, plan)
    carried = CarriedPlan(sequence, cuts, plan, keys, order, recompute, by_stage=whole)
    return Export(form.name, form.write(carried), form.where, plan, None, _csv(form, order))


# What formats can carry of a joint plan in stages: the blocks of each stage, and which of them backward recomputes.
#
# Nothing is rounded here: what a stage saves was decided for its own cuts.


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
    home = sequence.number
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
    home = sequence.number
    handed = (node for node in home if any(user in home and home[user] != home[node] for user in node.users))
    return any(_is_backward(key) for node in handed for key in plan.places[node])


def _is_backward(key: PartKey) -> bool:
    part = stage_part(key)
    return part is not None and part.half != "forward"


def _goes_on(node: Node, home: Mapping[Node, int], plan: Plan) -> bool:
    """Whether another layer, or what runs behind the last one, reads a value in forward: its input is saved anyway."""
    return any(
        home.get(user) != home[node] and any(not _is_backward(key) for key in plan.places.get(user, ()))
        for user in node.users
    )
