"""Why each value of a training step is saved or recomputed, with equal layers folded, and what the other choice costs.

A *row* stands for the values of equal layers: the same module but for its numbers, the same op, bytes and reason. The
other choice is priced for the row's middle layer, by simulating the plan in which it alone is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch.fx import Node

from splitkit.errors import SplitError
from splitkit.graph.dataflow import module_path
from splitkit.graph.symbols import value_of
from splitkit.plans.record import Plan
from splitkit.search.recompute.plan_pool import Pool, Seen
from splitkit.studies.explanation.folded_names import ranges, without_numbers
from splitkit.training.choices import Bools, Savings
from splitkit.training.emission_order import saved_for_backward
from splitkit.training.flow import BACKWARD, FORWARD, is_size, output_nodes
from splitkit.training.saved_values import op_of

_MOST = 150
"""How many rows are priced, those with the most bytes first; each takes a simulation."""

SAVED, AGAIN = "saved", "recomputed"
HELD = "the caller holds it anyway"
"""Why an input or a parameter costs nothing to save."""


@dataclass(frozen=True)
class RecomputeRow:
    """Equal values of equal layers.

    Attributes:
        decision: ``"saved"`` or ``"recomputed"``.
        module: their module, with ``*`` for the numbers of layers.
        layers: the numbers, such as ``"0-11"``; empty if the module has none.
        op: the op that makes them.
        nodes: their names, in graph order.
        stages: the stages of a pipeline that they are in; empty without stages.
        nbytes: the bytes of one, as the storage that is saved or would be; 0 for what takes no memory of its own.
        forced: why there is no choice; empty if there is one.
        seconds: what recomputing one takes; with what it needs that is not there. ``None`` if it was not priced.
        saved_change: the bytes that the other choice adds to what is saved (negative: fewer); ``None`` likewise.
        peak_change: the bytes that it adds to the peak; ``None`` likewise, and for plans in stages.
    """

    decision: str
    module: str
    layers: str
    op: str
    nodes: tuple[str, ...]
    stages: tuple[int, ...]
    nbytes: int
    forced: str
    seconds: float | None = None
    saved_change: int | None = None
    peak_change: int | None = None

    @property
    def rate(self) -> float | None:
        """Seconds of recompute for each byte that need not be saved; ``None`` if it is not known or saves none."""
        if self.seconds is None or not self.saved_change:
            return None
        fewer = -self.saved_change if self.decision == SAVED else self.saved_change
        return self.seconds / fewer if fewer > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "nodes": list(self.nodes), "stages": list(self.stages), "rate": self.rate}


@dataclass(frozen=True, eq=False)
class RecomputeChoices:
    """The choices of a plan for a joint graph.

    Attributes:
        pool: simulates plans.
        plan: the complete plan, with the parts ``"forward"`` and ``"backward"``.
        stage_of: node -> the stage that computes it first; empty without stages.
    """

    pool: Pool
    plan: Plan
    stage_of: Mapping[Node, int]

    @property
    def problem(self) -> Savings:
        """The problem that the plan solves."""
        return self.pool.savings

    @property
    def has_peak(self) -> bool:
        """Whether there is one peak, which the pool knows: not in stages, nor with values that wait on the host."""
        return not self.stage_of and not self.plan.offloaded

    @cached_property
    def runs(self) -> Bools:
        """(n,) bool; the ops that backward computes."""
        return np.array([BACKWARD in self.plan.get(op, ()) for op in self.problem.ops], np.bool_)

    @cached_property
    def seen(self) -> Seen:
        """The plan, as a choice of what is saved."""
        return self.pool.see(self.runs)

    @cached_property
    def _op(self) -> dict[Node, int]:
        return {op: i for i, op in enumerate(self.problem.ops)}

    @cached_property
    def _value(self) -> dict[Node, int]:
        return {value: i for i, value in enumerate(self.problem.values)}

    @cached_property
    def _saved_storages(self) -> Bools:
        found = np.zeros(len(self.problem.nbytes), np.bool_)
        found[self.problem.storage[self.seen.choice.saved]] = True
        return found

    @cached_property
    def saved(self) -> list[Node]:
        """The values that backward takes from forward, sizes left out, in graph order."""
        return [n for n in saved_for_backward(self.problem.flow, self.plan) if not is_size(n)]

    @cached_property
    def again(self) -> list[Node]:
        """The ops that both halves compute, in graph order."""
        places = self.plan.places
        return [n for n in self.problem.flow.nodes if FORWARD in places.get(n, ()) and BACKWARD in places.get(n, ())]

    @cached_property
    def returned(self) -> frozenset[Node]:
        """The values that forward returns to the caller."""
        return frozenset(output_nodes(self.problem.flow.outputs))

    def _has(self, value: int) -> bool:
        """Whether backward has a value without computing more."""
        problem = self.problem
        saved = problem.savable[value] or problem.fixed[problem.maker[value]]
        return bool(self.runs[problem.maker[value]] or (saved and self._saved_storages[problem.storage[value]]))

    def chain(self, node: Node) -> tuple[list[int], str]:
        """Return the ops that backward would also have to run to compute a saved value, or why it cannot."""
        problem = self.problem
        first = self._op[problem.flow.producer(node)]
        own = {int(problem.storage[v]) for v in np.flatnonzero(problem.maker == first)}
        found, stack = {first}, [first]
        while stack:
            op = stack.pop()
            if problem.fixed[op]:
                name = problem.ops[op]
                other = "" if op == first else f"it needs {name.name}, which is not saved, and "
                return [], other + problem.why[name]
            for value in problem.read_by[op]:
                maker = int(problem.maker[value])
                gone = int(problem.storage[value]) in own and not self.runs[maker]
                if maker not in found and (gone or not self._has(value)):
                    found.add(maker)
                    stack.append(maker)
        return sorted(found), ""

    def forced(self, node: Node) -> str:
        """Return why a saved value, or an op that runs again, has no other choice; empty if it has one."""
        problem, op = self.problem, self._op.get(self.problem.flow.producer(node))
        if node.op in ("placeholder", "get_attr") or (op is None and node in self.saved):
            return HELD
        if op is None:
            return "it takes no memory of its own"
        if self.runs[op]:
            if problem.forced[op]:
                return "its checkpoint recomputes it"
            if not any(problem.savable[v] for v in np.flatnonzero(problem.maker == op)):
                return "a view: it takes no memory of its own and no time"
            return ""
        return self.chain(node)[1]

    def other(self, node: Node) -> Seen | None:
        """Return the plan in which one choice differs; ``None`` if it cannot."""
        op = self._op.get(self.problem.flow.producer(node))
        if op is None or self.forced(node):
            return None
        runs = self.runs.copy()
        if runs[op]:
            runs[op] = False
        else:
            runs[self.chain(node)[0]] = True
        try:
            return self.pool.see(runs)
        except SplitError:
            return None

    def nbytes(self, node: Node) -> int:
        """Return the bytes of the storage of a value; of all results for an op with several."""
        problem, producer = self.problem, self.problem.flow.producer(node)
        if node in self._value and not isinstance(value_of(node), tuple | list):
            return int(problem.nbytes[problem.storage[self._value[node]]])
        op = self._op.get(producer)
        if op is None:
            return 0
        storages = {int(problem.storage[v]) for v in np.flatnonzero(problem.maker == op)}
        return sum(int(problem.nbytes[s]) for s in storages)

    @cached_property
    def _bases(self) -> dict[int, Node]:
        """Storage -> the first value that lies in it."""
        found: dict[int, Node] = {}
        for value, storage in zip(self.problem.values, self.problem.storage.tolist(), strict=True):
            found.setdefault(storage, value)
        return found

    def base(self, node: Node) -> Node:
        """Return the value whose storage a view shares; any other node itself."""
        if node not in self._value or self.runs_again(node):
            return node
        return self._bases[int(self.problem.storage[self._value[node]])]

    def row(self, nodes: list[Node], priced: bool = True) -> RecomputeRow:
        """Return the row of equal values, priced for the middle one."""
        node = nodes[len(nodes) // 2]
        base = self.base(node)
        module, _ = without_numbers(module_path(base))
        layers = [numbers[0] for n in nodes if (numbers := without_numbers(module_path(self.base(n)))[1])]
        decision = AGAIN if self.runs_again(node) else SAVED
        stages = tuple(sorted({self.stage_of[n] for n in nodes if n in self.stage_of}))
        known = RecomputeRow(
            decision,
            module,
            ranges(layers),
            op_of(base) if base.op not in ("placeholder", "get_attr") else "input",
            tuple(n.name for n in nodes),
            stages,
            self.nbytes(node),
            self.forced(node),
        )
        other = self.other(node) if priced else None
        return known if other is None else self._priced(known, other)

    def _priced(self, row: RecomputeRow, other: Seen) -> RecomputeRow:
        more = other.seconds - self.seen.seconds
        return replace(
            row,
            seconds=max(0.0, more if row.decision == SAVED else -more),
            saved_change=other.saved - self.seen.saved,
            peak_change=other.peak - self.seen.peak if self.has_peak else None,
        )

    def runs_again(self, node: Node) -> bool:
        """Whether backward computes what forward computed."""
        return BACKWARD in self.plan.get(self.problem.flow.producer(node), ())

    @cached_property
    def groups(self) -> list[list[Node]]:
        """The saved values and the recomputed ops, equal ones of equal layers together, the most bytes first."""
        found: dict[tuple[object, ...], list[Node]] = {}
        for node in self._decided():
            key = (
                self.runs_again(node),
                without_numbers(module_path(self.base(node)))[0],
                op_of(self.base(node)),
                self._ordinal[self.base(node)],
                self.nbytes(node),
                _kind(self.forced(node)),
                node in self.returned,
            )
            found.setdefault(key, []).append(node)
        return sorted(found.values(), key=lambda nodes: -self.nbytes(nodes[0]) * len(nodes))

    @cached_property
    def _ordinal(self) -> dict[Node, int]:
        """Node -> how many nodes with the same op are before it in its module."""
        counts, found = Counter[tuple[str, str]](), dict[Node, int]()
        for node in self.problem.flow.index:
            key = (module_path(node), op_of(node))
            found[node] = counts[key]
            counts[key] += 1
        return found

    def _decided(self) -> Iterator[Node]:
        """Yield the saved values and the recomputed ops about which something can be said."""
        known = set[int]()  # one value stands for all that are views of its storage
        for node in self.saved:
            storage = int(self.problem.storage[self._value[node]]) if node in self._value else -1
            if node.op != "placeholder" and self.nbytes(node) and storage not in known:
                known.add(storage)
                yield node
        late = {op for op, is_late in zip(self.problem.ops, self.problem.late, strict=True) if is_late}
        for node in self.again:
            if node in self._op and node not in late and self.forced(node)[:6] != "a view":
                yield node

    @cached_property
    def rows(self) -> tuple[RecomputeRow, ...]:
        """A row for each group."""
        return tuple(self.row(nodes, number < _MOST) for number, nodes in enumerate(self.groups))


def _kind(reason: str) -> str:
    """Return a reason without the name of the node that it is about."""
    return reason.partition(", which is not saved, and ")[2] or reason
