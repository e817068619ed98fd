"""The peak of a plan for a joint graph, to the byte, before any module is made of it.

`splitkit.memory.simulation` simulates the two graphs of a pair. Here the same is done for a plan, fast enough for a
search that asks for hundreds: which values share a storage does not depend on the plan, and is found once for the
joint graph. Each simulation is then one pass over whole numbers, which looks at no node and hashes no value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from splitkit.graph.node_values import storage_nbytes
from splitkit.graph.storages import attribute, plain_size, repeated_group, storage_key, tensors, value_of
from splitkit.memory.simulation import MemorySimulation
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune
from splitkit.training.emission_order import EmissionOrder
from splitkit.training.flow import BACKWARD, FORWARD, STATIC, JointFlow, save_all_plan, unrepeatable, with_inputs
from splitkit.units import bounded

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PeakTrace:
    """A simulated run of forward and backward. Nodes are known by their position in the joint graph.

    Attributes:
        baseline: bytes that the caller holds throughout: parameters, inputs, gradients of outputs.
        timeline: bytes alive while each step runs, the baseline included.
        steps: the node of each step.
        forward: the number of steps in forward.
        slot: for each storage that the run allocates, the slot of its maker (`JointStorages`).
        nbytes: the bytes of each storage.
        born: the step that makes it.
        left: the last step of its own half that reads it.
        dies: the step after which it is freed; the number of steps if the caller holds it to the end.
        saved: whether forward saves it for backward.
    """

    baseline: int
    timeline: Ints
    steps: Ints
    forward: int
    slot: Ints
    nbytes: Ints
    born: Ints
    left: Ints
    dies: Ints
    saved: npt.NDArray[np.bool_]

    @property
    def peak(self) -> int:
        """The most bytes alive at once."""
        return int(self.timeline.max(initial=self.baseline))

    @property
    def saved_bytes(self) -> int:
        """The bytes that forward saves for backward, without inputs and parameters."""
        return int(self.nbytes[self.saved].sum())


class Peaks:
    """Simulates plans for one joint graph, which must not change meanwhile.

    Attributes:
        flow: facts about the graph.
        nodes: its nodes; elsewhere nodes are known by their position here.
        storages: the storages of the nodes, by slot.
        nbytes: slot -> bytes of the storage, for the node that makes it.
        touched: node -> the slots of its inputs, without those that are `STATIC`.
        transient: node -> bytes that exist only while it runs.
        computed: the nodes that halves compute: all but inputs, attributes and the output.
        order: the order in which halves compute them.

    Raises:
        GraphError: SK108 for a data-dependent size.
    """

    def __init__(self, flow: JointFlow) -> None:
        self.flow = flow
        self.nodes: tuple[Node, ...] = tuple(flow.graph.nodes)
        self._alone = MemorySimulation({}, lambda node: 0)
        self.transient = self._transients()  # first, because its error names the data-dependent size
        self.storages = flow.storages
        self.nbytes = [plain_size(nbytes, {}) for nbytes in self.storages.sizes]
        self._owned = self._storages_of_caller()
        reads = ([flow.index[r] for r in node.all_input_nodes] for node in self.nodes)
        self.touched = [tuple({s: None for i in read for s in self.storages.made[i]}) for read in reads]
        self.computed = [n for n in self.nodes if n in flow.scope and n.op not in ("placeholder", "get_attr", "output")]
        self.order = EmissionOrder(flow)
        self._last: tuple[tuple[int, ...], _Allocations] | None = None
        self._outputs, self._gradients = (self._slots_of(values) for values in (flow.outputs, flow.gradients))

    def _storages_of_caller(self) -> dict[Node, dict[object, int]]:
        """Return input or attribute -> its storages and their bytes."""
        found: dict[Node, dict[object, int]] = {}
        given: dict[int, dict[object, int]] = {}
        for node in self.nodes:
            if node.op == "placeholder":
                found[node] = {storage_key(t): _bytes(t) for t in tensors(value_of(node))}
                if (group := repeated_group(node)) is not None:
                    found[node] = given.setdefault(group, found[node])
            elif node.op == "get_attr":
                value = attribute(self.flow.root, str(node.target))
                owned = [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else tensors(value)
                found[node] = {storage_key(t): _bytes(t) for t in owned}
        return found

    def _slots_of(self, values: Collection[object]) -> list[int]:
        return [s for value in values if isinstance(value, Node) for s in self.storages.made[self.flow.index[value]]]

    def _transients(self) -> Ints:
        """Return the bytes that each node takes only while it runs."""
        run = self._alone
        run.graph(self.flow.root, lambda node: run.input(node, "input"))
        taken = dict(zip(run.steps, run.transient, strict=True))
        return np.array([taken.get(node, 0) for node in self.nodes], dtype=np.int64)

    def told(self, trace: PeakTrace) -> str:
        """Return the peak of a run as text, which says as `MemoryProfile` does on which side it errs."""
        first = trace.steps[trace.timeline == trace.peak][:1]
        inside = [i for i in first.tolist() if self.nodes[i] in self._alone.body_peaks]
        return bounded(trace.peak, [*self._alone.bounds, *inside], self._alone.unseen)

    def trace(self, plan: Plan) -> PeakTrace:
        """Return the run of a plan, completed as in `divide`: eager places for missing nodes, checkpoint tags applied.

        The plan must be sound: a half computes what it reads, or forward computes it and backward takes it.
        """
        plan = apply_checkpoints(self.flow, replace(plan, places={**save_all_plan(self.flow).places, **plan.places}))
        forward, backward = self._members(plan, FORWARD), self._members(plan, BACKWARD)
        made = set(backward)
        read = (r for node in backward for r in node.all_input_nodes)
        taken = dict.fromkeys(r for r in (*read, *self.flow.gradients) if isinstance(r, Node) and r not in made)
        order, index = self.order, self.flow.index
        early, late = order.forward(forward, taken), order.backward(backward)
        return self.run([index[n] for n in early], [index[n] for n in late])

    def alone(self, nodes: Sequence[int]) -> tuple[Ints, Ints, Ints]:
        """Return (slot, born, dies) of `PeakTrace` for nodes of backward, if everything else that they read is alive.

        Args:
            nodes: positions of the nodes, in the order in which they run.
        """
        # All slots lie in the first allocation until a node makes them. It stands for everything else, and is not part
        # of the result.
        run = _Allocations([0] * len(self.storages.source), [STATIC], [0], [0])
        run.pass_over(self, nodes)
        slot, born, dies = (np.array(values, dtype=np.int64) for values in (run.slot, run.born, run.dies))
        dies[[run.holder[s] for s in self._gradients]] = len(nodes)
        return slot[1:], born[1:], dies[1:]

    def _members(self, plan: Plan, half: str) -> list[Node]:
        """Return the nodes that a half computes, in graph order, with the members of tuples."""
        producer, places = self.flow.producer, plan.places
        return [node for node in self.computed if half in places.get(producer(node), ())]

    def run(self, forward: Sequence[int], backward: Sequence[int]) -> PeakTrace:
        """Return the run of halves that compute these nodes, given by position, in this order."""
        steps, early = np.array([*forward, *backward], dtype=np.int64), len(forward)
        run = self._forward(tuple(forward)).copy()
        # Find the allocations of outputs before backward runs: backward may recompute them, but the caller holds
        # forward's.
        outputs, before = [run.holder[slot] for slot in self._outputs], list(run.dies)
        run.pass_over(self, backward)
        gradients = [run.holder[slot] for slot in self._gradients]
        slot, born, dies = (np.array(values, dtype=np.int64) for values in (run.slot, run.born, run.dies))
        left = np.array([*before, *run.dies[len(before) :]], dtype=np.int64)
        saved = (born < early) & (dies >= early)
        saved[gradients] |= born[gradients] < early  # a saved value that backward returns unread
        for ends, held in ((left, outputs), (dies, outputs), (dies, gradients)):
            ends[held] = len(steps)
        nbytes = np.array(self.nbytes, dtype=np.int64)[slot]
        # Each allocation adds its bytes at one step and takes them off after another; the prefix sums are the bytes
        # alive.
        change = np.zeros(len(steps) + 2, dtype=np.int64)
        np.add.at(change, born, nbytes)
        np.subtract.at(change, dies + 1, nbytes)
        baseline = self.baseline(steps.tolist())
        timeline = baseline + np.cumsum(change)[: len(steps)] + self.transient[steps]
        return PeakTrace(baseline, timeline, steps, early, slot, nbytes, born, left, dies, saved)

    def first_reads(self, trace: PeakTrace) -> Ints:
        """Return for each allocation of forward the first step of backward that reads it.

        It is the number of steps for an allocation that backward does not read.
        """
        steps = trace.steps.tolist()
        run = self._forward(tuple(steps[: trace.forward]))
        holder, first = list(run.holder), [len(steps)] * len(run.dies)
        made, source = self.storages.made, self.storages.source
        for step, i in enumerate(steps[trace.forward :], trace.forward):
            for slot in self.touched[i]:
                if 0 <= (at := holder[slot]) < len(first) and first[at] == len(steps):
                    first[at] = step
            for slot in made[i]:
                holder[slot] = -1 if source[slot] == slot else holder[source[slot]]
        return np.array(first, dtype=np.int64)

    def _forward(self, nodes: tuple[int, ...]) -> _Allocations:
        """Return what forward allocates; the last result is cached, since most plans differ only in backward."""
        if self._last is None or self._last[0] != nodes:
            run = _Allocations([0] * len(self.storages.source))
            run.pass_over(self, nodes)
            self._last = nodes, run
        return self._last[1]

    def baseline(self, steps: Collection[int]) -> int:
        """Return the bytes of inputs, and of the attributes that a step reads; steps are positions of nodes."""
        index, held, computed = self.flow.index, dict[object, int](), set(steps)
        for node, owned in self._owned.items():
            if node.op == "placeholder" or any(index[user] in computed for user in node.users):
                held |= owned
        return sum(held.values())


@dataclass
class _Allocations:
    """The allocations of a run so far.

    Attributes:
        holder: slot -> the allocation that it lies in now: a copy in backward replaces forward's, because all of its
            readers come after it.
        slot: allocation -> the slot of its maker.
        born: allocation -> the step that makes it.
        dies: allocation -> the last step that reads or makes it, or a view of it.
        steps: the number of steps that have run.
    """

    holder: list[int]
    slot: list[int] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    dies: list[int] = field(default_factory=list)
    steps: int = 0

    def copy(self) -> _Allocations:
        """Return a copy to continue from."""
        return _Allocations(list(self.holder), list(self.slot), list(self.born), list(self.dies), self.steps)

    def pass_over(self, peaks: Peaks, nodes: Sequence[int]) -> None:
        """Append the steps of these nodes."""
        holder, dies, touched = self.holder, self.dies, peaks.touched
        made, source = peaks.storages.made, peaks.storages.source
        for step, i in enumerate(nodes, self.steps):
            for slot in touched[i]:
                dies[holder[slot]] = step
            for slot in made[i]:
                if source[slot] == slot:
                    holder[slot] = len(dies)
                    self.slot.append(slot)
                    self.born.append(step)
                    dies.append(step)
                else:
                    holder[slot] = holder[source[slot]]
                    dies[holder[slot]] = step
        self.steps += len(nodes)


def _bytes(tensor: torch.Tensor) -> int:
    return plain_size(storage_nbytes(tensor), {})


# Apply the tags that ``torch.utils.checkpoint`` leaves on the nodes of a joint graph to any policy's plan.


_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def checkpoint_policies(flow: JointFlow) -> Mapping[Node, CheckpointPolicy]:
    """Return forward's node -> the policy of its checkpoint, from `meta["recompute"]`.

    A value at the border of two checkpoints, or with a hook on its gradient, is saved (``MUST_SAVE``), for it is an
    input of the second checkpoint. A tuple is one value: it is saved if one of its members must be.
    """
    found: dict[Node, CheckpointPolicy] = {}
    home = save_all_plan(flow)
    for node in flow.scope:
        producer = flow.producer(node)
        if home.get(producer) != (FORWARD,) or (policy := _policy_of(node)) is None:
            continue
        if policy is CheckpointPolicy.MUST_SAVE or found.get(producer) is None:
            found[producer] = policy
    return found


def _policy_of(node: Node) -> CheckpointPolicy | None:
    policy: CheckpointPolicy | None = node.meta.get("recompute")
    if policy in _RECOMPUTE and (_ends_region(node) or _has_hook(node)):
        return CheckpointPolicy.MUST_SAVE
    return policy


def _ends_region(node: Node) -> bool:
    number = node.meta.get("ac_graph_id")
    others = (u.meta.get("ac_graph_id") for u in node.users if u.meta.get("recompute") in _RECOMPUTE)
    return number is not None and any(other is not None and other > number for other in others)


def _has_hook(node: Node) -> bool:
    """Return whether a checkpoint's result has a gradient hook, which may need the value before it is recomputed."""
    inside = any(u.meta.get("recompute") in _RECOMPUTE for u in node.users)
    return bool(node.meta.get("has_backward_hook")) and not inside


