"""Divide a joint graph into the graphs of pipeline stages by a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.engine.complete import check_plan
from splitkit.engine.pair import HostCopies, Pair, decide_joint, divide, emitted_half
from splitkit.engine.staged_step import StagedStep, StageGraphs, check_moved, offloaded_stages
from splitkit.errors import CycleError, PlanError
from splitkit.graph.storages import value_of
from splitkit.memory.kernels.kernel_results import host_value
from splitkit.plans.parts import PartKey
from splitkit.plans.policy import PolicyLike
from splitkit.plans.record import Plan
from splitkit.training.emission_order import EmissionOrder
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow
from splitkit.training.stage_parts import FULL_BACKWARD, SPLIT_BACKWARD, StagePart, is_staged, known_part, stage_part
from splitkit.training.stage_plan import GradientTerm, Places, gradient_terms, tied_parameters


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
    return _Division(flow, own, line, terms, offloaded_stages(flow, plan.offloaded, places)).step()


@dataclass(frozen=True, eq=False)
class _Division:
    """A checked plan, and what follows from it."""

    flow: JointFlow
    plan: Plan
    line: StageLine
    terms: Sequence[GradientTerm]
    offload: Mapping[Node, int]

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
    def taken(self) -> dict[StagePart, dict[Node, StagePart]]:
        """Part -> value that it takes -> the part that it takes the value from.

        Raises:
            CycleError: SK203 for a value that no part before the one that needs it has.
        """
        found: dict[StagePart, dict[Node, StagePart]] = {part: {} for part in self.line.parts}
        for part, nodes in self.members.items():
            for node in nodes:
                for value in node.all_input_nodes:
                    self._take(found, part, value, f"for {node.name}")
        for part, terms in self.returned.items():
            for value in (node for term in terms for node in term.nodes):
                self._take(found, part, value, "as a gradient")
        return found

    def _take(self, taken: dict[StagePart, dict[Node, StagePart]], part: StagePart, value: Node, why: str) -> None:
        """Let a part, and the parts on the way to it, take a value; ``why`` says what it is needed for."""
        while part not in self.places[value] and value not in taken[part]:
            source = next((p for p in self._sources(part, value) if self._has(p, value)), None)
            if source is None:
                raise _cycle(part, value, self.places[value], why)
            taken[part][value] = source
            part = source

    def _sources(self, part: StagePart, value: Node) -> tuple[StagePart, ...]:
        """Return the parts from which a part may take a value, the preferred one first.

        What the input part recomputes waits for the weight part; if the weight part took forward's copy, forward would
        have to save what the plan recomputes.
        """
        early = StagePart("input", part.stage)
        if part.half == "weight" and early in self.places[value]:
            return (early,)
        return self.line.before(part)

    def _has(self, part: StagePart, value: Node) -> bool:
        """Whether a part computes a value, or can take it."""
        return part in self.places[value] or any(self._has(p, value) for p in self.line.before(part))

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
        moved = sorted((n for n, own in self.offload.items() if own == stage), key=self.flow.index.__getitem__)
        check_moved(self.flow, moved, stage, held, [*received, *sent])
        primals = [
            n for n in self.flow.graph.find_nodes(op="placeholder") if n in reads and n not in self.flow.backward_inputs
        ]
        late, given = self.order.backward(self.members[backward]), [*saved, *tangents, *grads_in]
        return StageGraphs(
            forward=emitted_half(
                self.flow,
                self.order.forward(self.members[forward], [*sent, *held]),
                [*primals, *received],
                [*outputs, *sent, *held],
                HostCopies(made={value: host_value(value_of(value)) for value in moved}),
                kept=moved,
            ),
            backward=emitted_half(
                self.flow,
                late,
                given,
                [*grads_out, *_sums(self.returned.get(backward, [])), *waiting],
                _coming(late, given, moved),
            ),
            weight=emitted_half(
                self.flow,
                self.order.backward(self.members[weight]),
                [*deferred, *waiting],
                _sums(self.returned.get(weight, [])),
                HostCopies(),
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
        """Return the values that one part takes from another; none if one of them is not there."""
        taken = (value for value, origin in self.taken.get(target, {}).items() if origin == source)
        return sorted(taken, key=self.flow.index.__getitem__)


def _names(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(n.name for n in nodes)


def _sums(terms: Sequence[GradientTerm]) -> list[Node | Callable[[fx.Graph, dict[Node, Node]], Node]]:
    """Return the values of some terms of gradients, as outputs of a graph."""
    return [term.nodes[0] if len(term.nodes) == 1 else _sum(term) for term in terms]


def _sum(term: GradientTerm) -> Callable[[fx.Graph, dict[Node, Node]], Node]:
    def write(graph: fx.Graph, env: dict[Node, Node]) -> Node:
        total = env[term.nodes[0]]
        for node in term.nodes[1:]:
            total = graph.call_function(torch.ops.aten.add.Tensor, (total, env[node]))
            total.meta["val"] = node.meta["val"]
        return total

    return write


def _coming(nodes: Iterable[Node], inputs: Collection[Node], moved: Iterable[Node]) -> HostCopies:
    """Return the waits of a backward graph for inputs on their way from the host, each before its first reader."""
    due, read = {value for value in moved if value in inputs}, dict[Node, list[Node]]()
    for node in nodes:
        for value in [value for value in node.all_input_nodes if value in due]:
            read.setdefault(node, []).append(value)
            due.remove(value)
    return HostCopies(read=read)


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


# Find which values each part of a staged training step receives, and from which part. The parts of one microbatch run
# in one line, and a value goes along the arrows only::
#
#     forward 0  ─>  forward 1  ─>  forward 2        activations
#         │              │              │            saved values
#         v              v              v
#     backward 0 <─  backward 1 <─  backward 2       gradients
#
# Where backward is two graphs, ``input`` stands in the place of ``backward``, and ``weight`` of the same stage takes
# what it reads from ``forward`` and ``input`` of its stage and gives nothing to other parts.


@dataclass(frozen=True)
class StageLine:
    """The parts of a staged plan in the order in which one microbatch visits them.

    Attributes:
        split: for each stage, whether its backward is two graphs.
    """

    split: tuple[bool, ...]

    @property
    def stages(self) -> range:
        """The numbers of the stages."""
        return range(len(self.split))

    def backward(self, stage: int) -> StagePart:
        """The part that computes the gradients that leave a stage."""
        return StagePart("input" if self.split[stage] else "backward", stage)

    @property
    def parts(self) -> tuple[StagePart, ...]:
        """All parts, in order: forward up, backward down, weight right after the input part of its stage."""
        found = [StagePart("forward", stage) for stage in self.stages]
        for stage in reversed(self.stages):
            found += [self.backward(stage), *([StagePart("weight", stage)] if self.split[stage] else [])]
        return tuple(found)

    def before(self, part: StagePart) -> tuple[StagePart, ...]:
        """The parts from which a part may take values, the preferred one first."""
        half, stage = part
        if half == "forward":
            return (StagePart("forward", stage - 1),) if stage else ()
        if half == "weight":
            return StagePart("forward", stage), StagePart("input", stage)
        above = (self.backward(stage + 1),) if stage + 1 < len(self.split) else ()
        return (StagePart("forward", stage), *above)


def _cycle(part: StagePart, value: Node, places: tuple[PartKey, ...], why: str) -> CycleError:
    where = f"computed in {', '.join(map(_named, places))}" if places else "computed nowhere"
    return CycleError(
        "SK203",
        f"{_named(part)} needs {value.name} {why}, but it is {where}, which does not run before it",
        "Activations go only to later stages, gradients only to earlier ones; 'weight' sends nothing to other parts.",
        [value],
    )


def _named(key: PartKey) -> str:
    return f"{key[0]!r} of stage {key[1]}" if isinstance(key, tuple) else repr(key)
