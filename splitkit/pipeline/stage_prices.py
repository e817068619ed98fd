"""The cost of the parts of a plan as stages of a pipeline: seconds and bytes, from one forward graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from torch import nn
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.checks import is_word, items_of, shown
from splitkit.costs import Costs, unit_of
from splitkit.costs.training import forward_and_backward, with_backward
from splitkit.errors import PlanError, PolicyError
from splitkit.graph.dataflow import Dataflow, facts_of, waits_for
from splitkit.graph.node_values import Gradients, op_name, target_of
from splitkit.graph.storages import tensors, value_of
from splitkit.memory.graph_memory import GraphMemory, NodeMemory, graph_memory, is_dense, mixed_memory
from splitkit.memory.saved_storages import Activations
from splitkit.memory.segment import OrderMemory
from splitkit.pipeline.memory import replica_of, trained_bytes, undivided
from splitkit.pipeline.placed_prices import costs_of_plan, in_part
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.plans.part_order import part_order
from splitkit.plans.parts import PARENT, Part, PartKey, PlannedOptimizer
from splitkit.plans.record import Plan, check_checkpoints, plan_of
from splitkit.prices import Optimizer, kernels_of, require_costs

STATE_OF: Mapping[str, int] = {"adam": 2, "adamw": 2, "momentum": 1, "sgd": 0}
"""The state of each optimizer, in multiples of the bytes of what it trains."""


def stage_costs(
    flow: Dataflow,
    plan: Plan | Sequence[Collection[Node]],
    costs: Costs | None = None,
    *,
    optimizer: PlannedOptimizer = "planned",
    activations: Activations | None = None,
) -> tuple[StageCosts, ...]:
    """Return the cost of each part for one microbatch of the captured size, in the order in which the parts run.

    * Seconds are the time of all kernels of forward and of backward (`splitkit.costs.training`), without the optimizer
      and without adding gradients to earlier microbatches. Half of the backward of a product with a parameter, and
      all of it where only parameters require grad, is its weight part (``backward_weight``).
    * ``saved_bytes`` counts once each storage that autograd keeps, or that the part takes or gives, without
      parameters. A value from another part is memory of its own, as large as the storage that it was a part of
      there; a value that is given and is not contiguous (a third of one product for queries, keys and values) is
      sent as a copy. Attention and recurrent layers save what they do on the device of ``costs``
      (`splitkit.costs.Device.kernels`), wherever the graph was captured; costs for no device leave them on the device
      of the graph. The number is exact except for that and the nodes that `Activations.estimated` names. It
      leaves out values that a stage only forwards (`splitkit.runtime.ranks.measurements.with_passed_on` adds them).
    * ``deferred_bytes`` is an upper bound on the bytes that wait for the weight part if a schedule divides backward.
      Torch's way, which pipelines use, keeps everything that the graph still holds, also captures gradients, and has no
      input part in the first stage: all of its backward is ``backward_weight``.
    * ``temporary_bytes`` is an upper bound on what forward or backward hold beyond that: gradients that share memory
      (of a sum's two addends) are counted separately. Parameters have a gradient from an earlier microbatch, so a new
      one is counted as well.
    * ``activation_bytes`` are all values made up to the part and read in later ones, for runtimes in which a rank talks
      only to the next; ``input_gradient_bytes`` are the same on the way back. The inputs of the graph are available to
      every part, and its outputs need not go to the last one.
    * Parameters that two parts read are counted in both.
    * A part with replicas is one of them (`splitkit.pipeline.memory`).
    * A part with ``call="checkpoint"`` saves its inputs and outputs, and the state of the random number generator
      (5,056 bytes). Backward takes as long as forward and backward, all of it as the input part, and nothing waits for
      the weight part: such a stage runs its whole backward at once. ``temporary_bytes`` include what the second forward
      makes and saves, for the one microbatch whose backward runs.

    Without an optimizer there is no backward: no gradients, nothing saved, and ``temporary_bytes`` are all
    activations at their peak, including what the part takes and gives.

    Args:
        flow: facts about a forward graph, or the graph.
        plan: the plan, which must place every node; or sets of placeable nodes in the order in which they run. A
            node in several sets is computed in each of them; other sets read what the first of them yields.
        costs: prices of its nodes, with or without their backward (`splitkit.costs.training`); by default those that
            the plan was made with. If it does not know them, FLOPs.
        optimizer: ``"adam"``, ``"momentum"`` or ``"sgd"``: 2, 1 or 0 times the bytes of the gradients; ``None`` for
            inference; by default what the plan was made for, and Adam if it does not say.
        activations: the result of `splitkit.memory.saved_storages.activations` for the graph, if it is
            known; by default for the device of ``costs``.

    Raises:
        PolicyError: SK302 for an unknown optimizer.
        PlanError: SK207 if a part that backward recomputes has side effects, SK208 if nodes have no part: the parent
            has no stage.
        CycleError: SK203 if parts wait for each other in a cycle.
        CostError: SK323 for costs of a joint graph.
        GraphError: SK102 when nodes have no ``meta["val"]``.
    """
    in_order = isinstance(plan, Sequence) and not isinstance(plan, str)
    parts, facts = plan if in_order else plan_of(plan), facts_of(flow)
    plan_of_them = parts if isinstance(parts, Plan) else Plan({})
    used = costs_of_plan(plan_of_them, facts) if costs is None else require_costs(costs)
    held = plan_of_them.request.counting(optimizer)
    return StagePrices(facts, used, held, activations).of(parts)


@dataclass
class StagePrices:
    """Answers `stage_costs` for many plans of one graph.

    Attributes:
        flow: facts about the graph.
        costs: prices of its nodes.
        optimizer: as in `stage_costs`.
        activations: as in `stage_costs`.
        divided: whether a schedule divides backward; if not, `StageCosts.deferred_bytes` are not computed.
        kernels: device that parts are planned on -> its kernels, where devices differ; by default as ``costs`` say.
        apart: whether the gradients that parts receive are left out, for a simulated step, which counts its messages.
    """

    flow: Dataflow
    costs: Costs
    optimizer: Optimizer = "adam"
    activations: Activations | None = None
    divided: bool = True
    kernels: Mapping[PartKey, str] = field(default_factory=dict)
    apart: bool = False
    memory: GraphMemory = field(init=False)
    _times: dict[Any, _Times] = field(init=False, default_factory=dict)
    _costs: Costs = field(init=False)
    _given: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        check_stage_optimizer(self.optimizer)
        given: object = self.activations
        if given is not None and not isinstance(given, Activations):
            remedy = "Give splitkit.memory.saved_storages.activations of the graph, or none."
            raise PolicyError("SK302", f"activations are {shown(given)}", remedy)
        self._costs = with_backward(self.costs, self.flow)
        training = self.optimizer is not None
        known = self.activations
        self.memory = self.memory_on(None) if known is None else GraphMemory(self.flow, known, training)
        self._given, self.activations = known is not None, self.memory.activations

    def memory_on(self, kernels: str | None) -> GraphMemory:
        """Return the memory of the graph with these kernels; by default the first's, or what ``costs`` say."""
        kernels = kernels or next(iter(self.kernels.values()), None) or kernels_of(self.costs)
        return self.flow.fact(graph_memory, self.optimizer is not None, kernels)

    def memory_of(self, plan: Plan) -> GraphMemory:
        """Return the memory of the graph in which each node runs with the kernels of the device of its home."""
        if self._given:
            return self.memory
        of = {
            key: self.memory_on(self.kernels.get(part.planned_on) or kernels_of(in_part(self._costs, key)))
            for key, part in plan.parts.items()
        }
        on = {node: of.get(plan.home(node), self.memory) for node in self.flow.nodes}
        if len(set(map(id, on.values()))) == 1:
            return next(iter(on.values()))
        return mixed_memory(on)

    def of(self, plan: Plan | Sequence[Collection[Node]]) -> tuple[StageCosts, ...]:
        """Return the costs of the parts of a plan."""
        keys, parts, homes = self._parts(plan)
        if isinstance(plan, Plan):
            check_checkpoints(self.flow, plan)
        known = [plan.parts[key] for key in keys] if isinstance(plan, Plan) else [Part(key) for key in keys]
        replicas, again = [part.replicas for part in known], [part.call == "checkpoint" for part in known]
        found = []
        memory = self.memory_of(plan) if isinstance(plan, Plan) else self.memory
        for whole, nodes, count in zip(self._divided(memory, keys, parts, homes, again), parts, replicas, strict=True):
            trained = [trained_bytes(self.flow, node) for node in nodes] if count > 1 and whole.gradient_bytes else []
            found.append(replica_of(whole, count, undivided(trained, whole.gradient_bytes)))
        return tuple(found)

    def _divided(
        self,
        memory: GraphMemory,
        keys: Sequence[PartKey],
        parts: Sequence[Sequence[Node]],
        homes: Mapping[Node, int],
        again: Sequence[bool],
    ) -> list[StageCosts]:
        """Return the costs of parts, and what waits for the weight part of their backward.

        Backward of a part that is run again is not divided, so nothing waits.
        """
        line = replace(memory.order(parts, homes), apart=self.apart)
        ends = list(accumulate(map(len, parts)))
        each = zip(keys, parts, ends, again, strict=True)
        stages = [self.stage(line, end - len(own), end, own, recompute, key) for key, own, end, recompute in each]
        if self.optimizer is None:
            return stages
        if self.divided:
            waits = deferred_bytes(memory, parts, homes, [stage.saved_bytes for stage in stages])
            stages = [
                replace(stage, deferred_bytes=0 if i and recompute else nbytes)
                for i, (stage, nbytes, recompute) in enumerate(zip(stages, waits, again, strict=True))
            ]
        if stages:
            stages[0] = replace(stages[0], backward_input=0.0, backward_weight=stages[0].backward)
        return stages

    def stage(
        self,
        line: OrderMemory,
        start: int,
        end: int,
        nodes: Sequence[Node],
        recompute: bool = False,
        key: PartKey = PARENT,
    ) -> StageCosts:
        """Return the costs of a segment of an order, which consists of these nodes.

        Args:
            line: the order.
            start: the position of the first node.
            end: the position behind the last node.
            nodes: the nodes.
            recompute: whether backward runs them again (``Part.call="checkpoint"``).
            key: the part that they are, if the devices of parts differ.
        """
        held = line.recomputed(start, end) if recompute else line.segment(start, end)
        forward, backward_input, backward_weight = self.times(nodes, key)
        if recompute and backward_input + backward_weight:
            backward_input, backward_weight = forward + backward_input + backward_weight, 0.0
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

    def times(self, nodes: Iterable[Node], key: PartKey = PARENT) -> tuple[float, float, float]:
        """Return seconds of forward, and of backward for the input and for weights, of some nodes of one part."""
        own = in_part(self._costs, key)
        if (known := None if own is self._costs else key) not in self._times:
            self._times[known] = _Times(own, self.flow, self.optimizer is not None)
        return self._times[known].of(nodes)

    def _parts(
        self, plan: Plan | Sequence[Collection[Node]]
    ) -> tuple[list[PartKey], list[list[Node]], dict[Node, int]]:
        """Return the keys of the parts, the nodes of each in graph order, and the homes of nodes with copies."""
        placed: dict[Node, tuple[int, ...]] = {}
        if isinstance(plan, Plan):
            keys = run_order(self.flow, plan)
            number = {key: i for i, key in enumerate(keys)}
            for node in self.flow.nodes:
                places = plan.places.get(node, (PARENT,))
                placed[node] = tuple(number[key] for key in places if key is not PARENT)
                if PARENT in places:
                    placed.pop(node)
        else:
            keys = list(range(len(plan)))
            for i, nodes in enumerate(plan):
                for node in _nodes_of(self.flow, nodes):
                    placed[node] = (*placed.get(node, ()), i)
        self.require_all(placed)
        parts: list[list[Node]] = [[] for _ in keys]
        for node in self.flow.nodes:
            for i in placed[node]:
                parts[i].append(node)
        return keys, parts, {node: where[0] for node, where in placed.items() if len(where) > 1}

    def require_all(self, placed: Collection[Node]) -> None:
        """Raise SK208 if a node is not among those that are in a part."""
        left = [node for node in self.flow.nodes if node not in placed]
        if left:
            raise PlanError(
                "SK208",
                f"{left[0].name} is in no part, and the parent has no stage ({len(left)} such nodes)",
                "Place every node of Dataflow.nodes.",
                left,
            )


def run_order(flow: Dataflow, plan: Plan) -> list[PartKey]:
    """Return the parts in the order in which they run.

    That is the order of their numbers if they have some and can run so, since the ranks of a pipeline go by them;
    else the order of `part_order`.

    Raises:
        CycleError: SK203 if parts wait for each other in a cycle.
    """
    places = {node: plan.places.get(node) or (PARENT,) for node in flow.nodes}
    numbers = _in_number_order(flow, places)
    if numbers and not any(PARENT in keys for keys in places.values()):
        return numbers
    keys = [key for key, _ in part_order(flow, plan) if key is not PARENT]  # the parent may close a cycle
    return keys if numbers is None else sorted(keys)  # type: ignore[type-var]


def _in_number_order(flow: Dataflow, places: Mapping[Node, tuple[PartKey, ...]]) -> list[PartKey] | None:
    """Return the parts in the order of their numbers; None if some have none, or they cannot run so."""
    keys = {key for own in places.values() for key in own if key is not PARENT}
    if not all(type(key) is int for key in keys):
        return None
    for node, own in places.items():
        for read in waits_for(flow, node):
            if (there := places[read]) == own and len(own) == 1:
                continue
            for key in own:
                source = key if key in there else there[0]
                if key is not PARENT and source is not PARENT and source > key:  # type: ignore[operator]
                    return None
    return sorted(keys)  # type: ignore[type-var]


def check_stage_optimizer(optimizer: object) -> None:
    """Raise SK302 for an unknown optimizer."""
    if optimizer is not None and not is_word(optimizer, *STATE_OF):
        raise PolicyError(
            "SK302",
            f"the optimizer is {shown(optimizer)}",
            f"Use {', '.join(map(repr, STATE_OF))}, or None for inference.",
        )


def _nodes_of(flow: Dataflow, nodes: object) -> list[Node]:
    """Return the nodes of a part that is given as a set of nodes; refuse anything else (SK301)."""
    found = items_of(nodes)
    strange = [nodes] if found is None else [n for n in found if not isinstance(n, Node) or not flow.is_placeable(n)]
    if found is None or strange:
        reason = f"a part is given with {shown(strange[0])}, which is not a node of the graph that is placed"
        raise PolicyError("SK301", reason, "Give sets of nodes of Dataflow.nodes, or a plan.", strange[:1])
    return found


class _Times:
    """Seconds of forward, and of both parts of backward."""

    def __init__(self, costs: Costs, flow: Dataflow, back: bool) -> None:
        self._costs, self._gm = costs, flow.root
        self._gradients = flow.fact(Gradients) if back else None
        self._known: dict[Node, tuple[float, float, float]] = {}

    def of(self, nodes: Iterable[Node]) -> tuple[float, float, float]:
        """Return the seconds of some nodes together."""
        forward = inputs = weights = 0.0
        for node in nodes:
            if node not in self._known:
                self._known[node] = self._of(node)
            times = self._known[node]
            forward, inputs, weights = forward + times[0], inputs + times[1], weights + times[2]
        return forward, inputs, weights

    def _of(self, node: Node) -> tuple[float, float, float]:
        forward, backward = forward_and_backward(self._costs, node)
        if self._gradients is None:
            return forward, 0.0, 0.0
        share = self._share(node, self._gradients.reads.get(node, frozenset())) if backward else 0.0
        return forward, backward * (1 - share), backward * share

    def _share(self, node: Node, reads: Collection[Node]) -> float:
        """Return the share of a node's backward that is for parameters."""
        values = [read for read in reads if read.op != "get_attr"]
        if not values:
            return 1.0
        weights = isinstance(target_of(self._gm, node), nn.Module) or len(reads) > len(values)
        return 0.5 if weights and is_product(self._gm, node) and len(values) == 1 else 0.0


# Bounds the bytes that a stage holds between the input part and the weight part of a divided backward.
#
# Torch's ``stage_backward_input`` runs the autograd graph down to the inputs and keeps it for
# ``stage_backward_weight``, with all saved values except those of nodes between the output and the last node that
# reads a parameter. It also captures the gradient of each value at which the path of a parameter meets the path of an
# input::
#
#     x ── linear ── gelu ── linear ── add ── out       captured: the gradients of both linears and of out (the second
#      └───────────────────────────────┘               linear and out have one: an addend has the gradient of the sum)


# Ops whose backward is a product for each factor.
_PRODUCTS = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "addmv", "__matmul__", "convolution"),
        *("_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    )
)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

