"""Computes the memory of each rank of a simulated step: its peak by kind, and its course over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from splitkit.pipeline.order import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, windows_of
from splitkit.pipeline.schedules import schedule_of
from splitkit.pipeline.stage_costs import StageCosts, bytes_back
from splitkit.pipeline.trace import Floats, StepTrace
from splitkit.units import in_words, size

Ints = npt.NDArray[np.int64]

if TYPE_CHECKING:
    from torch.fx import Node

    from splitkit.graph.dataflow import Dataflow


@dataclass(frozen=True)
class ByteBreakdown:
    """The bytes that something holds at its peak, by kind.

    Attributes:
        weights: bytes of parameters and buffers.
        gradients: bytes of the gradients of parameters.
        optimizer: bytes of the optimizer's state.
        cache: bytes of keys and values of earlier tokens, which generation keeps.
        activations: bytes of everything else: what autograd saved, messages, and temporaries.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    cache: int = 0
    activations: int = 0

    @classmethod
    def of_stage(cls, stage: StageCosts, *, in_flight: int = 1, cache: int = 0) -> ByteBreakdown:
        """Return the bytes of a stage.

        Args:
            stage: its costs.
            in_flight: the microbatches whose saved values it holds.
            cache: the bytes of its cache, which `StageCosts` does not know.
        """
        activations = in_flight * stage.saved_bytes + stage.temporary_bytes
        return cls(stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes, cache, activations)

    @classmethod
    def of_rank(cls, rank: RankMemory) -> ByteBreakdown:
        """Return the bytes of a rank at the peak of a simulated step."""
        activations = rank.saved + rank.messages + rank.temporaries
        return cls(rank.parameters, rank.gradients, rank.optimizer, 0, activations)

    @classmethod
    def of_visits(cls, stages: Sequence[StageCosts], cache: int = 0) -> ByteBreakdown:
        """Return the bytes of a device that runs these stages and keeps a cache: all that they hold, and the most that
        one of them takes at a time.
        """
        each = [cls.of_stage(stage) for stage in stages]
        held = {kind: sum(dict(one.kinds)[kind] for one in each) for kind in ("weights", "gradients", "optimizer")}
        activations = sum(stage.saved_bytes for stage in stages)
        temporary = max((stage.temporary_bytes for stage in stages), default=0)
        return cls(**held, cache=cache, activations=activations + temporary)

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(nbytes for _, nbytes in self.kinds)

    @property
    def kinds(self) -> Sequence[tuple[str, int]]:
        """The name and the bytes of every kind, also of those that are 0."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]

    def to_dict(self) -> dict[str, int]:
        """Return the bytes as plain data, with the sum as ``total``."""
        return {**asdict(self), "total": self.total}

    @property
    def told(self) -> str:
        """Return the total and its kinds: ``13.50 GiB (12.00 GiB of weights and 1.50 GiB of activations)``."""
        return f"{size(self.total)} ({self})"

    def __str__(self) -> str:
        """Return ``12.00 GiB of weights and 1.50 GiB of activations``: the kinds that are not 0."""
        told = [f"{size(nbytes)} of {name}" for name, nbytes in self.kinds if nbytes]
        return in_words(told) or "nothing"


# Divides the bytes of a stage or a rank into weights, gradients, optimizer, cache and activations.


_SOONEST, _LATEST = -1, np.iinfo(np.int64).max


@dataclass(frozen=True)
class RankMemory:
    """The bytes of a rank at its peak.

    Attributes:
        parameters: bytes of the parameters and buffers of its stages.
        gradients: bytes of the gradients of the parameters.
        optimizer: the state of the optimizer.
        saved: bytes saved for backward by the microbatches in flight, and gradients that wait for the weight part.
        messages: bytes of messages that are on their way or not yet read.
        temporaries: additional bytes of the action that runs.
        seconds: the time of the peak.
    """

    parameters: int
    gradients: int
    optimizer: int
    saved: int
    messages: int
    temporaries: int
    seconds: float

    @property
    def peak(self) -> int:
        """The sum of all kinds."""
        return self.parameters + self.gradients + self.optimizer + self.saved + self.messages + self.temporaries

    def to_dict(self) -> dict[str, float]:
        """Return the bytes as plain data, with the sum as ``peak``."""
        return {"peak": self.peak, **asdict(self)}


@dataclass(frozen=True)
class Changes:
    """Allocations (positive) and frees (negative): rank, time, order, amount and column.

    Changes at the same time happen in the order of ``place``: twice the number of the action at its start, and one more
    at its end. The receive buffer of a message is allocated before any other change at its time. ``amount`` is bytes,
    or a number of things of equal bytes; ``column`` is what they are of: of all changes, or of each.
    """

    rank: Ints
    seconds: Floats
    place: Ints
    amount: Ints
    column: int | Ints


MESSAGES = 0
"""The column of messages."""
_SAVED, _TEMPORARIES = 1, 2  # the other columns


def rank_memory(run: StepTrace) -> tuple[RankMemory, ...]:
    """Return the memory of each rank at its peak, the first of equal ones."""
    fixed, static = _fixed(run), static_bytes(run)
    return tuple(_peak(fixed[r], static[r], live, seconds) for r, (live, seconds) in enumerate(_live(run)))


def memory_over_time(run: StepTrace) -> tuple[tuple[tuple[float, int], ...], ...]:
    """Return (seconds, bytes from then on) for each rank, from the start of the step.

    At each time the largest value comes first, so that the maximum is the peak of `rank_memory`.
    """
    found = []
    for fixed, static, (live, seconds) in zip(_fixed(run), static_bytes(run), _live(run), strict=True):
        held = sum(fixed) + static
        most: dict[float, int] = {0.0: held}
        after: dict[float, int] = {}
        for nbytes, time in zip(live.sum(axis=1).tolist(), seconds.tolist(), strict=True):
            most[time] = max(most.get(time, 0), held + nbytes)
            after[time] = held + nbytes
        points = [point for t, top in most.items() for point in ((t, top), (t, after.get(t, top)))]
        found.append(tuple(dict.fromkeys(points)))
    return tuple(found)


def _live(run: StepTrace) -> list[tuple[Ints, Floats]]:
    """Return, for each rank, (n, 3) bytes of messages, saved and temporary, and (n,) the times from which they hold."""
    return accumulated([*_of_actions(run), *message_changes(run)], 3, run.ranks)


def accumulated(changes: Iterable[Changes], columns: int, ranks: int) -> list[tuple[Ints, Floats]]:
    """Return, for each rank, (n, columns) sums of all changes so far, and (n,) the times from which they hold."""
    changes = [c for c in changes if c.amount.any()]
    if not changes:
        return [(np.zeros((0, columns), np.int64), np.zeros(0))] * ranks
    rank, seconds, place = (np.concatenate([getattr(c, n) for c in changes]) for n in ("rank", "seconds", "place"))
    amounts = np.zeros((len(rank), columns), np.int64)
    column = np.concatenate([np.broadcast_to(c.column, len(c.rank)) for c in changes])
    amounts[np.arange(len(rank)), column] = np.concatenate([c.amount for c in changes])
    order = np.lexsort((place, seconds, rank))
    rank, seconds, place = rank[order], seconds[order], place[order]
    live = amounts[order].cumsum(axis=0)  # each rank frees all that it allocates, so the next starts from 0
    last = np.ones(len(rank), bool)  # of changes at the same time and place, only the result counts
    last[:-1] = (np.diff(rank) != 0) | (np.diff(seconds) != 0) | (np.diff(place) != 0)
    found = np.flatnonzero(last)
    split = np.split(found, np.searchsorted(rank[found], np.arange(1, ranks)))
    return [(live[at], seconds[at]) for at in split]


def _peak(fixed: tuple[int, int, int], static: int, live: Ints, seconds: Floats) -> RankMemory:
    if not len(live):
        return RankMemory(*fixed, 0, static, 0, 0.0)
    at = int(live.sum(axis=1).argmax())
    messages, saved, temporaries = live[at].tolist()
    return RankMemory(*fixed, saved, messages + static, temporaries, float(seconds[at]))


def _fixed(run: StepTrace) -> list[tuple[int, int, int]]:
    """Return the bytes of parameters, gradients and optimizer state of each rank."""
    names = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    owned = [[s for s, r in zip(run.stages, run.order.rank_of, strict=True) if r == k] for k in range(run.ranks)]
    sums = [[sum(int(getattr(stage, name)) for stage in stages) for name in names] for stages in owned]
    return [(parameters, gradients, optimizer) for parameters, gradients, optimizer in sums]


def _of_actions(run: StepTrace) -> Iterator[Changes]:
    """Yield the changes of saved and temporary bytes."""
    rank, stage, kind, _ = run.order.columns
    saved, left, captured = np.array([units_of(run, s) for s in range(len(run.stages))]).T
    ends = [kind == BACKWARD, kind == BACKWARD_INPUT, kind == BACKWARD_WEIGHT]
    taken = np.select([kind == FORWARD, kind == BACKWARD_INPUT], [saved[stage], captured[stage]], 0)
    freed = np.select(ends, [saved[stage], (saved - left)[stage], (left + captured)[stage]], 0)
    temporary = np.array([s.temporary_bytes for s in run.stages])[stage]
    first, last = 2 * np.arange(len(rank)), 2 * np.arange(len(rank)) + 1
    yield Changes(rank, run.starts, first, taken, _SAVED)
    yield Changes(rank, run.ends, last, -freed, _SAVED)
    yield Changes(rank, run.starts, first, temporary, _TEMPORARIES)
    yield Changes(rank, run.ends, last, -temporary, _TEMPORARIES)
    yield from host_changes(run, _SAVED)


def host_changes(run: StepTrace, column: int) -> Iterator[Changes]:
    """Yield the saved bytes that leave the device for the host, and those that come back."""
    moved = {s: costs.copies.nbytes for s, costs in enumerate(run.stages) if costs.copies is not None}
    if not moved or run.goes_on is None:
        return
    found = [(stage, window) for (stage, _), window in windows_of(run.order).items() if stage in moved]
    nbytes = np.array([moved[stage] for stage, _ in found], np.int64)
    gone = np.array([window.released for _, window in found], np.int64)
    come = np.array([window.asked for _, window in found], np.int64)
    yield Changes(run.order.columns.rank[gone], run.goes_on[gone], 2 * gone + 1, -nbytes, column)
    yield Changes(run.order.columns.rank[come], run.starts[come], 2 * come, nbytes, column)


def units_of(run: StepTrace, stage: int) -> tuple[int, int, int]:
    """Return (saved, deferred, extra) bytes of a stage.

    ``saved`` are held from forward to the end of backward; ``deferred`` of these wait for the weight part; ``extra``
    are held in addition from the start of the input part to the end of the weight part.
    """
    costs = run.stages[stage]
    later = costs.saved_bytes if costs.deferred_bytes is None else costs.deferred_bytes
    # An input in a static buffer is counted by `static_bytes`.
    static = run.static_buffers and _remote(run, stage, stage - 1)
    apart = share(run.stages[stage - 1].activation_bytes, costs.replicas) if static else 0
    saved = max(0, costs.saved_bytes - apart)
    return saved, min(later, saved), max(0, later - costs.saved_bytes)


def message_changes(run: StepTrace) -> Iterator[Changes]:
    """Yield the changes of message buffers.

    A sent activation is among the saved bytes of its stage, and a received one is from the start of its reader on. The
    sender holds a gradient until it is sent, and the reader until its action ends. Each replica has its share. With
    static buffers, torch before 2.15 runs the step, which keeps more of what was sent (`keeps_sent`).
    """
    rank, stage, kind, _ = run.order.columns
    data, number = run.order.links.data, np.arange(len(rank))
    on = np.array([s.activation_bytes for s in run.stages])
    back = np.array([bytes_back(run.stages, s) for s in range(len(run.stages))])
    replicas = np.array([s.replicas for s in run.stages])[stage]
    forward, remote = kind == FORWARD, rank != rank[data]
    begin, end = 2 * number, 2 * number + 1  # places
    if not run.static_buffers:
        for way, nbytes, stop, last in ((forward, on, run.starts, begin), (~forward, back, run.ends, end)):
            read = number[(data >= 0) & remote & way]
            each = -(-nbytes[stage[data[read]]] // replicas[read])
            soonest = np.full(len(read), _SOONEST)
            yield from _held(rank[read], each, run.departures[data[read]], stop[read], soonest, last[read])
    read = number[(data >= 0) & ~remote & ~forward]
    made = data[read]
    own = -(-back[stage[made]] // replicas[read])
    yield from _held(rank[read], own, run.ends[made], run.ends[read], end[made], end[read])
    sent, last = data[(data >= 0) & remote & ~forward], np.full(len(number), _LATEST)
    stop = np.full(len(number), run.ends.max()) if keeps_sent(run) else run.arrivals.copy()
    if run.static_buffers and not keeps_sent(run):
        # torch's class for 1F1B drops a gradient that was sent when it has the next one
        after = np.flatnonzero(~forward)
        made, following = np.stack([after[:-1], after[1:]])[:, rank[after[1:]] == rank[after[:-1]]]
        in_time = stop[made] <= run.ends[following]
        stop[made[in_time]], last[made[in_time]] = run.ends[following[in_time]], end[following[in_time]]
    sent = sent[stop[sent] > run.ends[sent]]
    own = -(-back[stage[sent]] // replicas[sent])
    yield from _held(rank[sent], own, run.ends[sent], stop[sent], end[sent], last[sent])
    if run.static_buffers:
        sent = data[(data >= 0) & remote & forward]
        yield from _kept(run, sent if keeps_sent(run) else sent[_last_of_warm_up(run)[sent]])


def _last_of_warm_up(run: StepTrace) -> npt.NDArray[np.bool_]:
    """Return which forwards are the last but one before the first backward of their rank.

    Torch's class for 1F1B keeps what they sent: it waits for the message only when it sends another by itself.
    """
    rank, _, kind, _ = run.order.columns
    first = {of: i for i, of in reversed([*enumerate(rank.tolist())]) if kind[i] != FORWARD}
    found = np.zeros(len(rank), np.bool_)
    found[[i - 2 for of, i in first.items() if i >= 2 and rank[i - 2] == of]] = True
    return found


def _kept(run: StepTrace, sent: Ints) -> Iterator[Changes]:
    """Yield sent activations, from the end of their stage's backward to the end of the step."""
    rank, stage, kind, microbatch = run.order.columns
    done = np.zeros((len(run.stages), run.order.microbatches), np.int64)
    ends = np.flatnonzero((kind == BACKWARD) | (kind == BACKWARD_WEIGHT))
    done[stage[ends], microbatch[ends]] = ends
    last = done[stage[sent], microbatch[sent]]
    on = np.array([share(costs.activation_bytes, costs.replicas) for costs in run.stages])
    over = np.full(len(sent), run.ends.max())
    yield from _held(rank[sent], on[stage[sent]], run.ends[last], over, 2 * last + 1, np.full(len(sent), _LATEST))


