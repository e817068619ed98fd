"""The least recompute of a stage whose link has some seconds to spare between its forward and its backward.

A pipeline gives the stage s of n about n - s times of a stage between the two (PipeOffload, Wan et al., ICML 2025).
What the link carries out and back in that time need not stay on the device: ``R(bytes, link seconds)``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from splitkit.costs.links import HostLink
from splitkit.search.recompute.pareto_cuts import Hull
from splitkit.training.choices import Choice, Ints
from splitkit.training.movable_values import why_not_moved


@dataclass(frozen=True, eq=False)
class StageChoice:
    """A choice for a stage.

    Attributes:
        choice: what is saved and recomputed.
        offloaded: the storages that go to the host.
        bound: a lower bound on the seconds of recompute of every choice with these bytes and this link.
    """

    choice: Choice
    offloaded: tuple[int, ...]
    bound: float

    @property
    def seconds(self) -> float:
        """The seconds of recompute."""
        return self.choice.seconds

    @property
    def host_bytes(self) -> int:
        """The bytes on the host."""
        return int(self.choice.savings.nbytes[list(self.offloaded)].sum())

    @property
    def device_bytes(self) -> int:
        """The saved bytes that stay on the device."""
        return self.choice.nbytes - self.host_bytes


def stage_choice(hull: Hull, nbytes: int, link: HostLink, seconds: float) -> StageChoice | None:
    """Return the choice of the hull with the least recompute that keeps few enough bytes on the device.

    The link carries a value out and back within the seconds, one value after the other in each direction. Of values
    whose copies do not fill the seconds exactly, the largest go first, so the choice is near the best; `bound` holds
    for all.

    Args:
        hull: the frontier of the stage.
        nbytes: the saved bytes that may stay on the device.
        link: the link to the host.
        seconds: what the link has between forward and backward of one microbatch.

    Returns:
        The choice; ``None`` if not even the fewest saved bytes are few enough.
    """
    bandwidth = min(link.out.bandwidth, link.back.bandwidth)
    carried = min(bandwidth * max(0.0, seconds), float(hull.choices[-1].savings.nbytes.sum()))
    bound, low, high = hull.bound(nbytes + carried), nbytes, nbytes + int(carried)
    best: StageChoice | None = None
    while low <= high:  # a choice that saves more may leave more than the link carries
        middle = (low + high + 1) // 2
        choice = hull.within(middle)
        found = None if choice is None else _carried(choice, nbytes, link, seconds, bound)
        if found is not None and (best is None or found.seconds < best.seconds):
            best = found
        low, high = (middle + 1, high) if found is not None else (low, middle - 1)
    return best


def _carried(choice: Choice, nbytes: int, link: HostLink, seconds: float, bound: float) -> StageChoice | None:
    left, moved = choice.nbytes - nbytes, list[int]()
    out = back = 0.0
    sizes = choice.savings.nbytes
    for storage in sorted(_movable(choice), key=lambda k: (-int(sizes[k]), k)):
        if left <= 0:
            break
        later = out + link.out.seconds(int(sizes[storage])), back + link.back.seconds(int(sizes[storage]))
        if max(later) <= seconds:
            (out, back), left = later, left - int(sizes[storage])
            moved.append(storage)
    return StageChoice(choice, tuple(moved), min(bound, choice.seconds)) if left <= 0 else None


def _movable(choice: Choice) -> Iterable[int]:
    problem = choice.savings
    storages: Ints = problem.storage[choice.saved]
    saved = np.flatnonzero(choice.saved).tolist()
    alone = {int(k) for k, count in zip(*np.unique(storages, return_counts=True), strict=True) if count == 1}
    values = ((int(problem.storage[v]), problem.values[v]) for v in saved)
    return [k for k, value in values if k in alone and not why_not_moved(problem.flow, value)]
