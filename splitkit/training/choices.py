"""What a joint graph may save and may compute again, as arrays: the problem that every recompute policy solves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy

from splitkit.costs import Costs, unit_of
from splitkit.graph.symbols import value_of
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import prune
from splitkit.prices import checked
from splitkit.training.checkpoints import asked
from splitkit.training.flow import (
    BACKWARD,
    FORWARD,
    JointFlow,
    homes,
    is_pinned,
    is_size,
    nodes_in,
    unrepeatable,
    with_inputs,
)

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Savings:
    """The choices that a joint graph leaves, over *ops* (n), *values* (m) and *storages* (k).

    Only what backward may read or compute again is in it, in graph order. Backward has a value if its op runs in
    backward, or if its storage is saved; an op runs in backward only if backward has all the values that it reads::

        has[v]      ->  runs[maker[v]]  or  (savable[v] and saved[storage[v]])
        needed[v]   ->  has[v]
        (o, v) in reads:  runs[o]  ->  has[v]
        minimise    sum(nbytes[saved])  and  sum(price[runs])

    What is always there is left out: parameters, buffers and inputs of the model, which the caller holds, and their
    views; sizes; constants. A view is computed again for nothing, so it is not savable: its base is, for the same
    bytes. A tuple is one op with several values. Bytes are those of whole storages, symbolic sizes as seen at capture.

    Attributes:
        flow: facts about the joint graph.
        ops: shape (n,); what backward may compute.
        seconds: (n,) float; of one run, 0 for views and for what a checkpoint prefers to compute again.
        fixed: (n,) bool; forward's, and not to be computed again: `why` says why.
        forced: (n,) bool; its checkpoint must recompute it, or what backward alone makes it of: its values are not
            savable.
        late: (n,) bool; forward needs it for nothing of its own, so that it costs nothing to run it in backward:
            eager autograd has it there, or in forward only to save it. Forward runs it where it is saved.
        values: shape (m,); what the ops yield: themselves, or the members of their tuples.
        maker: (m,) int; value -> op.
        storage: (m,) int; value -> storage.
        savable: (m,) bool.
        needed: (m,) bool; read by what only backward can run.
        nbytes: (k,) int; of storages.
        reads: (e, 2) int; pairs (op, value that it reads).
        why: op that is fixed -> the reason.
        unit: of ``seconds``, where the prices are no time.
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
    unit: str = "s"

    @cached_property
    def price(self) -> Floats:
        """(n,): seconds that it costs when backward computes an op; 0 if it would anyway, infinite if it may not."""
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
        """The choice in which backward computes those of these ops that it needs, and forward saves the rest.

        What is neither fixed nor savable is computed all the same.

        Args:
            runs: (n,) bool.
        """
        # From what backward needs down, so that nothing runs for nobody: a choice is a set of wishes, and two sets that
        # differ in ops which backward never gets to are one plan, simulated once.
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
    """What is saved and what is computed again.

    Attributes:
        savings: the arrays that it is a choice of.
        runs: (n,) bool; ops that backward computes.
        saved: (m,) bool; values that it takes from forward.
    """

    savings: Savings
    runs: Bools
    saved: Bools

    @property
    def nbytes(self) -> int:
        """Bytes of the storages that are saved: ``MemoryProfile.saved`` of the pair."""
        problem = self.savings
        return int(problem.nbytes[np.unique(problem.storage[self.saved])].sum())

    @cached_property
    def forward(self) -> Bools:
        """(n,) bool; ops that forward computes: its own, and late ones for what is saved."""
        problem = self.savings
        # From the last op to the first, for a reader comes after what it reads: of late ops forward runs those whose
        # values it saves, and those that they need. Their readers that are not late do not count: what these need is
        # not late.
        found = ~problem.late
        found[problem.maker[self.saved]] = True
        for op in np.flatnonzero(problem.late)[::-1].tolist():
            found[op] = found[op] or any(found[user] for user in problem.used_by[op] if problem.late[user])
        return found

    @property
    def seconds(self) -> float:
        """Spent on what forward computes and backward computes again."""
        return float(self.savings.seconds[self.runs & self.forward].sum())

    def plan(self, note: str = "") -> Plan:
        """The plan of the joint graph that does so."""
        flow, places = self.savings.flow, dict[Node, tuple[PartKey, ...]]()
        for op, forward, backward in zip(self.savings.ops, self.forward, self.runs, strict=True):
            places[op] = (FORWARD,) * bool(forward) + (BACKWARD,) * bool(backward)
        changed = replace(homes(flow).place({n: keys for n, keys in places.items() if keys}), note=note)
        # views and constants of backward that forward needs as well, for what moved there
        return prune(flow, with_inputs(flow, changed, (n for n in flow.nodes if FORWARD in changed[n])))


