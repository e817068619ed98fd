"""Tables over pairs of cuts: what a stage between two cuts takes at least, whatever it saves.

Times are exact; bytes are lower bounds. Entry [i, j] is for the stage from cut i to cut j > i; other entries mean
nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.search.pipelines.stage_problems import StageProblems

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class SpanTables:
    """The tables of one graph.

    Attributes:
        cuts: (n + 1,) the positions of the cuts, with 0 and the end.
        forward: (n + 1, n + 1) seconds of forward.
        inputs: the same of the input part of backward, without recompute; all of backward where it is not divided.
        weights: the same of the weight part. The first stage has all of its backward there.
        either: the same of what is either in forward or in one of these parts.
        fixed: bytes of weights, gradients and optimizer.
        held: bytes of a microbatch that are held in any case: received and sent values.
        waiting: bytes of a microbatch that wait for the weight part. The first stage's are its saved bytes, and 0 here.
        temporary: bytes that the stage takes while it computes.
    """

    def __init__(self, problems: StageProblems, cuts: Ints) -> None:
        self.problems, self.cuts = problems, cuts
        self.forward = _differences(problems.forward[cuts])
        backward = _differences(problems.backward[cuts])
        self.weights = self._weights(backward) if problems.divided else np.zeros_like(backward)
        self.inputs = np.maximum(0.0, backward - self.weights)
        self.either = _differences(problems.either[cuts])
        self.fixed = fixed_bytes(problems, cuts)
        self.held = problems.sent_on[cuts][:, None] + self._sent()
        self.waiting = self._waiting() if problems.divided else np.zeros_like(backward)
        self.temporary = self._temporary()

    def _weights(self, backward: Floats) -> Floats:
        at, reach, number = self.problems.halves.nodes_of_backward()
        seconds = self.problems.in_backward[number]
        found = np.zeros((len(self.cuts), len(self.cuts)))
        for i, start in enumerate(self.cuts.tolist()):
            inside = (at >= start) & (reach >= start)
            found[i] = _before(at[inside], seconds[inside], self.cuts)
        found[0] = backward[0]
        return np.minimum(found, np.maximum(0.0, backward))

    def _sent(self) -> Floats:
        """Return the bytes that a stage makes and sends on."""
        found, nbytes = np.zeros((len(self.cuts), len(self.cuts))), self.problems.flow.storages.nbytes
        for j, end in enumerate(self.cuts[:-1].tolist()):
            first: dict[int, int] = {}  # storage -> the last start of a stage that makes it and sends it over this cut
            for made, last, roots in self.problems.sent:
                if made < end <= last:
                    for root, at in roots:
                        first[root] = max(first.get(root, -1), min(made, at))
            for root, at in first.items():
                found[: np.searchsorted(self.cuts, at, side="right"), j] += nbytes[root]
        return found

    def _waiting(self) -> Floats:
        """Return the bytes that weight parts read and other parts made, with what the stage received."""
        at, reach, root, nbytes, made, makers = self.problems.halves.reads_of_backward()
        found = np.zeros((len(self.cuts), len(self.cuts)))
        for i, start in enumerate(self.cuts.tolist()):
            inside = (at >= start) & (reach >= start) & (made >= start) & (makers < start)
            roots, number = np.unique(root[inside], return_inverse=True)
            first = np.full(len(roots), np.iinfo(np.int64).max)
            np.minimum.at(first, number, at[inside])
            size = np.zeros(len(roots))
            size[number] = nbytes[inside]
            found[i] = _before(first, size, self.cuts)
        found += self.problems.sent_on[self.cuts][:, None]
        found[0] = 0.0
        return found

    def _temporary(self) -> Floats:
        """Return the most bytes that one op of backward needs, or the gradients that are alive at its end."""
        size = len(self.cuts)
        found = np.zeros((size, size))
        for low, high, nbytes in self.problems.peaks.needs_of_backward():
            i = int(np.searchsorted(self.cuts, low, side="right")) - 1
            j = int(np.searchsorted(self.cuts, high, side="right"))
            found[i, j] = max(found[i, j], nbytes)
        found = np.maximum.accumulate(np.maximum.accumulate(found[::-1], axis=0)[::-1], axis=1)
        made = self.problems.peaks.gradients[self.cuts]
        return np.asarray(np.maximum(found, made[None, :] - made[:, None]), np.float64)


def fixed_bytes(problems: StageProblems, cuts: Ints) -> Floats:
    """Return (n + 1, n + 1) the bytes of weights, gradients and optimizer of the stages between all cuts."""
    size = len(cuts)
    gradients, parameters = np.zeros((size, size)), np.zeros((size, size))
    for nbytes, gradient, used in problems.parameters:
        before = -1
        for piece in np.unique(np.searchsorted(cuts, used, side="right") - 1).tolist():
            parameters[before + 1 : piece + 1, piece + 1 :] += nbytes
            gradients[before + 1 : piece + 1, piece + 1 :] += gradient
            before = piece
    state = STATE_OF[problems.optimizer] if problems.optimizer else 0
    return parameters + gradients * (1 + state)


def _differences(sums: Floats) -> Floats:
    return np.asarray(sums[None, :] - sums[:, None])


def _before(at: Ints, values: Floats, cuts: Ints) -> Floats:
    """Return (n + 1,) the sum of the values that are at a position before each cut."""
    order = np.argsort(at, kind="stable")
    sums = np.concatenate([[0.0], np.cumsum(values[order])])
    return np.asarray(sums[np.searchsorted(at[order], cuts, side="left")])