def keeps_sent(run: StepTrace) -> bool:
    """Whether activations and gradients that were sent are held to the end of the step.

    Torch's class for 1F1B frees them, nearly as soon as they have arrived. Its class for GPipe, and its interpreter,
    which runs all else, did not before 2.15.
    """
    schedule = schedule_of(run.order)
    own = schedule.torch_class if schedule is not None and schedule.is_single else ""
    return run.static_buffers and own in ("", "ScheduleGPipe")


def _held(rank: Ints, nbytes: Ints, start: Floats, stop: Floats, first: Ints, last: Ints) -> Iterator[Changes]:
    """Yield the allocation and the free of message buffers."""
    yield Changes(rank, start, first, nbytes, MESSAGES)
    yield Changes(rank, stop, last, -nbytes, MESSAGES)


def static_bytes(run: StepTrace) -> Sequence[int]:
    """Return the bytes of the receive buffers that each rank holds throughout the step."""
    held = [0] * run.ranks
    if run.static_buffers:
        for stage, rank in enumerate(run.order.rank_of):
            replicas = run.stages[stage].replicas
            if _remote(run, stage, stage - 1):
                held[rank] += run.order.microbatches * share(run.stages[stage - 1].activation_bytes, replicas)
            if _remote(run, stage, stage + 1):
                held[rank] += run.order.microbatches * share(bytes_back(run.stages, stage + 1), replicas)
    return held


