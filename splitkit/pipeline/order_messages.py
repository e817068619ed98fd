"""Orders the messages of a pipeline step on each rank for the shortest simulated step, without deadlocks.

The order of the actions is given. Which message goes first on a communicator is a job shop: a message is an operation
that holds the communicators of both of its ranks (`solve_sequence`), between the action that computes it
and the action that reads it. From the best schedule found, the rows are read off:

    All actions and messages are put into one sequence, an action by its end and a message by its start, but none before
    what it waits for. Each rank's row is this sequence without what other ranks do.

These rows cannot deadlock, in any model of `splitkit.pipeline.message_order`, whatever the times are. For suppose that
entries never run, and take the first of them in the sequence. All that it waits for is before it in the sequence: the
entries before it in the row of its rank, or of both ranks if it is a message, since each row is a part of the sequence;
and the message that it reads. So all of this runs, and then it runs too: a contradiction.

Conversely, all rows without a deadlock can be had in this way: their waits form no cycle, so some sequence agrees with
them. And the rows take no longer than the schedule from which they were read: an entry waits on its rank only for
actions that end, and for messages that arrive, before it starts in the schedule. A receive is therefore posted as late
as costs nothing, right before the action during which its message leaves: until then it would occupy a communicator
(and over NCCL, processors of the GPU, pytorch#172668) to no end.

The bound holds for all orders of messages with these actions: the longest path without any waits between messages, and
on each communicator the preemptive schedule of its messages between the longest paths to and from them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from splitkit.errors import ScheduleError
from splitkit.pipeline.message_order import Communicators, MessageOrder, ends_of, is_message, readers
from splitkit.pipeline.order import ACTION, PipelineOrder
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.simulate import PricedStep, price_actions, simulate_schedule
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.trace import LinkTimes
from splitkit.short_repr import brief
from splitkit.solvers.solve_sequence import SequencingProblem, sequenced
from splitkit.solvers.topological import in_turn
from splitkit.units import duration


@dataclass(frozen=True, eq=False)
class OrderedMessages:
    """An order of messages, its simulated step, and what is proven of it.

    Attributes:
        order: the actions and messages of each rank; `splitkit.pipeline.synthesize.save_order` writes them as torch's
            CSV, and `splitkit.runtime.pipeline` runs them.
        run: the simulated step.
        bound: no order of the messages has a shorter step, in the same units.
    """

    order: MessageOrder
    run: ScheduleRun
    bound: float

    __repr__ = brief

    @property
    def seconds(self) -> float:
        """The simulated step."""
        return self.run.seconds

    @property
    def gap(self) -> float:
        """The fraction by which the step may exceed the best order's; 0 if it is proven to be the best."""
        return self.seconds / self.bound - 1 if self.bound else 0.0

    def __str__(self) -> str:
        proof = "no order has a shorter one" if not self.gap else f"at most {self.gap:.1%} above the best order"
        step = f"step {duration(self.seconds, self.run.unit)}, {proof}"
        return f"{self.order.name} on {self.run.ranks} ranks, {len(self.order.readers)} messages in order: {step}"


def order_messages(
    stages: Sequence[StageCosts],
    schedule: str | PipelineOrder = "1f1b",
    microbatches: int | None = None,
    *,
    ranks: int | None = None,
    links: str | LinkTimes | None = None,
    devices: Sequence[Hashable] | None = None,
    communicators: Communicators = "rank",
) -> OrderedMessages:
    """Order the sends and receives of a schedule for the shortest simulated step; the order cannot deadlock.

    ::

        found = splitkit.order_messages(stages, "interleaved-1f1b", 8, ranks=4, links="nvlink4")
        print(found)
        splitkit.pipeline.synthesize.save_order(found.order, "order.csv")

    torch places a receive where its sender is scheduled (``_add_send_recv``), where it may block messages that are
    ready (pytorch#172668, #188833). This module and `splitkit.pipeline.message_order` explain what the order of
    messages can change, and prove that the rows cannot deadlock. The order is optimal if there are few messages.

    Args:
        stages: the stages, in the order of the model.
        schedule: the name of a schedule, or an order of your own; the messages of a `MessageOrder` are ordered anew.
        microbatches: as in `splitkit.simulate_schedule`, like the arguments that follow.
        ranks: how many ranks share the stages.
        links: how long messages take.
        devices: the names of the ranks in ``links``.
        communicators: ``"rank"``: all messages of a rank wait for one another; ``"pair"``: those of a pair of ranks.

    Raises:
        ScheduleError: SK330, SK331 as `splitkit.simulate_schedule`; SK330 also for a rank without a stage.
        CostError: SK322 as `splitkit.simulate_schedule`.
    """
    step = price_actions(stages, schedule, microbatches, ranks=ranks, links=links, devices=devices)
    if idle := [rank for rank, actions in enumerate(step.order.ranks) if not actions]:  # which torch does not run
        raise ScheduleError("SK330", f"rank {idle[0]} of {step.order.name} has no stage", "Put a stage there.")
    problem, makers = _problem(step, communicators)
    found = sequenced(problem)
    rows = _rows(step.order, problem, makers, found.starts)
    order = MessageOrder(step.order.name, step.order.ranks, rows, communicators)
    run = simulate_schedule(stages, order, links=links, devices=devices)
    return OrderedMessages(order, run, min(found.bound, run.seconds))