_Gradient = tuple[Node, bool]
"""The memory of a gradient: the value, and whether its gradient comes from the next stage."""


def is_product(root: nn.Module, node: Node) -> bool:
    """Whether a node of a forward graph is a matrix product or a convolution."""
    target = target_of(root, node)
    return isinstance(target, _LAYERS) if isinstance(target, nn.Module) else op_name(target) in _PRODUCTS


def deferred_bytes(
    memory: GraphMemory,
    parts: Sequence[Sequence[Node]],
    homes: Mapping[Node, int],
    saved: Sequence[int],
) -> list[int]:
    """Return upper bounds on the bytes that each stage holds from the end of the input part to the end of the weight
    part, the received and the sent gradients included; the first stage has no input part.

    Args:
        memory: the memory of the graph's nodes, with training.
        parts: the nodes of each stage in order.
        homes: node -> the stage whose copy others read, for nodes in several stages.
        saved: stage -> its saved bytes.
    """
    stages = _Stages(memory, parts, homes)
    return [_Stage(stages, number).deferred(nbytes) for number, nbytes in enumerate(saved)]


@dataclass(frozen=True)
class _Stages:
    """Which stage makes and reads which value."""

    memory: GraphMemory
    parts: Sequence[Sequence[Node]]
    homes: Mapping[Node, int]

    @cached_property
    def lives(self) -> dict[Node, tuple[int, int]]:
        """Value -> the stage whose copy is sent, and the last stage that receives it."""
        lives: dict[Node, tuple[int, int]] = {}
        for number, nodes in enumerate(self.parts):
            for node in nodes:
                if self.homes.get(node, number) == number:
                    lives |= dict.fromkeys(self.memory.nodes[node].makes, (number, number))
        for number in range(len(self.parts)):
            for value in self.taken(number):
                lives[value] = lives[value][0], max(number, lives[value][1])
        for value in self.outputs.intersection(lives):  # the last stage hands it out
            lives[value] = lives[value][0], len(self.parts) - 1
        return lives

    @cached_property
    def outputs(self) -> frozenset[Node]:
        """The outputs of the graph: the loss, or the values from which it is computed."""
        return frozenset(self.memory.flow.graph.output_node().all_input_nodes)

    def made(self, stage: int) -> set[Node]:
        """Return the values that a stage makes."""
        return {made for node in self.parts[stage] for made in self.memory.nodes[node].makes}

    def taken(self, stage: int) -> set[Node]:
        """Return the values of other stages that a stage reads."""
        read = {value for node in self.parts[stage] for value in self.memory.nodes[node].reads}
        return {value for value in read - self.made(stage) if value.op != "placeholder"}

    def crossing(self, stage: int) -> list[Node]:
        """Return the values with a gradient that go from a stage to the next one."""
        requires = self.memory.activations.requires
        return [v for v, (home, last) in self.lives.items() if home <= stage < last and v in requires]


