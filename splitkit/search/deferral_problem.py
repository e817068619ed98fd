"""Which ops of a backward may wait for the weight part, and which bytes wait with them, as arrays.

A pipeline that divides backward runs its *input part* first, which computes the gradients that leave the stage, and
its *weight part* later, in what would be a bubble (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). Whatever the
weight part reads is held in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from torch.fx import Node

from splitkit.costs import Costs, unit_of
from splitkit.costs.flop_formulas import counter_of
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import reads
from splitkit.graph.node_values import nodes_without_values, storage_nbytes, value_bytes
from splitkit.graph.storages import plain_size, storage_key, tensors, value_of
from splitkit.plans.parts import Part, PartKey
from splitkit.plans.record import Plan
from splitkit.prices import checked
from splitkit.solvers.min_cut import Network, min_cut, whole_capacities
from splitkit.training.choices import Bools, Floats, Ints
from splitkit.training.flow import BACKWARD, FORWARD, JointFlow, op_of
from splitkit.training.peaks import apply_checkpoints
from splitkit.training.stage_parts import known_part, stage_part
from splitkit.training.stage_plan import gradient_terms

# The flow network whose minimum cuts are the best choices of what the weight part of a backward does.


OUTSIDE = -1
"""The maker of a storage that backward takes from forward, or from the next stage."""


@dataclass(frozen=True, eq=False)
class Deferrals:
    """The choices of what a backward defers, over its *ops* (n) and the *storages* (k) that they read.

    An op runs in the input part, in the weight part, or in both. The input part takes what forward saved and what it
    computes itself; it computes the gradients that leave the stage, and all effects. The weight part computes what it
    reads itself, or the storage waits::

        reads (o, k):    o in weight part  ->  maker[k] in weight part  or  k waits
        k waits          ->  maker[k] is OUTSIDE, or in the input part
        along (o, v):    o in weight part  ->  v in weight part                         (v is a view)
        before (o, p):   o in input part   ->  p in input part
        minimise         sum(nbytes[waiting])  and  the seconds of what need not be in the input part, and is

    Each storage counts once, however many views of it are read: the weight part makes its views itself. Parameters,
    buffers and inputs of the model are held by the caller in any case and count nothing, as do their views and sizes. A
    gradient of a parameter is added to the parameter's at once, so it never waits, unless the weight part reads it.
    Gradients that come in wait like any other value.

    Attributes:
        flow: facts about the joint graph.
        ops: (n,) the nodes that backward computes and somebody needs, in graph order.
        seconds: (n,) float; the time of one run, 0 for views.
        pinned: (n,) bool; ops of the input part in any case, and ops that these need.
        single: (n,) bool; ops that may not run in both parts.
        products: (n,) bool; weight gradients by products: ops that are not pinned, depend on a gradient, and have a
            FLOP formula of torch (or are backward of an embedding), and of which no other such op is computed.
        returned: (n,) bool; ops whose values backward returns.
        nbytes: (k,) int.
        maker: (k,) int; storage -> op, or `OUTSIDE`.
        reads: (e, 2) int; pairs (op, storage).
        along: (e, 2) int; pairs (op, view that it reads).
        passed: (e, 2) int; pairs (op, op whose value it reads and which has no bytes).
        before: (e, 2) int; pairs (op, op that runs first).
        time_unit: what ``seconds`` counts, if it is not seconds.
    """

    flow: JointFlow
    ops: tuple[Node, ...]
    seconds: Floats
    pinned: Bools
    single: Bools
    products: Bools
    returned: Bools
    nbytes: Ints
    maker: Ints
    reads: Ints
    along: Ints
    passed: Ints
    before: Ints
    time_unit: str = "s"

    @cached_property
    def makers_of(self) -> tuple[tuple[int, ...], ...]:
        """Op -> the ops that make what it reads, but for views."""
        made = np.stack([self.reads[:, 0], self.maker[self.reads[:, 1]]], 1)
        return _grouped(np.concatenate([made[made[:, 1] != OUTSIDE], self.passed]), len(self.ops))

    @cached_property
    def views_of(self) -> tuple[tuple[int, ...], ...]:
        """Op -> the views that run with it in the weight part."""
        return _grouped(self.along, len(self.ops))

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """Op -> the ops that run before it in the input part."""
        return _grouped(self.before, len(self.ops))

    def choose(self, early: Bools, late: Bools) -> Deferral:
        """Return the choice in which each part computes only those of its allowed ops that are needed.

        Args:
            early: (n,) bool; ops that the input part may compute, with all that they need.
            late: (n,) bool; ops that the weight part computes if it needs their values.
        """
        runs = np.zeros(len(self.ops), np.bool_)
        needed = np.flatnonzero(self.pinned | (self.returned & early)).tolist()
        stack = np.flatnonzero(self.returned & ~early).tolist()
        while stack:
            op = stack.pop()
            if runs[op]:
                continue
            runs[op] = True
            stack += self.views_of[op]
            for maker in self.makers_of[op]:
                (stack if late[maker] else needed).append(maker)
        return Deferral(self, self.closed(needed), runs)

    def closed(self, ops: list[int]) -> Bools:
        """Return (n,) marks of the given ops and of all ops that they need."""
        found, stack = np.zeros(len(self.ops), np.bool_), list(ops)
        while stack:
            op = stack.pop()
            if not found[op]:
                found[op] = True
                stack += self.needs[op]
        return found


@dataclass(frozen=True, eq=False)
class Deferral:
    """A choice of what the input part and the weight part of a backward compute.

    Attributes:
        problem: the problem.
        early: (n,) bool; ops of the input part.
        late: (n,) bool; ops of the weight part.
    """

    problem: Deferrals
    early: Bools
    late: Bools

    @cached_property
    def waiting(self) -> Ints:
        """The storages that are held between the two parts, in order."""
        problem = self.problem
        read: Ints = np.unique(problem.reads[self.late[problem.reads[:, 0]], 1])
        makers = problem.maker[read]
        waits: Ints = read[(makers == OUTSIDE) | ~self.late[makers]]
        return waits

    @property
    def nbytes(self) -> int:
        """The bytes of these storages."""
        return int(self.problem.nbytes[self.waiting].sum())

    @property
    def moved(self) -> float:
        """Seconds of ops in the input part that need not be there, and of ops that run a second time."""
        problem = self.problem
        extra = self.early & ~problem.pinned
        return float(problem.seconds[extra].sum() + self.repeated)

    @property
    def repeated(self) -> float:
        """Seconds of the ops that run in both parts."""
        return float(self.problem.seconds[self.early & self.late].sum())

    @property
    def seconds(self) -> tuple[float, float]:
        """Seconds of the input part and of the weight part."""
        times = self.problem.seconds
        return float(times[self.early].sum()), float(times[self.late].sum())


def deferrals(flow: JointFlow, plan: Plan, backward: PartKey, costs: Costs) -> Deferrals:
    """Return the arrays of one backward of a plan, in time linear in its nodes and edges.

    Args:
        flow: facts about the joint graph.
        plan: a plan that places every node that it needs.
        backward: the part to divide.
        costs: prices of nodes. Their bytes are not used: storages are counted.
    """
    return _Backward(flow, plan, backward).arrays(checked(costs))


def with_members(flow: JointFlow, plan: Plan) -> dict[Node, tuple[PartKey, ...]]:
    """Return the places of a plan, with those of the members of tuples."""
    placed = ((n, flow.producer(n)) for n in flow.scope)
    return {**plan.places, **{n: plan.places[producer] for n, producer in placed if producer in plan.places}}


class _Backward:
    """One backward of a plan."""

    def __init__(self, flow: JointFlow, plan: Plan, backward: PartKey) -> None:
        self.flow, self.plan, self.key = flow, plan, backward
        self.nodes = tuple(flow.index)
        self.counter = None if nodes_without_values(flow.graph) else counter_of(flow)
        inside = {n for n in flow.nodes if backward in plan.places.get(n, ())}
        self.members: dict[Node, list[Node]] = {n: [] for n in flow.nodes if n in inside}
        for node in flow.scope:
            if flow.producer(node) in inside and node.op not in ("placeholder", "get_attr"):
                self.members[flow.producer(node)].append(node)
        self.earlier = {op: self._earlier(op) for op in self.members}
        self.leaving = {op for op in self.members if self._leaves(op)}
        self.effects = {op for op, nodes in self.members.items() if any(n in flow.once for n in nodes)}
        # A node that something must follow touches memory that is written later, so it runs before the writer.
        self.effects |= {flow.producer(n) for after in flow.after.values() for n in after} & self.members.keys()
        self.gradients = self._terms() & self.members.keys()
        self._drop_unneeded()
        self.number = {op: i for i, op in enumerate(self.members)}
        self.views = {op for op in self.members if self._is_view(op)}
        self.storages: dict[Hashable, int] = {}
        self.nbytes: list[int] = []
        self.maker: list[int] = []

    def _terms(self) -> set[Node]:
        """Return the ops whose values backward returns, as gradients or as terms of them.

        A term of the gradient of an input leaves the stage. The nodes of a term that is a sum are added up at once, so
        all of them are in the input part.
        """
        flow, found = self.flow, set[Node]()
        for term in gradient_terms(flow, with_members(flow, self.plan)):
            ops = {flow.producer(n) for n in term.nodes} & self.members.keys()
            found |= ops
            leaves = len(term.nodes) > 1 or flow.gradients[term.position] in flow.input_gradients
            self.leaving |= ops if leaves else set()
        return found

    def _earlier(self, op: Node) -> dict[Node, None]:
        """Return the ops that must run before an op."""
        flow = self.flow
        found = (flow.producer(n) for m in self.members[op] for n in (*reads(m), *flow.after.get(m, ())))
        return {n: None for n in found if n is not op and n in self.members}

    def _leaves(self, op: Node) -> bool:
        """Whether another part takes a value of an op."""
        flow, plan = self.flow, self.plan
        users = {flow.producer(user) for node in self.members[op] for user in node.users if user.op != "output"}
        others = {key for user in users for key in plan.places.get(user, ()) if key != self.key}
        return any(plan.source(op, key) == self.key for key in others)

    def _drop_unneeded(self) -> None:
        stack, needed = [*self.leaving, *self.effects, *self.gradients], set[Node]()
        while stack:
            op = stack.pop()
            if op not in needed:
                needed.add(op)
                stack += self.earlier[op]
        self.members = {op: nodes for op, nodes in self.members.items() if op in needed}

    def _is_view(self, op: Node) -> bool:
        """Whether an op makes no memory, only views, and may run again."""
        storages, index = self.flow.storages, self.flow.index
        slots = [s for node in self.members[op] for s in storages.slots[index[node]]]
        return bool(slots) and all(storages.source[s] != s for s in slots) and op not in self.effects

    def arrays(self, costs: Costs) -> Deferrals:
        """Return the arrays."""
        read, along, passed, mixed = self._reads()
        before = {(i, self.number[p]) for op, i in self.number.items() for p in self.earlier[op] if p in self.number}
        ops = tuple(self.members)
        none = np.zeros(len(ops), np.bool_)
        first = Deferrals(
            self.flow,
            ops,
            np.array([0.0 if op in self.views else costs.seconds(op) for op in ops]),
            none,
            np.array([op in self.effects or i in mixed for i, op in enumerate(ops)], np.bool_),
            none,
            np.array([op in self.gradients for op in ops], np.bool_),
            np.array(self.nbytes, np.int64),
            np.array(self.maker, np.int64),
            _pairs(read),
            _pairs(along),
            _pairs(passed),
            _pairs(before),
            unit_of(costs),
        )
        pinned = first.closed([self.number[op] for op in ops if op in self.leaving or op in self.effects])
        return replace(first, pinned=pinned, products=self._products(pinned))

    def _reads(self) -> tuple[set[tuple[int, int]], set[tuple[int, int]], set[tuple[int, int]], set[int]]:
        """Return the pairs of `Deferrals.reads`, `along` and `passed`, and the ops whose memory others also make."""
        read, along, passed = set[tuple[int, int]](), set[tuple[int, int]](), set[tuple[int, int]]()
        mixed = set[int]()
        for op, i in self.number.items():
            for value in dict.fromkeys(r for node in self.members[op] for r in reads(node)):
                maker = self.flow.producer(value)
                if maker is op:
                    continue
                inside = maker in self.members
                if maker in self.views:
                    along.add((i, self.number[maker]))
                    continue
                held = self._storages(value)
                read.update((i, k) for k in held)
                if inside and not held:
                    passed.add((i, self.number[maker]))
                # Memory of another op, in a value that the weight part cannot make again: the base is not enough.
                mixed.update(
                    self.maker[k] for k in held if inside and self.maker[k] not in (OUTSIDE, self.number[maker])
                )
        return read, along, passed, mixed

    def _storages(self, value: Node) -> list[int]:
        """Return the numbers of the storages that a value lies in, without those of the caller."""
        flow = self.flow
        if value in flow.backward_inputs:
            given = {storage_key(t): plain_size(storage_nbytes(t), {}) for t in tensors(value_of(value))}
            return [self._number(key, nbytes, OUTSIDE) for key, nbytes in given.items()]
        computed, found = flow.producer(value) in self.members, []
        for root in flow.storages.under(value):
            # Forward's copy of a storage is another one than the copy that backward recomputes.
            maker = flow.producer(self.nodes[int(flow.storages.maker[root])])
            made = self.number.get(maker, OUTSIDE) if computed else OUTSIDE
            nbytes = flow.storages.nbytes[root]
            found.append(self._number(root, self.received.get(root, nbytes) if made == OUTSIDE else nbytes, made))
        return found

    @cached_property
    def received(self) -> Mapping[int, int]:
        """Storage -> bytes of the stage's copies of its values: what other stages send arrives contiguous."""
        found, stage = Counter[int](), known_part(self.key).stage
        for value in self.flow.scope:
            made = self._stages(value)
            if made and stage not in made and any(stage in self._stages(user) for user in value.users):
                found.update(dict.fromkeys(self.flow.storages.under(value), value_bytes(value)))
        return found

    def _stages(self, node: Node) -> set[int]:
        return {known_part(key).stage for key in self.plan.places.get(self.flow.producer(node), ())}

    def _number(self, key: Hashable, nbytes: int, maker: int) -> int:
        """Return the number of a storage, which is new if it is asked for the first time."""
        if (key, maker) not in self.storages:
            self.storages[key, maker] = len(self.nbytes)
            self.nbytes.append(nbytes)
            self.maker.append(maker)
        return self.storages[key, maker]

    def _products(self, pinned: Bools) -> Bools:
        """See `Deferrals.products`."""
        late, below = set(self.flow.backward_inputs), set[Node]()
        for node in self.flow.index:
            if node.op != "output" and any(read in late for read in node.all_input_nodes):
                late.add(node)
        found = np.zeros(len(self.number), np.bool_)
        for op, i in reversed(self.number.items()):
            heavy = not pinned[i] and op in late and self._is_heavy(op)
            found[i] = heavy and op not in below
            if heavy or op in below:
                below.update(self.earlier[op])
        return found

    def _is_heavy(self, op: Node) -> bool:
        return op_of(op).startswith("embedding_dense_backward") or bool(self.counter and self.counter.counted(op))


