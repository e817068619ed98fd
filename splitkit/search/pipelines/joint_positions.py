"""Places the nodes of a joint graph on one line, so that an interval of the line is a pipeline stage.

A forward node has its number in the order of forward. A node of backward has the number of the forward node that it
belongs to, moved where it must be so that gradients only flow to earlier stages::

    forward     x -> mm -> gelu -> mm_1 -> loss         positions 0 1 2 3
    backward    dx <- d_mm <- d_gelu <- d_mm_1          positions 0 1 2 3
    a cut at 2  stage 0: mm, gelu, d_mm, d_gelu         stage 1: mm_1, loss, d_mm_1
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.fx import Node

from splitkit.graph.joint_marks import forward_owners
from splitkit.graph.node_values import value_bytes
from splitkit.graph.storages import value_of
from splitkit.pipeline.inseparable_nodes import together
from splitkit.pipeline.run import ScheduleRun
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune
from splitkit.training.choices import Choice, Ints
from splitkit.training.emission_order import EmissionOrder
from splitkit.training.flow import FORWARD, JointFlow, output_nodes, save_all_plan
from splitkit.training.stage_parts import StagePart
from splitkit.training.stage_plan import terms_and_sums


@dataclass(frozen=True)
class Crossing:
    """A value that a cut sends to another stage.

    Attributes:
        value: the node.
        made: the position of its maker.
        last: the position of its farthest reader: higher than ``made`` for an activation, lower for a gradient.
        nbytes: the bytes of the message.
    """

    value: Node
    made: int
    last: int
    nbytes: int


class JointPositions:
    """The positions of the nodes of a joint graph, and the cuts that are possible.

    A cut at p puts positions below p into earlier stages.

    Attributes:
        flow: facts about the graph.
        forward: the placeable nodes of forward; a node's index is its position.
        place: placeable node -> its position, of forward and backward.
        late: the placeable nodes of backward that depend on no gradient, and so may run in forward as well.
        activations: forward values that are read at a later position.
        gradients: values of backward that are read at an earlier position, and inputs of backward, which the last stage
            is given. Terms of the gradient of a tied parameter are not among them: they are summed once a step, not
            once a microbatch.
        ties: the nodes that add up such terms.
        legal: (c,) the positions at which a cut is possible, in order.
    """

    def __init__(self, flow: JointFlow) -> None:
        self.flow = flow
        home = save_all_plan(flow)
        self.forward = tuple(n for n in flow.nodes if home.home(n) == FORWARD)
        self._backward = tuple(n for n in flow.nodes if home.home(n) != FORWARD)
        self.place = {node: i for i, node in enumerate(self.forward)}
        self._forwards = set(self.forward)
        self._blocked = np.zeros(len(self.forward) + 2, np.int64)
        """The number of reasons against a cut at each position, as differences."""
        self.late = frozenset(self._late())
        self.ties = frozenset(self._sums_of_parameters())
        owners = forward_owners(flow.graph)
        for node in self._backward:
            if node not in self.late:
                self._place_gradient(node, owners.get(node))
        for node in reversed(self._backward):
            if node in self.late:
                self._place_late(node)
        self.activations, self.gradients = tuple(self._activations()), tuple(self._gradients())
        self._keep_together()
        free = np.cumsum(self._blocked)[: len(self.forward)] == 0
        free[:1] = False
        self.legal: Ints = np.flatnonzero(free)

    def readers(self, value: Node) -> Iterator[Node]:
        """Yield the placeable nodes that read a value, or members of it."""
        for user in value.users:
            reader = self.flow.producer(user)
            if self.flow.is_placeable(reader) and reader is not self.flow.producer(value):
                yield reader
            elif user in self.flow.followers:
                yield from self.readers(user)

    def _late(self) -> Iterator[Node]:
        """Yield the nodes of backward that depend on no gradient."""
        tainted = set(self.flow.backward_inputs)
        for node in self.flow.index:
            if node.op != "output" and any(read in tainted for read in node.all_input_nodes):
                tainted.add(node)
        yield from (n for n in self._backward if n not in tainted)

    def _sums_of_parameters(self) -> Iterator[Node]:
        """Yield the sums of terms of gradients, which stages may compute apart."""
        returned = list(output_nodes(self.flow.gradients))
        for value in returned:
            yield from terms_and_sums(value, returned)[1]

    def _place_gradient(self, node: Node, owner: Node | None) -> None:
        """Place a node that depends on a gradient: no later than the gradients that it reads."""
        reads = self.flow.inputs(node)
        low = max((self.place[r] for r in reads if r in self.place and r in self._forwards), default=0)
        high = min((self.place[r] for r in reads if r in self.place and r not in self._forwards), default=None)
        own = self.place[self.flow.producer(owner)] if owner is not None else len(self.forward) - 1
        own = max(own, low)
        self.place[node] = own if high is None else min(own, high)
        self._forbid(self.place[node], low)

    def _place_late(self, node: Node) -> None:
        """Place a node that depends on no gradient where it is read last in the order of stages."""
        reads = [self.place[r] for r in self.flow.inputs(node) if r in self._forwards]
        readers = [self.place[r] for r in self.readers(node) if r in self.place]
        low = max(reads, default=0)
        self.place[node] = max(readers, default=low)
        self._forbid(self.place[node], low)

    def _forbid(self, low: int, high: int) -> None:
        """Allow no cut above ``low`` up to ``high``."""
        if low < high:
            self._blocked[low + 1] += 1
            self._blocked[high + 1] -= 1

    def _activations(self) -> Iterator[Crossing]:
        """Yield what forward sends on; views of parameters stay with their readers."""
        flow = self.flow
        trained = _views_of(flow, trained_inputs(flow))
        for value in flow.index:
            maker = flow.producer(value)
            if maker not in self._forwards or isinstance(value_of(value), tuple | list):
                continue
            made = self.place[maker]
            last = max((self.place[r] for r in self.readers(value)), default=made)
            if last <= made:
                continue
            if value in trained:
                self._forbid(made, last)
            else:
                yield Crossing(value, made, last, value_bytes(value))

    def _gradients(self) -> Iterator[Crossing]:
        last_stage = len(self.forward) - 1
        for value in self.flow.index:
            maker, given = self.flow.producer(value), value in self.flow.backward_inputs
            own = maker in self.place and maker not in self._forwards
            if not (own or given) or isinstance(value_of(value), tuple | list):
                continue
            made = last_stage if given else self.place[maker]
            readers = [self.place[r] for r in self.readers(value) if r not in self.ties]
            last = min(readers, default=made)
            if last < made:
                yield Crossing(value, made, last, value_bytes(value))

    def _keep_together(self) -> None:
        """Forbid cuts between nodes that no runtime can separate, and between forward nodes with effects in order."""
        for nodes in together(self.flow):
            here = [self.place[n] for n in nodes if n in self.place]
            self._forbid(min(here), max(here))


def trained_inputs(flow: JointFlow) -> list[Node]:
    """Return the inputs that get a gradient: backward returns one, or ``None``, for each input of forward in order."""
    primals = [n for n in flow.graph.find_nodes(op="placeholder") if n not in flow.backward_inputs]
    return [primal for primal, gradient in zip(primals, flow.gradients, strict=False) if isinstance(gradient, Node)]


def _views_of(flow: JointFlow, inputs: Iterable[Node]) -> set[Node]:
    """Return the nodes whose values lie in the memory of these inputs."""
    found = set(inputs)
    for node in flow.index:
        is_tensor = node.op not in ("placeholder", "output") and isinstance(value_of(node), torch.Tensor)
        if is_tensor and not flow.storages.under(node) and any(read in found for read in node.all_input_nodes):
            found.add(node)
    return found - set(inputs)


def bytes_across(crossings: Sequence[Crossing], cuts: Ints) -> Ints:
    """Return (c,) the bytes of the messages at each cut."""
    change = np.zeros(int(cuts.max(initial=0)) + 2, np.int64)
    for crossing in crossings:
        low, high = sorted((crossing.made, crossing.last))
        for at, nbytes in ((low + 1, crossing.nbytes), (high + 1, -crossing.nbytes)):
            if at < len(change):
                change[at] += nbytes
    found: Ints = np.cumsum(change)[cuts]
    return found


# Turns cuts of a joint graph, and what its stages save, into a plan with the parts of stages.


@dataclass(frozen=True, eq=False)
class PlannedPipeline:
    """A plan of pipeline stages with the simulated step that it was chosen for.

    Attributes:
        plan: the plan.
        run: the step.
        limits: the bytes of each rank, ``None`` without limit.
        recompute: the seconds that each stage computes again.
    """

    plan: Plan
    run: ScheduleRun
    limits: tuple[int | None, ...]
    recompute: tuple[float, ...]


def staged_plan(members: StageMembers, ends: Sequence[int], choices: Sequence[Choice], note: str) -> Plan:
    """Return the plan of a joint graph with the parts ``("forward", s)`` and ``("backward", s)``.

    Nodes that are computed again have both, and nodes that nothing needs have none.

    Args:
        members: the ops of all stages.
        ends: the position behind each stage.
        choices: what each stage saves and computes again.
        note: what made the plan.
    """
    places: dict[Node, tuple[PartKey, ...]] = dict.fromkeys(members.positions.flow.nodes, ())
    starts = (0, *ends[:-1])
    for stage, (start, end, choice) in enumerate(zip(starts, ends, choices, strict=True)):
        parts_here = StagePart("forward", stage), StagePart("backward", stage)
        for part, ops in zip(parts_here, members.of(start, end, choice), strict=True):
            for node in members.order.nodes(ops):
                if node in places:
                    places[node] += (part,)
    parts = [StagePart("forward", s) for s in range(len(ends))]
    parts += [StagePart("backward", s) for s in reversed(range(len(ends)))]
    return Plan(places, {key: Part(key) for key in parts}, note=note)


# Says which ops the forward and the backward of a stage compute: the one place for times, memory and the plan.


@dataclass(frozen=True, eq=False)
class GradientSum:
    """A gradient that backward sums up from terms; a stage that has only some of them returns their sum.

    Attributes:
        sums: the ops that add the terms up, if one stage has all of them.
        storages: the storages of each term.
        places: the position of each term.
        nbytes: the bytes of the gradient.
    """

    sums: frozenset[int]
    storages: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]
    nbytes: int

    def own(self, start: int, end: int) -> list[int]:
        """Return the indices of the terms that a stage computes; empty if it computes all of them."""
        found = [i for i, place in enumerate(self.places) if start <= place < end]
        return [] if len(found) == len(self.places) else found


class StageMembers:
    """The ops of all stages of a joint graph; ops go by the numbers of `EmissionOrder`.

    Attributes:
        positions: the positions of the nodes.
        order: the order of the ops within a half.
        at: (n,) the position of each op; -1 for attributes, and for what nothing needs.
        forward: (n,) bool; the ops that forward computes if everything is saved.
        late: (n,) bool; the other ops that depend on no gradient, and so may run in forward as well.
        inputs: the ops whose values each op reads.
        sums: the gradients that are sums of terms from possibly different stages.
    """

    def __init__(self, positions: JointPositions, order: EmissionOrder) -> None:
        self.positions, self.order = positions, order
        flow, place = positions.flow, positions.place
        makers = [flow.producer(nodes[0]) for nodes in order.ops]
        needed, forward = prune(flow, save_all_plan(flow)).places, set(positions.forward)
        self.at = np.array([place[n] if needed.get(n) else -1 for n in makers], np.int64)
        self.forward = np.array([n in forward for n in makers], np.bool_)
        self.late = np.array([n in positions.late for n in makers], np.bool_)
        self.inputs = [[order.number[r] for r in flow.inputs(n)] if n in place else [] for n in makers]
        self.sums = tuple(self._sums_of_terms())
        self._crossings = [(c.made, c.last, c.value) for c in positions.activations]
        ends = {order.number[n] for n in output_nodes(flow.gradients) if n in order.number}
        self._stays = {op for op in np.flatnonzero(self.late).tolist() if op in ends or makers[op] in flow.once}
        self._readers: dict[int, list[int]] = {}
        for op, reads in enumerate(self.inputs):
            for read in reads:
                if self.late[read]:
                    self._readers.setdefault(read, []).append(op)

    def _sums_of_terms(self) -> Iterator[GradientSum]:
        flow, number = self.positions.flow, self.order.number
        returned = list(output_nodes(flow.gradients))
        for value in dict.fromkeys(returned):
            terms, sums = terms_and_sums(value, returned)
            places = [int(self.at[number[t]]) if t in number else -1 for t in terms]
            if sums and min(places) >= 0:
                storages = tuple(tuple(flow.storages.under(t)) for t in terms)
                nbytes = sum(flow.storages.nbytes[s] for s in flow.storages.under(value))
                yield GradientSum(frozenset(number[s] for s in sums), storages, tuple(places), nbytes)

    def elsewhere(self, start: int, end: int) -> set[int]:
        """Return the sums that no stage computes, since a stage has only some of their terms."""
        return {op for each in self.sums if not all(start <= p < end for p in each.places) for op in each.sums}

    def of(self, start: int, end: int, choice: Choice) -> tuple[list[int], list[int]]:
        """Return the ops of a stage's forward and backward, each in graph order.

        Forward has what its results, sent values and saved values need. Backward has what depends on a gradient, what
        is chosen, and the views and constants that these read.
        """
        number, ops = self.order.number, choice.savings.ops
        chosen = {number[op] for op in ops}
        here = np.flatnonzero((self.at >= start) & (self.at < end)).tolist()
        rest = [op for op in here if op not in chosen]
        forward = {op for op in rest if self.forward[op]}
        more = [number[ops[i]] for i in np.flatnonzero(choice.forward)]
        more += [number[value] for value in self.sent(start, end) if self.at[number[value]] >= start]
        while more:
            op = more.pop()
            if op not in forward and self.at[op] >= start:
                forward.add(op)
                more += self.inputs[op]
        nowhere = self.elsewhere(start, end)
        backward = {number[ops[i]] for i in np.flatnonzero(choice.runs)}
        own = [op for op in rest if not self.forward[op] and op not in nowhere]
        backward.update(op for op in own if not self.late[op])
        for op in reversed(own):
            readers = self._readers.get(op, ())
            if op in self._stays or any(reader in backward or self.at[reader] < start for reader in readers):
                backward.add(op)
        return sorted(forward), sorted(backward)

    def sent(self, start: int, end: int) -> list[Node]:
        """Return the values that a stage sends on, its own and what it received."""
        return [value for made, last, value in self._crossings if made < end <= last]

    def held(self, start: int, forward: Collection[int], backward: Collection[int]) -> list[Node]:
        """Return the values that the backward of a stage takes from its forward."""
        own, late = set(forward), set(backward)
        reads = (r for op in backward for r in self.order.reads[op])
        number = self.order.number
        taken = {r for r in reads if number[r] not in late and (number[r] in own or 0 <= self.at[number[r]] < start)}
        return sorted(taken, key=self.positions.flow.index.__getitem__)
