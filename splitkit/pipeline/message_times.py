"""Gives times to the actions and messages of a step whose messages are in a given order."""

from __future__ import annotations

from collections.abc import Sequence

from splitkit.pipeline.message_order import MessageOrder, waits


def times_of_messages(
    order: MessageOrder,
    durations: Sequence[float],
    travel: Sequence[float],
    blocking: bool = False,
) -> tuple[list[float], ...]:
    """Return start and end of every action, and when its message leaves and arrives (its end, if it sends none).

    The execution model is that of `splitkit.pipeline.message_order`: the longest path over its waits. Takes time linear
    in the number of actions.

    Args:
        order: the order of actions and messages.
        durations: seconds of each action of ``order.columns``.
        travel: seconds of the message that each action computes.
        blocking: whether each entry of a row waits for the entry before it.

    Raises:
        ScheduleError: SK331 if messages deadlock in the blocking model.
    """
    found, count = waits(order, blocking), len(durations)
    takes = [*durations, *travel, *[0.0] * (len(found.before) - 2 * count)]
    starts, ends = [0.0] * len(takes), [0.0] * len(takes)
    for node in found.sequence:
        start = max((ends[need] for need in found.before[node]), default=0.0)
        starts[node], ends[node] = start, start + takes[node]
    sent = [count + action if action in order.readers else action for action in range(count)]
    leaves = [starts[node] if node >= count else ends[node] for node in sent]
    return starts[:count], ends[:count], leaves, [ends[node] for node in sent]