def _pairs(found: Iterable[tuple[int, int]]) -> Ints:
    return np.array(sorted(found), np.int64).reshape(-1, 2)


def _grouped(pairs: Ints, count: int) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(count)]
    for first, second in pairs.tolist():
        found[first].append(second)
    return tuple(map(tuple, found))


# Turn choices of what waits into a plan with the parts ``"input"`` and ``"weight"`` of each stage.


def plan_in_stages(flow: JointFlow, plan: Plan) -> Plan:
    """Return the plan with stages: ``"forward"`` and ``"backward"`` become those of stage 0.

    A plan of these two is completed first: with eager's places for nodes that it leaves out, and by checkpoint tags.
    Sums of gradients of a parameter over several stages are placed nowhere: the caller adds them up.

    Raises:
        PolicyError: SK302 for a plan with other parts, or whose backward is divided already.
    """
    names: dict[PartKey, PartKey] = {FORWARD: ("forward", 0), BACKWARD: ("backward", 0)}
    if names.keys() >= plan.parts.keys():
        plan = apply_checkpoints(flow, replace(plan, places={**flow.save_all.places, **plan.places}))
        plan = replace(plan, parts={key: plan.parts.get(key, Part(key)) for key in names})
        places = {n: tuple(names[key] for key in keys) for n, keys in plan.places.items()}
        return replace(plan, places=places, parts={names[k]: replace(p, key=names[k]) for k, p in plan.parts.items()})
    halves = {key: part.half for key in plan.parts if (part := stage_part(key)) is not None}
    strange = [repr(key) for key in plan.parts if halves.get(key) not in ("forward", "backward")]
    if strange or "backward" not in halves.values():
        raise PolicyError(
            "SK302",
            "SplitBackward divides the backward of each stage, and the plan has "
            + (f"a part {strange[0]}" if strange else "no backward"),
            "Give it a policy or plan with the parts 'forward' and 'backward', or ('forward', s) and ('backward', s) "
            "for stages s.",
        )
    places = with_members(flow, plan)
    gradient_terms(flow, places)
    return replace(plan, places={n: places[n] for n in plan.places})