def nodes_with_policy(flow: JointFlow, *wanted: CheckpointPolicy) -> list[Node]:
    """Return the nodes of forward whose checkpoint has one of these policies."""
    return [node for node, policy in checkpoint_policies(flow).items() if policy in wanted]


def apply_checkpoints(flow: JointFlow, plan: Plan) -> Plan:
    """Return the plan with ``MUST_SAVE`` nodes saved, and ``MUST_RECOMPUTE`` nodes recomputed if backward needs them.

    Nodes that may not run twice are saved in any case: a random op that runs again would draw other numbers.
    """
    plan = recompute_in_backward(flow, plan, nodes_with_policy(flow, CheckpointPolicy.MUST_RECOMPUTE))
    keep = {n: (FORWARD,) for n in nodes_with_policy(flow, CheckpointPolicy.MUST_SAVE) if BACKWARD in plan.get(n, ())}
    return prune(flow, with_inputs(flow, plan.place(keep), keep)) if keep else plan


def recompute_in_backward(flow: JointFlow, plan: Plan, nodes: Iterable[Node]) -> Plan:
    """Return the plan in which backward recomputes these nodes where it needs them and they may run twice."""
    fixed = unrepeatable(flow)
    copies = {n: (FORWARD, BACKWARD) for n in nodes if n not in fixed and plan.get(n, (FORWARD,)) == (FORWARD,)}
    return prune(flow, plan.place(copies)) if copies else plan


def eager_plan(flow: JointFlow) -> Plan:
    """Return the plan of eager mode: save forward's values, and recompute those inside checkpoints."""
    return recompute_in_backward(flow, save_all_plan(flow), nodes_with_policy(flow, CheckpointPolicy.PREFER_RECOMPUTE))
