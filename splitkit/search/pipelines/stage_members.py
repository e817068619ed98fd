"""Says which ops the forward and the backward of a stage compute: the one place for times, memory and the plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np
from torch.fx import Node

from splitkit.plans.rewrite import prune
from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.training.choices import Choice
from splitkit.training.emission_order import EmissionOrder
from splitkit.training.flow import output_nodes, save_all_plan
from splitkit.training.gradient_terms import terms_and_sums


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