def backward_parts(plan: Plan) -> dict[int, PartKey]:
    """Return stage -> the key of its backward, by rising stage."""
    parts = (stage_part(key) for key in plan.parts)
    return dict(sorted((part.stage, part) for part in parts if part is not None and part.half == "backward"))


def divided(plan: Plan, chosen: Mapping[int, Deferral]) -> Plan:
    """Return the plan in which each stage's backward is an input part and a weight part.

    A node in both parts has the input part first. Nodes of backward that nobody needs are dropped. Parts keep their
    device and replicas; both parts are there even if one computes nothing.

    Args:
        plan: a plan with stages.
        chosen: stage -> the choice for its backward.
    """
    halves: dict[PartKey, dict[Node, tuple[PartKey, ...]]] = {}
    for stage, choice in chosen.items():
        early, late = ("input", stage), ("weight", stage)
        rows = zip(choice.problem.ops, choice.early, choice.late, strict=True)
        halves[("backward", stage)] = {op: (early,) * bool(e) + (late,) * bool(w) for op, e, w in rows}
    places = {
        node: tuple(k for key in keys for k in (halves[key].get(node, ()) if key in halves else (key,)))
        for node, keys in plan.places.items()
    }
    parts: dict[PartKey, Part] = {}
    for key, part in plan.parts.items():
        there = stage_part(key) if key in halves else None
        keys: list[PartKey] = [key] if there is None else [("input", there.stage), ("weight", there.stage)]
        parts |= {k: replace(part, key=k) for k in keys}
    return replace(plan, places=places, parts=parts, claim=None)


