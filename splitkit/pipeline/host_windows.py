"""Says between which actions of a rank the offloaded values of a microbatch leave the device, are away, and come back.

Values leave during forward and the next action of the rank, and come back during the last action before backward and
backward itself, so that copies run beside the work of other microbatches::

    1F1B, rank 0 of 4     F0    F1     F2      F3    B0    F4     B1
    microbatch 1                made   leaves  away  away  comes  read

Where too few actions lie between, forward waits for the copy at its own end, or backward for its own start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitkit.pipeline.action import Action


@dataclass(frozen=True)
class HostWindow:
    """The actions of a rank, by number, that the values of one microbatch of one stage pass.

    Attributes:
        made: forward.
        released: the action at whose end the rank waits for the copies to the host, and frees the memory.
        asked: the action at whose start the memory is taken again, and the copies back are asked for.
        read: backward, or its input part.
    """

    made: int
    released: int
    asked: int
    read: int


def host_windows(row: Sequence[Action]) -> dict[tuple[int, int], HostWindow]:
    """Return (stage, microbatch) -> its window, for the actions of one rank."""
    made: dict[tuple[int, int], int] = {}
    found: dict[tuple[int, int], HostWindow] = {}
    for number, (stage, kind, microbatch) in enumerate(row):
        key = (stage, microbatch)
        if kind == "F":
            made[key] = number
        elif kind in ("B", "I"):
            start = made[key]
            released = start + 1 if start + 1 < number else start
            asked = number - 1 if number - 1 > released else number
            found[key] = HostWindow(start, released, asked, number)
    return found


def most_on_host(row: Sequence[Action], nbytes: Mapping[int, int]) -> int:
    """Return the most bytes that one rank has on the host at once.

    Args:
        row: the actions of the rank.
        nbytes: stage -> bytes that a microbatch moves there: from the start of its forward to the end of its backward.
    """
    now = most = 0
    for stage, kind, _ in row:
        now += nbytes.get(stage, 0) * (kind == "F")
        most = max(most, now)
        now -= nbytes.get(stage, 0) * (kind in ("B", "I"))
    return most