def savings(flow: JointFlow, costs: Costs) -> Savings:
    """Read the arrays off a joint graph, in time linear in its nodes and edges.

    Args:
        flow: facts about the graph.
        costs: prices of running a node again. What they say of bytes is not asked: storages count.
    """
    # Down from what backward reads, as far as it may compute: it never looks behind an op that it may not run again,
    # nor at what the caller holds. So the problem is often much smaller than the graph.
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
    # A storage is saved once for all of its values. Its first value in graph order is not made of another of them: it
    # is the base. Were views savable too, to save one would seem to give the base as well, which cannot be made of it.
    views = {n for n in ops if n not in why} - {flow.producer(v) for v, key in owner.items() if base[key] is v}
    kept = _kept(flow, values, owner, base)
    why |= {n: "its checkpoint saves it" for n in ops if n in kept and n not in why}
    required = required_by_forward(flow)
    forced = set(asked(flow, CheckpointPolicy.MUST_RECOMPUTE)) - why.keys()
    for op in ops:  # what backward alone makes of it would be the same, saved in disguise
        if op not in required and op not in why and not forced.isdisjoint(flow.inputs(op)):
            forced.add(op)
    free = views | set(asked(flow, CheckpointPolicy.PREFER_RECOMPUTE))
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
    """The values that those nodes of backward read that nothing but backward can run, and that it returns."""
    # By induction along the graph: a node that reads a gradient, or what waits for one, cannot run in forward. What
    # eager autograd merely has in backward can: it is a choice like any other (`Savings.late`).
    home, pinned = homes(flow), set(flow.backward_inputs)
    found = {n: None for n in nodes_in(flow.gradients) if n not in pinned}
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
    """What forward runs in any case: for its outputs, and what may run only once."""
    once = (n for n in flow.once if homes(flow).home(flow.producer(n)) == FORWARD)
    stack = [flow.producer(n) for n in (*nodes_in(flow.outputs), *once)]
    found = set(stack)
    while stack:
        new = [n for n in flow.inputs(stack.pop()) if n not in found]
        found.update(new)
        stack += new
    return found


def _free_values(flow: JointFlow) -> set[Node]:
    """What backward has for nothing: what the caller holds, and views of it; constants; sizes."""
    own = ("placeholder", "get_attr")
    return {n for n in flow.scope if n.op in own or is_size(n) or not flow.storages.under(n)}


def _reads(flow: JointFlow, op: Node) -> Iterator[Node]:
    """The values that an op reads: members of tuples singly."""
    return (read for read in op.all_input_nodes if flow.producer(read) is not op)


def _storages(flow: JointFlow, values: Iterable[Node]) -> dict[Node, int | Node]:
    """Value -> its storage; a tuple that nobody unpacks stands for all of its own."""
    return {v: flow.storages.under(v)[0] if isinstance(value_of(v), torch.Tensor) else v for v in values}


def _kept(
    flow: JointFlow, values: Iterable[Node], owner: Mapping[Node, int | Node], base: Mapping[int | Node, Node]
) -> set[Node]:
    """The ops whose results checkpoints save: of a view, what it is a view of."""
    wanted = set(asked(flow, CheckpointPolicy.MUST_SAVE))
    return {flow.producer(base[owner[v]]) for v in values if flow.producer(v) in wanted}