@dataclass(frozen=True, eq=False)
class DeferralNetwork:
    """A `Deferrals` as a network, with two vertices for each op and one for each storage.

    ::

        source --inf--> early(o)                        o is pinned: it is in the input part
        late(o) --inf--> early(o)                       o is in a part
        early(o) --seconds--> late(o)                   o is in both
        early(o) --seconds--> sink                      o is in the input part and need not be
        early(o) --inf--> early(p)                      o needs p
        late(maker) --nbytes--> storage --inf--> late(o)   o reads the storage, which the weight part does not make

    ``early(o)`` on the source's side means that o is in the input part, ``late(o)`` on the sink's side that it is in
    the weight part.

    Attributes:
        problem: the arrays.
        size: the number of vertices; 0 is the source, 1 the sink.
        tails: (e,) int; where edges start.
        heads: (e,) int; where they end.
        nbytes: (e,) float; what an edge costs in bytes.
        seconds: (e,) float; what it costs in seconds.
    """

    problem: Deferrals
    size: int
    tails: Ints
    heads: Ints
    nbytes: Floats
    seconds: Floats

    @classmethod
    def of(cls, problem: Deferrals, *, products: bool) -> DeferralNetwork:
        """Build the network of a problem.

        Args:
            problem: the arrays.
            products: whether `Deferrals.products` are in the weight part in any case, and no op that takes time runs
                in both parts.
        """
        n, k = len(problem.ops), len(problem.nbytes)
        early, late, storage = 2 + np.arange(n), 2 + n + np.arange(n), 2 + 2 * n + np.arange(k)
        never, single = np.inf, problem.single
        if products:
            single = single | (problem.seconds > 0)
        made = problem.maker != OUTSIDE
        maker = np.where(made, late[problem.maker] if n else 0, 0)
        free = np.flatnonzero(~problem.pinned)
        stays = np.where(problem.products & products, never, problem.seconds)[free]
        ends, reads, along = problem.before, problem.reads, problem.along
        groups: list[tuple[Ints, Ints, object, object]] = [
            (np.zeros(int(problem.pinned.sum()), np.int64), early[problem.pinned], never, 0.0),
            (late, early, never, 0.0),
            (early, late, 0.0, np.where(single, never, problem.seconds)),
            (early[free], np.ones(len(free), np.int64), 0.0, stays),
            (early[ends[:, 0]], early[ends[:, 1]], never, 0.0),
            (maker, storage, problem.nbytes.astype(np.float64), 0.0),
            (storage[reads[:, 1]], late[reads[:, 0]], never, 0.0),
            (late[along[:, 1]], late[along[:, 0]], never, 0.0),
        ]
        columns = [[np.broadcast_to(np.asarray(c), g[0].shape) for c in g] for g in groups]
        tails, heads, nbytes, seconds = (np.concatenate(c) for c in zip(*columns, strict=True))
        return cls(problem, 2 + 2 * n + k, tails, heads, nbytes, seconds)

    def cheapest(self, price: float) -> tuple[Deferral, float]:
        """Return the choice of least ``waiting bytes + price * seconds``, and a lower bound on that of all choices.

        At a price of 0 all seconds together weigh half a byte.
        """
        total = float(self.seconds[np.isfinite(self.seconds)].sum())
        rate = price or 0.5 / (total or 1.0)
        capacities, unit = whole_capacities(self.nbytes + rate * self.seconds)
        cut = min_cut(Network(self.size, self.tails, self.heads, capacities))
        bound = cut.value * unit
        return self.choice(cut.largest), bound if price else float(np.floor(bound))

    def choice(self, side: Bools) -> Deferral:
        """Return the choice that a cut stands for, given by the source's side."""
        n = len(self.problem.ops)
        return self.problem.choose(side[2 : 2 + n], ~side[2 + n : 2 + 2 * n])