class _Stage:
    """The gradients of one stage."""

    def __init__(self, stages: _Stages, number: int) -> None:
        self._all, self._number = stages, number
        self._nodes: dict[Node, NodeMemory] = {node: stages.memory.nodes[node] for node in stages.parts[number]}
        self._made = stages.made(number)
        self._given = stages.crossing(number)
        self._come = stages.crossing(number - 1)
        self._readers: dict[Node, list[Node]] = {}
        for node, touched in self._nodes.items():
            for read in touched.contributes:
                if isinstance(read, Node):
                    self._readers.setdefault(read, []).append(node)
        # A reader of memory that was written depends on the writer, but the graph does not show it.
        effects = stages.memory.flow.effects
        self._writes = any(effects[node].writes for node, touched in self._nodes.items() if touched.contributes)

    def deferred(self, saved: int) -> int:
        """See `deferred_bytes`."""
        came = [(value, True) for value in self._given]
        if not self._number:
            return saved + self._sum(came)
        captures = self._captures()
        gradients = [*map(self._memory, self._results(captures)), *map(self._sent, self._come)]
        return saved - self._released(captures) + self._sum([*came, *gradients])

    def _trains(self, node: Node) -> bool:
        return any(not isinstance(read, Node) for read in self._nodes[node].contributes)

    def _captures(self) -> list[Node]:
        """Return the nodes at which the path of a parameter meets the path of an input of the stage."""
        depends, found = set(self._come), []
        for node, touched in self._nodes.items():
            reads = [r for r in touched.contributes if isinstance(r, Node) and r.op != "placeholder"]
            meets = any(read in depends for read in reads)
            if meets:
                depends.update(touched.makes)
            trains = self._trains(node)
            if (trains and self._writes) or (meets and (trains or any(read not in depends for read in reads))):
                found.append(node)
        return found

    def _results(self, nodes: Iterable[Node]) -> Iterator[Node]:
        """Return the values with a gradient that nodes make."""
        requires = self._all.memory.activations.requires
        return (made for node in nodes for made in self._nodes[node].makes if made in requires)

    def _memory(self, value: Node) -> _Gradient:
        """Return the memory of a value's gradient: a later value if an op passes it on and nothing is added."""
        while True:
            readers = self._readers.get(value, [])
            if value in self._given:
                return value, not readers
            ends = value in self._all.outputs  # a loss may add its own
            if ends or len(readers) != 1 or not self._is_handed(readers[0], value):
                return value, False
            (value,) = self._nodes[readers[0]].makes

    def _sent(self, value: Node) -> _Gradient:
        """Return the memory of a gradient that is sent upstream: `_memory`, or a copy where that is not contiguous."""
        found = self._memory(value)
        alike = self._nbytes(found[0]) == self._nbytes(value)
        ends = [t for v in (value, found[0]) for t in tensors(value_of(v))]
        plain = found[0] in self._given or all(is_dense(t, any_order=False) for t in ends)
        return found if alike and plain else (value, False)

    def _is_handed(self, node: Node, value: Node) -> bool:
        touched = self._nodes[node]
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        once = sum(leaf is value for leaf in leaves) == 1 and len(touched.makes) == 1
        return once and value in touched.handed and not self._writes

    def _sum(self, gradients: Iterable[_Gradient]) -> int:
        return sum(self._nbytes(value) for value, _ in set(gradients))

    def _nbytes(self, value: Node) -> int:
        wide = (self._nodes[node].wide.get(value, 0) for node in self._readers.get(value, ()))
        return max(self._all.memory.nbytes[value], *wide, 0)

    def _released(self, captures: Sequence[Node]) -> int:
        """Return the bytes that torch frees: those saved only by nodes after all captures by detaching the output."""
        if self._writes:
            return 0
        below = set(captures)
        for node in reversed(self._nodes):
            if node not in below:
                readers = (r for made in self._nodes[node].makes for r in self._readers.get(made, ()))
                below |= {node} & {node for reader in readers if reader in below}
        kept = {s for node in below for s in self._nodes[node].saves}
        values = self._all.memory.activations.values
        held = (
            *(v for touched in self._nodes.values() for v in touched.reads if v not in self._made),
            *self._yielded(),
        )
        kept |= {s for value in held for s in values.get(value, ())}
        return self._storages({s for touched in self._nodes.values() for s in touched.saves} - kept)

    def _yielded(self) -> Iterator[Node]:
        """Return the values that a later stage reads, or that are outputs of the graph."""
        lives = self._all.lives
        return (v for v in self._made if v in self._all.outputs or lives[v][1] > self._number)

    def _storages(self, numbers: Iterable[int]) -> int:
        return sum(self._all.memory.storage_sizes[number] for number in numbers)
