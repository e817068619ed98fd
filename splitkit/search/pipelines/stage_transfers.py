"""Which saved values of a stage can go to the host, and how long their copies take beside its forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from torch.fx import Node

from splitkit.costs.links import HostLink
from splitkit.pipeline.host_copies_of_stage import StageCopies
from splitkit.search.pipelines.stage_problem import StageProblem
from splitkit.search.pipelines.stage_problems import StageProblems
from splitkit.training.choices import Choice
from splitkit.training.flow import output_nodes
from splitkit.training.movable_values import why_not_moved


class StageTransfers:
    """The values that stages of one joint graph can move, and their copies.

    Attributes:
        problems: the problems of all stages.
        link: the link of each rank to its host.
    """

    def __init__(self, problems: StageProblems, link: HostLink) -> None:
        self.problems, self.link = problems, link
        flow, peaks = problems.flow, problems.peaks
        seconds = {node: problems.costs.seconds(node) for node in flow.nodes}
        self._seconds = [sum(seconds.get(node, 0.0) for node in ops) for ops in peaks.order.ops]
        self._fixed: dict[Node, bool] = {}
        self._returned = {r for n in output_nodes((*flow.outputs, *flow.gradients)) for r in flow.storages.under(n)}

    def movable(self, problem: StageProblem, choice: Choice) -> dict[int, Node]:
        """Return storage of the problem -> the saved value that fills it, for the storages that can go to the host."""
        savings, found = problem.savings, dict[int, Node]()
        saved = np.flatnonzero(choice.saved).tolist()
        storages = savings.storage[saved].tolist()
        for value, storage in zip(saved, storages, strict=True):
            if int(savings.nbytes[storage]) and storages.count(storage) == 1 and self._moves(savings.values[value]):
                found[storage] = savings.values[value]
        return found

    def _moves(self, value: Node) -> bool:
        if value not in self._fixed:
            flow = self.problems.flow
            returned = not self._returned.isdisjoint(flow.storages.under(value))
            self._fixed[value] = returned or bool(why_not_moved(flow, value))
        return not self._fixed[value]

    def copies(self, problem: StageProblem, choice: Choice, storages: Sequence[int]) -> StageCopies | None:
        """Return the copies of a microbatch of a stage that offloads these storages; ``None`` for none."""
        if not storages:
            return None
        start, end = problem.start, problem.end
        values = self.movable(problem, choice)
        order, flow = self.problems.peaks.order, self.problems.flow
        forward, backward = self.problems.members.of(start, end, choice)
        if self.problems.divided:
            late = self.problems.halves.weights(start, end)
            backward = [op for op in backward if op not in late]
        backward = order.backward_ops(backward)
        sizes = problem.savings.nbytes
        roots = {flow.storages.under(values[s])[0]: int(sizes[s]) for s in storages}
        costs = self.problems.seconds_of(problem, choice)
        made = _ends(forward, self._seconds)
        first = {order.number[flow.producer(values[s])]: int(sizes[s]) for s in storages}
        leaving = sorted((made.get(op, costs.forward), size) for op, size in first.items())
        out = [self.link.out.seconds(size) for _, size in leaving]
        waits = [at + left for (at, _), left in zip(leaving, _rests(out), strict=True)]
        rest = dict(zip(backward, _rests([self._seconds[op] for op in backward]), strict=True))
        reads = {root: max((rest[op] for op in backward if root in order.held[op]), default=0.0) for root in roots}
        coming = sorted(((-reads[root], size) for root, size in roots.items()))
        back = [self.link.back.seconds(size) for _, size in coming]
        own = costs.backward_input
        tails = [done + min(own, -left) for (left, _), done in zip(coming, accumulate(back), strict=True)]
        nbytes = sum(roots.values())
        return StageCopies(nbytes, sum(out), min(max(waits), costs.forward + sum(out)), sum(back), max(tails))


def _ends(ops: Sequence[int], seconds: Sequence[float]) -> dict[int, float]:
    """Return op -> when it ends, if they run one after the other."""
    return dict(zip(ops, accumulate(seconds[op] for op in ops), strict=True))


def _rests(seconds: Sequence[float]) -> list[float]:
    """Return suffix sums: for each entry, its sum with all later entries."""
    return list(accumulate(reversed(seconds)))[::-1]