def _remote(run: StepTrace, stage: int, other: int) -> bool:
    """Whether the other stage exists, on another rank."""
    of = run.order.rank_of
    return 0 <= other < len(of) and of[stage] != of[other]


# Prices replicated stages (data parallel): the work and memory of each replica, and the all-reduce of gradients.
#
# Each of d replicas has all parameters of the stage, with their gradients and the optimizer's state, and runs 1/d of
# every microbatch: so PipeDream (Narayanan et al., SOSP 2019, section 3.1), DAPPLE (Fan et al., PPoPP 2021) and Piper
# (Tarnawski et al., NeurIPS 2021) price a replicated stage. Once a step, a ring adds up the gradients (Patarasuk &
# Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): 2 (d - 1) rounds, in each of
# which every device sends 1/d of them.


def share(nbytes: int, replicas: int) -> int:
    """Return the bytes of each replica's share, rounded up."""
    return -(-nbytes // replicas)


def ring_rounds(replicas: int) -> int:
    """Return the number of messages that each replica sends in a ring all-reduce."""
    return 2 * (replicas - 1)


def replica_of(whole: StageCosts, replicas: int, gradients: int = 0) -> StageCosts:
    """Return the costs of one replica of a stage for its share of a microbatch.

    Times and activations are divided evenly, as if all of them scaled with the batch; a mask without a batch dimension
    and autocast's copy of a weight do not. Each replica has all parameters, gradients and optimizer state. Messages
    stay those of all replicas together.

    Args:
        whole: the costs of the stage on one device.
        replicas: the number of replicas.
        gradients: upper bound on the bytes of parameter gradients among the temporaries, which replication does not
            divide.
    """
    if replicas == 1:
        return whole
    return replace(
        whole,
        forward=whole.forward / replicas,
        backward_input=whole.backward_input / replicas,
        backward_weight=whole.backward_weight / replicas,
        saved_bytes=share(whole.saved_bytes, replicas),
        deferred_bytes=None if whole.deferred_bytes is None else share(whole.deferred_bytes, replicas),
        temporary_bytes=min(whole.temporary_bytes, share(whole.temporary_bytes + (replicas - 1) * gradients, replicas)),
        replicas=replicas,
    )


def trained_bytes(flow: Dataflow, node: Node) -> int:
    """Return the bytes of the parameters that a node reads and that require grad."""
    from splitkit.graph.node_values import tensor_bytes
    from splitkit.graph.storages import start_of

    return sum({start_of(t): tensor_bytes(t) for t in flow.owned(node) if t.requires_grad}.values())


def undivided(trained: Sequence[int], gradients: int) -> int:
    """Return an upper bound on the bytes of parameter gradients among the temporaries of a stage.

    They are the gradients of one node, and those to which several nodes add: these stay alive, and exist twice during
    each addition. A gradient that no node is known to read, such as that of a view of a cache, may belong to one node.

    Args:
        trained: node -> `trained_bytes`.
        gradients: bytes of the gradients of the stage, each counted once.
    """
    twice = sum(trained) - gradients
    return max(trained, default=0) + max(2 * twice, -twice)


# How many tokens of cache fit beside what the stages of a pipeline hold for inference.


UNLIMITED = 2**53
"""The tokens of a stage that keeps no cache."""


def cache_room(stages: Sequence[StageCosts], cache: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Return the tokens for which each stage has room beside its weights and activations.

    The pipeline has room for the least of them. A stage that does not fit at all has room for less than 0 tokens.

    Args:
        stages: their costs for inference (``optimizer=None``).
        cache: bytes of cache per token of each stage.
        limits: the memory of each stage in bytes.
    """
    found = []
    for stage, per_token, limit in zip(stages, cache, limits, strict=True):
        spare = limit - ByteBreakdown.of_stage(stage).total
        found.append(-1 if spare < 0 else spare // per_token if per_token else UNLIMITED)
    return found