def _problem(step: PricedStep, communicators: Communicators) -> tuple[SequencingProblem, list[int]]:
    """Return the job shop of a step, actions first and messages after them, and the action that makes each message."""
    order, count = step.order, len(step.durations)
    read = readers(order)
    makers, rank, data = list(read), order.columns.rank.tolist(), order.links.data.tolist()
    number = {maker: count + i for i, maker in enumerate(makers)}
    before = [[i - 1] * (i > 0 and rank[i - 1] == rank[i]) for i in range(count)]
    for reader, maker in enumerate(data):
        if maker in number:
            before[reader].append(number[maker])
    machines: list[tuple[int, ...]] = [()] * count
    for maker in makers:
        first, second = sorted((rank[maker], rank[read[maker]]))
        machines.append((first, second) if communicators == "rank" else (first * len(order.ranks) + second,))
        before.append([maker])
    syncs = step.syncs or [0.0] * len(order.ranks)
    after = [*(syncs[r] for r in rank), *[0.0] * len(makers)]
    travel = [step.travel[maker] for maker in makers]
    return SequencingProblem([*step.durations, *travel], before, machines, after), makers


def _rows(
    order: PipelineOrder, problem: SequencingProblem, makers: Sequence[int], starts: Sequence[float]
) -> tuple[tuple[str, ...], ...]:
    """Return the rows of all ranks: of actions, messages, and the other cells that torch or the order has."""
    rank, count, read = order.columns.rank.tolist(), len(order.columns.rank), readers(order)
    texts = [str(action) for row in order.ranks for action in row]
    messages: list[dict[str, list[str]]] = [{} for _ in order.ranks]  # rank -> action before them -> messages
    last = [""] * len(order.ranks)
    for node in _sequence(problem, starts, count):
        if node < count:
            last[rank[node]] = texts[node]
            continue
        maker = makers[node - count]
        for place, cell in zip((rank[maker], rank[read[maker]]), ends_of(order, maker), strict=True):
            messages[place].setdefault(last[place], []).append(cell)
    return tuple(tuple(_with(row, own)) for row, own in zip(_cells(order), messages, strict=True))


def _sequence(problem: SequencingProblem, starts: Sequence[float], count: int) -> Iterator[int]:
    """Return all operations, ``count`` actions by their ends and messages by their starts, none before its needs."""
    ends = [start + duration for start, duration in zip(starts, problem.durations, strict=True)]
    # of messages that start at one time on a communicator, those that take no time are first
    keys = [(ends[i] if i < count else start, ends[i]) for i, start in enumerate(starts)]
    return in_turn(problem.before, lambda node, _: keys[node])


def _cells(order: PipelineOrder) -> tuple[tuple[str, ...], ...]:
    """Return the row of each rank without messages."""
    from splitkit.pipeline.torch_orders import torch_cells

    rows = order.cells if isinstance(order, MessageOrder) else torch_cells(order)
    return tuple(tuple(cell for cell in row if not is_message(cell)) for row in rows)


def _with(row: Sequence[str], messages: dict[str, list[str]]) -> Iterator[str]:
    """Insert messages into a row, each directly after the action before it; the first ones before the first action."""
    first = messages.get("", [])
    for cell in row:
        if first and ACTION.fullmatch(cell):
            yield from first
            first = []
        yield cell
        yield from messages.get(cell, ())
