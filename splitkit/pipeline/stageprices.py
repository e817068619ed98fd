"""What the parts of a plan cost as stages of a pipeline: seconds and bytes, from one forward graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Literal

from torch import nn
from torch.fx import Node

from splitkit.checks import is_word, items_of, shown
from splitkit.costs import Costs, unit_of
from splitkit.costs.training import FromJoint, told_apart, with_backward
from splitkit.errors import CostError, PlanError, PolicyError
from splitkit.graph.dataflow import Dataflow, facts_of, waits_for
from splitkit.graph.fakecalls import name_of, target_of
from splitkit.graph.gradients import Gradients
from splitkit.graph.joint import is_joint
from splitkit.memory.autograd import Activations
from splitkit.memory.lines import Units, units_of
from splitkit.memory.stretch import Line
from splitkit.pipeline.replication import replica_of, trained_bytes, undivided
from splitkit.pipeline.stagecosts import StageCosts
from splitkit.pipeline.weightpart import WeightPart, checked_weight_part, deferred_bytes
from splitkit.plans.order import part_order
from splitkit.plans.parts import HOST, PartKey
from splitkit.plans.record import Plan, plan_of
from splitkit.prices import as_given, require_costs

Optimizer = Literal["adam", "adamw", "momentum", "sgd"] | None
STATE_OF: Mapping[str, int] = {"adam": 2, "adamw": 2, "momentum": 1, "sgd": 0}
"""The state of each optimizer, in multiples of the bytes of what it trains."""

# Ops whose backward is a product for each factor.
_PRODUCTS = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addmv", "__matmul__", "convolution"),
        *("_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def stage_costs(
    flow: Dataflow,
    plan: Plan | Sequence[Collection[Node]],
    costs: Costs,
    *,
    optimizer: Optimizer = "adam",
    activations: Activations | None = None,
    weight_part: WeightPart = "torch",
) -> tuple[StageCosts, ...]:
    """What each part costs for one microbatch, of the size that was captured, in the order in which they run.

    * Seconds of forward are those of the costs; backward is as many times dearer as `splitkit.costs.training` says.
      Half of the backward of a product with a parameter, and all of it where only parameters require grad, is its part
      for weights (``backward_weight``).
    * ``saved_bytes``: each storage once that autograd keeps, or that the part takes or gives; no parameters. What comes
      from another part is memory of its own, no less than all of what it is a part of there; of a value that is given
      and does not lie side by side (a third of one product for queries, keys and values) a copy is sent. Exact but for
      that and the nodes that `Activations.estimated` names. Not in it is what a stage only passes on
      (`splitkit.runtime.measured.with_passed_on` adds it).
    * ``deferred_bytes``: what waits for the weight part where a schedule divides backward, from above. Torch's way,
      which pipelines run by, keeps all that the graph still holds, captures gradients besides, and has no input part
      in the first stage: all of its backward is ``backward_weight`` (`splitkit.pipeline.weightpart`).
    * ``temporary_bytes``: the most that forward or backward hold beyond that, from above: gradients that share memory
      (those of the two addends of a sum) count apart. Parameters have a gradient from a microbatch before, so that the
      new one counts besides.
    * ``activation_bytes``: all values that are made up to the part and read in later ones, for runtimes that talk to
      the next rank only; ``input_gradient_bytes``: the same on the way back. Inputs of the graph are there for every
      part, and what the graph yields need not go to the last one.
    * What two parts read of the parameters, each has.
    * Of a part with replicas, what one of them does and holds (`splitkit.pipeline.replication`).

    Without an optimizer there is no backward: no gradients, nothing saved, and ``temporary_bytes`` are all activations
    at their peak, what the part takes and gives included.

    Args:
        flow: facts about a forward graph, or the graph.
        plan: the plan, which must place every node; or sets of placeable nodes in the order in which they run. A node
            in several sets is computed in each of them; others read what the first of them yields.
        costs: prices of its nodes, with or without their backward (`splitkit.costs.training`).
        optimizer: ``"adam"``, ``"momentum"`` or ``"sgd"``: 2, 1 or 0 times the bytes of the gradients; ``None``: none.
        activations: what `splitkit.memory.autograd.activations` says of the graph, if it is known.
        weight_part: who divides backward: ``"torch"``, or ``"own"`` for graphs of your own for the two parts.

    Raises:
        PolicyError: SK302 for an optimizer or a way to divide backward that is not known.
        PlanError: SK208 if nodes have no part: the host has no stage.
        CycleError: SK203 if parts wait for each other in a cycle.
        CostError: SK323 for costs of a joint graph.
        GraphError: SK102 when nodes have no ``meta["val"]``.
    """
    in_order = isinstance(plan, Sequence) and not isinstance(plan, str)
    prices = StagePrices(facts_of(flow), require_costs(costs), optimizer, activations, weight_part)
    return prices.of(plan if in_order else plan_of(plan))


@dataclass
class StagePrices:
    """Answers `stage_costs` for many plans of one graph.

    Attributes:
        flow: facts about the graph.
        costs: prices of its nodes.
        optimizer: as in `stage_costs`.
        activations: as in `stage_costs`.
        weight_part: as in `stage_costs`.
        divided: whether a schedule divides backward; without, `StageCosts.deferred_bytes` are not looked for.
    """

    flow: Dataflow
    costs: Costs
    optimizer: Optimizer = "adam"
    activations: Activations | None = None
    weight_part: WeightPart = "torch"
    divided: bool = True
    units: Units = field(init=False)
    _times: _Times = field(init=False)

    def __post_init__(self) -> None:
        checked_optimizer(self.optimizer)
        checked_weight_part(self.weight_part)
        given: object = self.activations
        if given is not None and not isinstance(given, Activations):
            remedy = "Give splitkit.memory.autograd.activations of the graph, or none."
            raise PolicyError("SK302", f"activations are {shown(given)}", remedy)
        self._times = _Times(_both(self.costs, self.flow), self.flow, self.optimizer is not None)
        training = self.optimizer is not None
        known = self.activations
        self.units = self.flow.fact(units_of, training) if known is None else Units(self.flow, known, training)
        self.activations = self.units.activations

    def of(self, plan: Plan | Sequence[Collection[Node]]) -> tuple[StageCosts, ...]:
        """The costs of the parts of a plan."""
        parts, homes, replicas = self._parts(plan)
        found = []
        for whole, nodes, count in zip(self._divided(parts, homes), parts, replicas, strict=True):
            trained = [trained_bytes(self.flow, node) for node in nodes] if count > 1 and whole.gradient_bytes else []
            found.append(replica_of(whole, count, undivided(trained, whole.gradient_bytes)))
        return tuple(found)

    def _divided(self, parts: Sequence[Sequence[Node]], homes: Mapping[Node, int]) -> list[StageCosts]:
        """The costs of parts, and what waits for the weight part of their backward."""
        line = self.units.line(parts, homes)
        ends = list(accumulate(map(len, parts)))
        stages = [self.stage(line, end - len(nodes), end, nodes) for nodes, end in zip(parts, ends, strict=True)]
        if self.optimizer is None:
            return stages
        if self.divided:
            waits = deferred_bytes(self.units, parts, homes, [stage.saved_bytes for stage in stages], self.weight_part)
            stages = [replace(stage, deferred_bytes=nbytes) for stage, nbytes in zip(stages, waits, strict=True)]
        if self.weight_part == "torch" and stages:
            stages[0] = replace(stages[0], backward_input=0.0, backward_weight=stages[0].backward)
        return stages

    def stage(self, line: Line, start: int, end: int, nodes: Sequence[Node]) -> StageCosts:
        """The costs of a stretch of a line, whose nodes are these."""
        held = line.stretch(start, end)
        forward, backward_input, backward_weight = self._times.of(nodes)
        back = self.optimizer is not None
        return StageCosts(
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            saved_bytes=held.saved,
            activation_bytes=int(line.messages[end]),
            input_gradient_bytes=int(line.gradient_messages[start]) if back else 0,
            temporary_bytes=held.temporary,
            parameter_bytes=held.parameters,
            gradient_bytes=held.gradients,
            optimizer_bytes=held.gradients * STATE_OF[self.optimizer] if self.optimizer else 0,
            unit=unit_of(self.costs),
        )

    def times(self, nodes: Iterable[Node]) -> tuple[float, float, float]:
        """Seconds of forward, and of backward for the input and for weights, of some nodes together."""
        return self._times.of(nodes)

    def _parts(self, plan: Plan | Sequence[Collection[Node]]) -> tuple[list[list[Node]], dict[Node, int], list[int]]:
        """The nodes of each part in graph order; the homes of those with copies; how many replicas each has."""
        placed: dict[Node, tuple[int, ...]] = {}
        if isinstance(plan, Plan):
            keys = run_order(self.flow, plan)
            number = {key: i for i, key in enumerate(keys)}
            for node in self.flow.nodes:
                places = plan.places.get(node, (HOST,))
                placed[node] = tuple(number[key] for key in places if key is not HOST)
                if HOST in places:
                    placed.pop(node)
        else:
            keys = list(range(len(plan)))
            for i, nodes in enumerate(plan):
                for node in _nodes_of(self.flow, nodes):
                    placed[node] = (*placed.get(node, ()), i)
        self._check(placed)
        parts: list[list[Node]] = [[] for _ in keys]
        for node in self.flow.nodes:
            for i in placed[node]:
                parts[i].append(node)
        replicas = [plan.parts[key].replicas for key in keys] if isinstance(plan, Plan) else [1] * len(keys)
        return parts, {node: where[0] for node, where in placed.items() if len(where) > 1}, replicas

    def _check(self, placed: Mapping[Node, tuple[int, ...]]) -> None:
        left = [node for node in self.flow.nodes if node not in placed]
        if left:
            raise PlanError(
                "SK208",
                f"{left[0].name} is in no part, and the host has no stage ({len(left)} such nodes)",
                "Place every node of Dataflow.nodes.",
                left,
            )


def run_order(flow: Dataflow, plan: Plan) -> list[PartKey]:
    """The parts of a plan in the order in which they run: that of their numbers if they have some and can run so, since
    the ranks of a pipeline go by them; else that of `part_order`.

    Raises:
        CycleError: SK203 if parts wait for each other in a cycle.
    """
    places = {node: plan.places.get(node) or (HOST,) for node in flow.nodes}
    numbers = _in_number_order(flow, places)
    if numbers and not any(HOST in keys for keys in places.values()):
        return numbers
    keys = [key for key, _ in part_order(flow, plan) if key is not HOST]  # the host may close a cycle
    return keys if numbers is None else sorted(keys)  # type: ignore[type-var]


def _in_number_order(flow: Dataflow, places: Mapping[Node, tuple[PartKey, ...]]) -> list[PartKey] | None:
    """The parts in the order of their numbers; None if some have none, or they cannot run so."""
    keys = {key for own in places.values() for key in own if key is not HOST}
    if not all(type(key) is int for key in keys):
        return None
    for node, own in places.items():
        for read in waits_for(flow, node):
            if (there := places[read]) == own and len(own) == 1:
                continue
            for key in own:
                source = key if key in there else there[0]
                if key is not HOST and source is not HOST and source > key:  # type: ignore[operator]
                    return None
    return sorted(keys)  # type: ignore[type-var]


def peaks_of_visits(stages: Sequence[StageCosts], devices: Sequence[PartKey]) -> dict[PartKey, int]:
    """Bytes of each device at its peak: what all its parts hold, and the most that one of them takes besides.

    Args:
        stages: the parts.
        devices: where each of them runs.
    """
    held: dict[PartKey, int] = dict.fromkeys(devices, 0)
    besides = dict(held)
    for device, stage in zip(devices, stages, strict=True):
        held[device] += stage.fixed_bytes + stage.saved_bytes
        besides[device] = max(besides[device], stage.temporary_bytes)
    return {device: nbytes + besides[device] for device, nbytes in held.items()}


def checked_optimizer(optimizer: object) -> None:
    """Raise SK302 for an optimizer that is not known."""
    if optimizer is not None and not is_word(optimizer, *STATE_OF):
        raise PolicyError(
            "SK302",
            f"the optimizer is {shown(optimizer)}",
            f"Use {', '.join(map(repr, STATE_OF))}, or None for inference.",
        )


def _both(costs: Costs, flow: Dataflow) -> Costs:
    """Costs that tell forward from backward."""
    if isinstance(as_given(costs), FromJoint) or is_joint(flow.graph):
        raise CostError(
            "SK323",
            "the graph is of forward and backward together, which are not told apart",
            "Capture the forward graph: splitkit.capture(model, *inputs).",
        )
    return with_backward(costs, flow)


def _nodes_of(flow: Dataflow, nodes: object) -> list[Node]:
    """The nodes of a part that is given as a set of them."""
    found = items_of(nodes)
    strange = [nodes] if found is None else [n for n in found if not isinstance(n, Node) or not flow.is_placeable(n)]
    if found is None or strange:
        reason = f"a part is given with {shown(strange[0])}, which is no node of the graph that is placed"
        raise PolicyError("SK301", reason, "Give sets of nodes of Dataflow.nodes, or a plan.", strange[:1])
    return found


class _Times:
    """Seconds of forward, and of both parts of backward."""

    def __init__(self, costs: Costs, flow: Dataflow, back: bool) -> None:
        self._costs, self._gm = costs, flow.root
        self._gradients = flow.fact(Gradients) if back else None
        self._known: dict[Node, tuple[float, float, float]] = {}

    def of(self, nodes: Iterable[Node]) -> tuple[float, float, float]:
        """Of some nodes together."""
        forward = inputs = weights = 0.0
        for node in nodes:
            if node not in self._known:
                self._known[node] = self._of(node)
            times = self._known[node]
            forward, inputs, weights = forward + times[0], inputs + times[1], weights + times[2]
        return forward, inputs, weights

    def _of(self, node: Node) -> tuple[float, float, float]:
        forward, backward = told_apart(self._costs, node)
        if self._gradients is None:
            return forward, 0.0, 0.0
        share = self._share(node, self._gradients.reads.get(node, frozenset())) if backward else 0.0
        return forward, backward * (1 - share), backward * share

    def _share(self, node: Node, reads: Collection[Node]) -> float:
        """The part of a node's backward that is for parameters."""
        values = [read for read in reads if read.op != "get_attr"]
        if not values:
            return 1.0
        target = target_of(self._gm, node)
        module = isinstance(target, nn.Module)
        weights = module or len(reads) > len(values)
        product = isinstance(target, _LAYERS) if module else name_of(target) in _PRODUCTS
        return 0.5 if weights and product and len(values) == 1 else 0.0
