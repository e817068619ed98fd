"""Divide a joint graph into the graphs of pipeline stages by a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.engine.codegen.part_modules import pickle_by_nodes
from splitkit.engine.complete import check_plan
from splitkit.engine.pair import Pair, decide_joint, divide
from splitkit.engine.stage_traffic import StageLine, StageTraffic
from splitkit.engine.staged_step import StagedStep, StageGraphs, StageOffload, await_copy, start_copy
from splitkit.errors import CycleError, PlanError
from splitkit.plans.parts import PartKey
from splitkit.plans.policy import PolicyLike
from splitkit.plans.record import Plan
from splitkit.training.emission_order import EmissionOrder
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow
from splitkit.training.stage_parts import FULL_BACKWARD, SPLIT_BACKWARD, StagePart, is_staged, known_part, stage_part
from splitkit.training.stage_plan import GradientTerm, gradient_terms, tied_parameters

Places = dict[Node, tuple[PartKey, ...]]


def divide_by_policy(flow: JointFlow, policy: PolicyLike, costs: Costs) -> Pair | StagedStep:
    """Divide a joint graph by a policy: into forward and backward or, if the plan has stages, into those of each.

    Raises:
        SplitError: those of `splitkit.engine.pair.divide` and `divide_stages`.
    """
    plan = decide_joint(flow, policy, costs)
    return divide_stages(flow, plan) if is_staged(plan.parts) else divide(flow, plan, costs)


def divide_stages(flow: JointFlow, plan: Plan) -> StagedStep:
    """Divide a joint graph into the stages of a plan, after checking that they compute what the graph computes.

    Raises:
        PlanError: SK202 for a second copy of a node that may run only once, SK206 for parts that are not stages, SK208
            for a node that is needed but has no part, SK210 for an effect in a part where it may run too late,
            SK220 for a value that cannot wait on the host.
        CycleError: SK203 for a value, or an effect, that is needed before it is there.
    """
    line = stage_line(plan)
    if missing := [n for n in flow.nodes if n not in plan.places]:
        raise PlanError(
            "SK208",
            f"{missing[0].name} is in no stage of the plan",
            "Give every node a part; splitkit.extend.stage_plan does, from a stage for each node of forward.",
            missing,
        )
    places = {n: plan.places[n] for n in flow.nodes}
    places |= {n: places[flow.producer(n)] for n in flow.scope if flow.producer(n) in places}
    terms = gradient_terms(flow, places)
    own = replace(plan, places=places)
    check_plan(flow, own)
    check_effects(flow, own, line)
    return _Division(flow, own, line, terms, StageOffload.of(flow, plan.offloaded, places)).step()


@dataclass(frozen=True, eq=False)
class _Division:
    """A checked plan, and what follows from it."""

    flow: JointFlow
    plan: Plan
    line: StageLine
    terms: Sequence[GradientTerm]
    offload: StageOffload

    @cached_property
    def places(self) -> Places:
        """Node -> its parts; inputs are in every forward, and tangents in the last backward."""
        places = dict(self.plan.places)
        everywhere = tuple(StagePart("forward", stage) for stage in self.line.stages)
        places |= {n: everywhere for n in self.flow.scope if n.op == "placeholder"}
        places |= {n: self.line.parts for n in self.flow.scope if n.op == "get_attr"}
        return places | dict.fromkeys(self.flow.backward_inputs, (self.line.backward(self.line.stages[-1]),))

    @cached_property
    def members(self) -> dict[StagePart, list[Node]]:
        """Part -> the nodes that it computes, in graph order; attributes are not among them."""
        found: dict[StagePart, list[Node]] = {part: [] for part in self.line.parts}
        for node in self.flow.scope:
            if node.op not in ("placeholder", "get_attr", "output"):
                for key in self.places.get(node, ()):
                    found[known_part(key)].append(node)
        return found

    @cached_property
    def outputs(self) -> dict[StagePart, list[int]]:
        """Forward part -> the positions of the outputs that it returns."""
        found: dict[StagePart, list[int]] = {StagePart("forward", stage): [] for stage in self.line.stages}
        for position, value in enumerate(self.flow.outputs):
            if isinstance(value, Node):
                found[self._maker_of_output(value)].append(position)
        return found

    def _maker_of_output(self, value: Node) -> StagePart:
        for key in self.places[value]:
            if (part := stage_part(key)) is not None and part.half == "forward":
                return part
        raise PlanError(
            "SK208",
            f"forward returns {value.name}, which is planned in {list(self.places[value])}",
            "Place it, and what it reads, in the 'forward' of a stage.",
            [value],
        )

    @cached_property
    def returned(self) -> dict[StagePart, list[GradientTerm]]:
        """Backward part -> the terms of gradients that it returns."""
        found: dict[StagePart, list[GradientTerm]] = {}
        for term in self.terms:
            late = StagePart("weight", term.stage)
            in_weight = any(late in self.places[n] for n in term.nodes)
            part = late if in_weight else self.line.backward(term.stage)
            found.setdefault(part, []).append(term)
        return found

    @cached_property
    def traffic(self) -> StageTraffic:
        """What the parts take from each other."""
        traffic = StageTraffic(self.line, self.places)
        for part, nodes in self.members.items():
            for node in nodes:
                traffic.take(part, node.all_input_nodes, f"for {node.name}")
        for part, terms in self.returned.items():
            for term in terms:
                traffic.take(part, term.nodes, "as a gradient")
        return traffic

    def step(self) -> StagedStep:
        """Emit all graphs."""
        stages = tuple(self._stage(stage) for stage in self.line.stages)
        constants = {i: v for i, v in enumerate(self.flow.outputs) if not isinstance(v, Node)}
        primals = [n.name for n in self.flow.graph.find_nodes(op="placeholder") if n not in self.flow.backward_inputs]
        return StagedStep(
            stages=stages,
            primals=tuple(primals),
            tangents=tuple(n.name for n in self.flow.backward_inputs),
            outputs=len(self.flow.outputs),
            constants=constants,
            gradients=len(self.flow.gradients),
            ties=tied_parameters(list(self.terms)),
            plan=self.plan,
        )

    def _stage(self, stage: int) -> StageGraphs:
        line, last = self.line, stage + 1 == len(self.line.split)
        forward, backward, weight = StagePart("forward", stage), line.backward(stage), StagePart("weight", stage)
        received = self._between(StagePart("forward", stage - 1), forward) if stage else []
        sent = [] if last else self._between(forward, StagePart("forward", stage + 1))
        saved = self._between(forward, backward)
        deferred = self._between(forward, weight)
        waiting = self._between(backward, weight)
        grads_in = [] if last else self._between(line.backward(stage + 1), backward)
        grads_out = self._between(backward, line.backward(stage - 1)) if stage else []
        tangents = list(self.flow.backward_inputs) if last else []
        outputs = [self.flow.outputs[i] for i in self.outputs[forward]]
        held = dict.fromkeys([*saved, *(v for v in deferred if v not in saved)])
        reads = {r for n in self.members[forward] for r in n.all_input_nodes} | set(held) | set(outputs)
        moved = self.offload.of_stage(stage, held, [*received, *sent])
        primals = [
            n for n in self.flow.graph.find_nodes(op="placeholder") if n in reads and n not in self.flow.backward_inputs
        ]
        return StageGraphs(
            forward=_emit(
                self.flow,
                self.order.forward(self.members[forward], [*sent, *held]),
                [*primals, *received],
                [*outputs, *sent, *held],
                leaving=moved,
            ),
            backward=_emit(
                self.flow,
                self.order.backward(self.members[backward]),
                [*saved, *tangents, *grads_in],
                [*grads_out, *_sums(self.returned.get(backward, [])), *waiting],
                coming=moved,
            ),
            weight=_emit(
                self.flow,
                self.order.backward(self.members[weight]),
                [*deferred, *waiting],
                _sums(self.returned.get(weight, [])),
            ) if line.split[stage] else None,
            primals=_names(primals),
            received=_names(received),
            outputs=tuple(self.outputs[forward]),
            sent=_names(sent),
            saved=_names(saved),
            deferred=_names(deferred),
            gradients_received=_names(grads_in),
            gradients_sent=_names(grads_out),
            gradients=tuple(t.position for t in self.returned.get(backward, [])),
            waiting=_names(waiting),
            weight_gradients=tuple(t.position for t in self.returned.get(weight, [])),
            offloaded=_names(moved),
        )  # fmt: skip

    @cached_property
    def order(self) -> EmissionOrder:
        """The order of nodes within a part."""
        return EmissionOrder(self.flow)

    def _between(self, source: StagePart, target: StagePart) -> list[Node]:
        if source not in self.members or target not in self.members:
            return []
        return sorted(self.traffic.between(source, target), key=self.flow.index.__getitem__)


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(n.name for n in nodes)


_WrittenValue = Callable[[fx.Graph, dict[Node, Node]], Node]
"""Adds nodes of its own to a graph, given node of the joint graph -> its copy, and returns the last."""


def _sums(terms: Sequence[GradientTerm]) -> list[Node | _WrittenValue]:
    """Return the values of some terms of gradients, as outputs of a graph."""
    return [term.nodes[0] if len(term.nodes) == 1 else _sum(term) for term in terms]


def _sum(term: GradientTerm) -> _WrittenValue:
    def write(graph: fx.Graph, env: dict[Node, Node]) -> Node:
        total = env[term.nodes[0]]
        for node in term.nodes[1:]:
            total = graph.call_function(torch.ops.aten.add.Tensor, (total, env[node]))
            total.meta["val"] = node.meta["val"]
        return total

    return write


def _emit(
    flow: JointFlow,
    nodes: Iterable[Node],
    inputs: Sequence[Node],
    outputs: Sequence[object],
    leaving: Collection[Node] = (),
    coming: Collection[Node] = (),
) -> fx.GraphModule:
    """Return the graph that computes ``nodes`` in their order, with the attributes that they read.

    Args:
        flow: facts about the joint graph.
        nodes: what it computes; inputs among them are taken as inputs.
        inputs: its placeholders, in order.
        outputs: what it returns: nodes, constants, or a `_WrittenValue`.
        leaving: values whose copies to the host start here. Among the outputs the copies stand for them; they
            themselves are returned last.
        coming: inputs that are on their way from the host.
    """
    graph, env, hosts = fx.Graph(), dict[Node, Node](), dict[Node, Node]()
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)

    def copied(node: Node) -> Node:
        if node not in env and node.op == "get_attr":
            env[node] = graph.node_copy(node)
        return env[node]

    due = {value for value in coming if value in env}
    for node in nodes:
        if node not in env:
            for value in [read for read in node.all_input_nodes if read in due]:
                env[value] = await_copy(graph, value, env[value])
                due.remove(value)
            env[node] = graph.node_copy(node, copied)
            if node in leaving:
                hosts[node] = start_copy(graph, node, env[node])

    def returned(value: object) -> Any:
        if isinstance(value, Node):
            return hosts[value] if value in hosts else copied(value)
        return value(graph, env) if callable(value) else value

    graph.output((*map(returned, outputs), *(env[value] for value in leaving)))
    return pickle_by_nodes(fx.GraphModule(flow.root, graph))


# Check that a staged plan of a joint graph keeps what the graph does to memory, random numbers and the world.


_REMEDY = "Use a policy that divides a training step into stages, such as splitkit.extend.stage_plan makes."


def stage_line(plan: Plan) -> StageLine:
    """Return the parts of a staged plan in their order.

    Raises:
        PlanError: SK206 for a part that is not of a stage, a number that is left out, or a stage with both
            ``"backward"`` and ``"input"`` or ``"weight"``.
    """
    halves: dict[int, set[str]] = {}
    for key in plan.parts:
        part = stage_part(key)
        if part is None:
            raise PlanError(
                "SK206",
                f"{key!r} is not part of a stage, unlike the other parts of this plan",
                f"Parts of stages are {', '.join(repr((half, 0)) for half in FULL_BACKWARD)}, and so on, or "
                f"{', '.join(repr((half, 0)) for half in SPLIT_BACKWARD)}.",
            )
        halves.setdefault(part.stage, set()).add(part.half)
    count = max(halves) + 1
    if missing := [stage for stage in range(count) if stage not in halves]:
        raise PlanError("SK206", f"stage {missing[0]} of {count} has no nodes", "Number stages from 0.")
    for stage, found in sorted(halves.items()):
        if "backward" in found and found & {"input", "weight"}:
            raise PlanError(
                "SK206",
                f"stage {stage} has parts {sorted(found)}",
                "Its backward is either one part, 'backward', or two, 'input' and 'weight'.",
            )
    return StageLine(tuple(bool(halves[stage] & {"input", "weight"}) for stage in range(count)))


def check_effects(flow: JointFlow, plan: Plan, line: StageLine) -> None:
    """Refuse an effect in the other half than under eager autograd, in a weight part, or in another order.

    Raises:
        PlanError: SK210 for an effect in a half or part where it may run too late, or never.
        CycleError: SK203 for a node that would run before an effect that it must follow.
    """
    home = flow.save_all
    when: dict[PartKey, int] = {part: i for i, part in enumerate(line.parts)}
    for node, reason in flow.once.items():
        producer = flow.producer(node)
        if producer not in home or not plan[producer]:
            continue
        part = known_part(plan[producer][0])
        expected = home.home(producer)
        half = FORWARD if part.half == "forward" else BACKWARD
        if half != expected or part.half == "weight":
            raise PlanError(
                "SK210",
                f"{producer.name} is planned in {tuple(part)!r}, but it belongs to {expected!r}: {reason}",
                "Leave it in the half where splitkit.training.flow.save_all_plan has it, and not in 'weight', which "
                "may run much later.",
                [producer],
            )
    for node in flow.nodes:
        for before in flow.after.get(node, ()):
            _check_after(node, before, plan, when, home)


def _check_after(node: Node, before: Node, plan: Plan, when: Mapping[PartKey, int], home: Plan) -> None:
    """Refuse a copy of ``node`` that runs before a copy of ``before`` in the same half."""
    # A copy that backward recomputes follows the whole of forward, so only effects of its own half can come too late.
    for key in plan[node]:
        for earlier in plan.get(before, ()):
            same_half = (known_part(key).half == "forward") == (home.get(before) == (FORWARD,))
            if when[earlier] > when[key] and same_half:
                raise CycleError(
                    "SK203",
                    f"{node.name} must run after {before.name}, an effect or a read, but is planned in "
                    f"{tuple(known_part(key))!r}, which runs before {tuple(known_part(earlier))!r}",
                    f"Place {before.name}, and what it reads, in the part of {node.name}, or earlier.",
                    [node, before],
                )
