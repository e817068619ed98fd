"""Which values of a joint graph may be saved or recomputed, as arrays: the problem of every recompute policy.

It is stated over values, as in torch's min-cut partitioner (torch/_functorch/partitioners.py), but a storage counts
once however many views of it are saved, a tuple is one op, and ops that eager autograd runs in backward cost nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from splitkit.costs import Costs, unit_of
from splitkit.graph.storages import value_of
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune
from splitkit.prices import checked
from splitkit.training.flow import (
    BACKWARD,
    FORWARD,
    JointFlow,
    is_pinned,
    is_size,
    output_nodes,
    save_all_plan,
    unrepeatable,
    with_inputs,
)
from splitkit.training.peaks import Peaks, PeakTrace, nodes_with_policy

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Savings:
    """The choices between saving and recomputing in a joint graph, over *ops* (n), *values* (m) and *storages* (k).

    Only what backward may read or recompute is included, in graph order. Backward has a value if its op runs in
    backward, or if its storage is saved; an op runs in backward only if backward has all the values that it reads::

        has[v]      ->  runs[maker[v]]  or  (savable[v] and saved[storage[v]])
        needed[v]   ->  has[v]
        (o, v) in reads:  runs[o]  ->  has[v]
        minimise    sum(nbytes[saved])  and  sum(price[runs])

    What backward always has is left out: parameters, buffers and inputs of the model, which the caller holds, and their
    views; sizes; constants. A view is recomputed for free, so it is not savable: its base is, for the same bytes. A
    tuple is one op with several values. Bytes count whole storages, symbolic sizes as seen at capture.

    Attributes:
        flow: facts about the joint graph.
        ops: (n,) nodes that backward may compute.
        seconds: (n,) float; the time of one run, 0 for views and for ops that a checkpoint prefers to recompute.
        fixed: (n,) bool; ops of forward that may not be recomputed, for the reason in `why`.
        forced: (n,) bool; ops that a checkpoint must recompute, and ops that only backward runs on their results. Their
            values are not savable.
        late: (n,) bool; ops that forward does not need for its own results, so that running them in backward costs
            nothing: eager autograd runs them in backward, or in forward only to save them. Forward runs a late op only
            if its value is saved.
        values: (m,) nodes; what the ops yield: the op itself, or the members of its tuple.
        maker: (m,) int; value -> op.
        storage: (m,) int; value -> storage.
        savable: (m,) bool.
        needed: (m,) bool; values read by nodes that only backward can run.
        nbytes: (k,) int; bytes of each storage.
        reads: (e, 2) int; pairs (op, value that it reads).
        why: fixed op -> the reason.
        time_unit: what ``seconds`` counts, if it is not seconds.
    """

    flow: JointFlow
    ops: tuple[Node, ...]
    seconds: Floats
    fixed: Bools
    forced: Bools
    late: Bools
    values: tuple[Node, ...]
    maker: Ints
    storage: Ints
    savable: Bools
    needed: Bools
    nbytes: Ints
    reads: Ints
    why: Mapping[Node, str]
    time_unit: str = "s"

    @cached_property
    def price(self) -> Floats:
        """(n,) extra seconds if backward computes an op: 0 for late ops, infinite for fixed ones."""
        return np.where(self.fixed, np.inf, np.where(self.late, 0.0, self.seconds))

    @cached_property
    def read_by(self) -> tuple[tuple[int, ...], ...]:
        """Op -> the values that it reads."""
        found: list[list[int]] = [[] for _ in self.ops]
        for op, value in self.reads.tolist():
            found[op].append(value)
        return tuple(map(tuple, found))

    @cached_property
    def used_by(self) -> tuple[tuple[int, ...], ...]:
        """Op -> the ops that read its values."""
        found: list[dict[int, None]] = [{} for _ in self.ops]
        for op, value in self.reads.tolist():
            found[self.maker[value]][op] = None
        return tuple(map(tuple, found))

    def choose(self, runs: Bools) -> Choice:
        """Return the choice in which backward computes the wanted ops that it needs, and forward saves the rest.

        Ops that are neither fixed nor savable are computed in any case.

        Args:
            runs: (n,) bool; the wanted ops.
        """
        # Search from what backward needs, so that no op runs whose result nobody reads. Two sets of wanted ops that
        # differ only in ops that backward does not reach become the same choice, which is then simulated once.
        used, saved = np.zeros(len(self.ops), np.bool_), np.zeros(len(self.values), np.bool_)
        stack, seen = np.flatnonzero(self.needed).tolist(), self.needed.copy()
        while stack:
            value = stack.pop()
            op = self.maker[value]
            if self.fixed[op] or (self.savable[value] and not runs[op]):
                saved[value] = True
            elif not used[op]:
                used[op] = True
                stack += [v for v in self.read_by[op] if not seen[v]]
                seen[list(self.read_by[op])] = True
        return Choice(self, used, saved)


@dataclass(frozen=True, eq=False)
class Choice:
    """A choice of what is saved and what is recomputed.

    Attributes:
        savings: the problem.
        runs: (n,) bool; ops that backward computes.
        saved: (m,) bool; values that backward takes from forward.
    """

    savings: Savings
    runs: Bools
    saved: Bools

    @property
    def nbytes(self) -> int:
        """The bytes of the saved storages, equal to ``MemoryProfile.saved`` of the pair."""
        problem = self.savings
        return int(problem.nbytes[np.unique(problem.storage[self.saved])].sum())

    @cached_property
    def forward(self) -> Bools:
        """(n,) bool; ops that forward computes: its own, and the late ones that saved values need."""
        problem = self.savings
        # Go from the last op to the first, so that readers come before what they read. Of the late ops, forward runs
        # those whose values are saved and those that these need. Only late readers count: an op that a reader in
        # forward needs is not late.
        found = ~problem.late
        found[problem.maker[self.saved]] = True
        for op in np.flatnonzero(problem.late)[::-1].tolist():
            found[op] = found[op] or any(found[user] for user in problem.used_by[op] if problem.late[user])
        return found

    @property
    def seconds(self) -> float:
        """The time of the ops that both forward and backward compute."""
        return float(self.savings.seconds[self.runs & self.forward].sum())

    def plan(self, note: str = "") -> Plan:
        """Return the plan of the joint graph for this choice."""
        flow, places = self.savings.flow, dict[Node, tuple[PartKey, ...]]()
        for op, forward, backward in zip(self.savings.ops, self.forward, self.runs, strict=True):
            places[op] = (FORWARD,) * bool(forward) + (BACKWARD,) * bool(backward)
        changed = replace(save_all_plan(flow).place({n: keys for n, keys in places.items() if keys}), note=note)
        # Forward may now need views and constants that only backward had.
        return prune(flow, with_inputs(flow, changed, (n for n in flow.nodes if FORWARD in changed[n])))


def savings(flow: JointFlow, costs: Costs) -> Savings:
    """Return the arrays of a joint graph, in time linear in its nodes and edges.

    Args:
        flow: facts about the graph.
        costs: prices of recomputing a node. Their bytes are not used: storages are counted.
    """
    # Search from what backward reads, and stop at ops that may not run twice and at what the caller holds: nothing
    # before them can matter. So the problem is often much smaller than the graph.
    free, needed = _free_values(flow), _pinned_reads(flow)
    known = unrepeatable(flow)
    why = {n: known[n] for n in flow.nodes if n in known}
    found, stack = dict[Node, None](), [v for v in needed if v not in free]
    while stack:
        value = stack.pop()
        if value not in found:
            found[value] = None
            maker = flow.producer(value)
            stack += [v for v in _reads(flow, maker) if v not in free] if maker not in why else []
    return _arrays(flow, costs, sorted(found, key=flow.index.__getitem__), needed, why)


def _arrays(
    flow: JointFlow, costs: Costs, values: Sequence[Node], needed: Collection[Node], why: dict[Node, str]
) -> Savings:
    costs = checked(costs)
    ops = tuple(dict.fromkeys(flow.producer(v) for v in values))
    number, place = ({n: i for i, n in enumerate(nodes)} for nodes in (ops, values))
    owner = _storages(flow, values)
    storages = {key: i for i, key in enumerate(dict.fromkeys(owner.values()))}
    base = {key: v for v, key in reversed(owner.items())}
    # A storage is saved once for all of its values. Its first value in graph order is the base, the others are views.
    # If views were savable too, saving one would count as having the base, which cannot be computed from a view.
    views = {n for n in ops if n not in why} - {flow.producer(v) for v, key in owner.items() if base[key] is v}
    kept = _kept(flow, values, owner, base)
    why |= {n: "its checkpoint saves it" for n in ops if n in kept and n not in why}
    required = required_by_forward(flow)
    forced = set(nodes_with_policy(flow, CheckpointPolicy.MUST_RECOMPUTE)) - why.keys()
    for op in ops:  # saving what backward computes from it would save it in disguise
        if op not in required and op not in why and not forced.isdisjoint(flow.inputs(op)):
            forced.add(op)
    free = views | set(nodes_with_policy(flow, CheckpointPolicy.PREFER_RECOMPUTE))
    pairs = [(number[n], place[v]) for n in ops if n not in why for v in _reads(flow, n) if v in place]
    makers = [flow.producer(v) for v in values]
    return Savings(
        flow,
        ops,
        np.array([0.0 if n in free else costs.seconds(n) for n in ops]),
        _mask(n in why for n in ops),
        _mask(n in forced for n in ops),
        _mask(n not in required for n in ops),
        tuple(values),
        np.array([number[n] for n in makers], np.int64),
        np.array([storages[owner[v]] for v in values], np.int64),
        _mask(
            maker not in views and maker not in forced and not isinstance(value_of(v), tuple | list)
            for v, maker in zip(values, makers, strict=True)
        ),
        _mask(v in needed for v in values),
        np.array([sum(flow.storages.nbytes[s] for s in flow.storages.under(base[key])) for key in storages], np.int64),
        np.array(pairs, np.int64).reshape(-1, 2),
        {n: why[n] for n in ops if n in why},
        unit_of(costs),
    )


def _mask(flags: Iterable[bool]) -> Bools:
    return np.array(list(flags), np.bool_)


def _pinned_reads(flow: JointFlow) -> dict[Node, None]:
    """Return the values that backward returns, or that nodes read which only backward can run."""
    # By induction along the graph: a node that depends on a gradient cannot run in forward. Other nodes that eager
    # autograd runs in backward could run in forward as well, so they are part of the choice (`Savings.late`).
    home, pinned = save_all_plan(flow), set(flow.backward_inputs)
    found = {n: None for n in output_nodes(flow.gradients) if n not in pinned}
    for node in flow.scope:
        if node.op in ("placeholder", "output"):
            continue
        producer = flow.producer(node)
        stays = home.home(producer) == BACKWARD and (producer in flow.once or is_pinned(node))
        if stays or any(read in pinned for read in node.all_input_nodes):
            pinned.add(node)
            found |= dict.fromkeys(node.all_input_nodes)
    return {n: None for n in found if n not in pinned}


def required_by_forward(flow: JointFlow) -> set[Node]:
    """Return what forward runs in any case: what its outputs need, and what may run only once."""
    once = (n for n in flow.once if save_all_plan(flow).home(flow.producer(n)) == FORWARD)
    stack = [flow.producer(n) for n in (*output_nodes(flow.outputs), *once)]
    found = set(stack)
    while stack:
        new = [n for n in flow.inputs(stack.pop()) if n not in found]
        found.update(new)
        stack += new
    return found


def _free_values(flow: JointFlow) -> set[Node]:
    """Return the values that backward always has: what the caller holds, views of it, constants and sizes."""
    own = ("placeholder", "get_attr")
    return {n for n in flow.scope if n.op in own or is_size(n) or not flow.storages.under(n)}


def _reads(flow: JointFlow, op: Node) -> Iterator[Node]:
    """Yield the values that an op reads, with members of tuples one by one."""
    return (read for read in op.all_input_nodes if flow.producer(read) is not op)


def _storages(flow: JointFlow, values: Iterable[Node]) -> dict[Node, int | Node]:
    """Return value -> its storage; a tuple that nobody unpacks stands for its storages itself."""
    return {v: flow.storages.under(v)[0] if isinstance(value_of(v), torch.Tensor) else v for v in values}


def _kept(
    flow: JointFlow, values: Iterable[Node], owner: Mapping[Node, int | Node], base: Mapping[int | Node, Node]
) -> set[Node]:
    """Return the ops whose results checkpoints save; for a view, the op of its base."""
    wanted = set(nodes_with_policy(flow, CheckpointPolicy.MUST_SAVE))
    return {flow.producer(base[owner[v]]) for v in values if flow.producer(v) in wanted}


# Simulate a choice without making a plan of it: the result of `Peaks.trace`, several times as fast.


class Replay:
    """Simulates choices of one joint graph, over the ops of its `EmissionOrder`.

    Attributes:
        savings: the problem whose choices are simulated.
        peaks: simulates the steps of both halves.
    """

    def __init__(self, savings: Savings, peaks: Peaks) -> None:
        self.savings, self.peaks, self._order = savings, peaks, peaks.order
        flow, number, home = savings.flow, peaks.order.number, save_all_plan(savings.flow)
        self._tagged = bool(nodes_with_policy(flow, *CheckpointPolicy))
        self._numbers = [number[op] for op in savings.ops]
        self._late = [home.places.get(nodes[0]) == (BACKWARD,) for nodes in self._order.ops]
        computed = set(peaks.computed)
        self._steps = [[flow.index[n] for n in nodes if n in computed] for nodes in self._order.ops]
        self._all = [True] * len(self._late)
        once = [number[flow.producer(n)] for n in flow.once if flow.producer(n) in number]
        given = [number[n] for n in output_nodes(flow.gradients) if n in number]
        self._roots = {
            FORWARD: [number[n] for n in output_nodes(flow.outputs) if n in number],
            BACKWARD: list[int](),
        }
        for op in (*once, *given):
            self._roots[BACKWARD if self._late[op] else FORWARD].append(op)

    def trace(self, choice: Choice) -> PeakTrace:
        """Return the simulated run of a choice."""
        if self._tagged:  # checkpoints also tag views, which only the plan knows
            return self.peaks.trace(choice.plan())
        inside = list(self._late)
        for op, runs in zip(self._numbers, choice.runs.tolist(), strict=True):
            inside[op] = runs
        backward, crossing = self._reach(self._roots[BACKWARD], inside)
        forward, _ = self._reach([*self._roots[FORWARD], *crossing], self._all)
        order = self._order
        late = self._in_steps(order.backward_ops(backward))
        return self.peaks.run(self._in_steps(order.forward_ops(forward, self._taken(backward))), late)

    def _taken(self, backward: Iterable[int]) -> Iterator[Node]:
        """Yield what backward takes from forward if it computes these ops."""
        order, there = self._order, set(backward)
        read = chain(output_nodes(self.savings.flow.gradients), *(order.reads[op] for op in there))
        return (node for node in read if node in order.number and order.number[node] not in there)

    def _in_steps(self, ops: Iterable[int]) -> list[int]:
        return [step for op in ops for step in self._steps[op]]

    def _reach(self, roots: Iterable[int], inside: list[bool]) -> tuple[list[int], list[int]]:
        """Return the ops inside that ``roots`` need, in ascending order, and the ops outside that they read."""
        sources, steps = self._order.sources, self._steps
        seen = [False] * len(inside)
        stack = list(roots)
        found, border = list[int](), list[int]()
        while stack:
            op = stack.pop()
            if seen[op]:
                continue
            seen[op] = True
            if not inside[op]:
                border.append(op)
                continue
            if steps[op]:
                found.append(op)
            stack += sources[op]
        return sorted(found), border
