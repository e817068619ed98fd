"""Defines an order of actions and messages on each rank, and finds deadlocks between its messages.

The execution model (`splitkit.pipeline.simulate` gives it times):

* A rank computes its actions one after another. An action waits for the message that it reads, and for no other one: a
  receive that is posted early does not stop the computation.
* A message is ready at one of its ends when the actions before that end in the rank's row are over, and the messages
  before it on the same communicator have arrived. So a receive that is posted early does hold up what the rank sends or
  receives later on that communicator.
* Rendezvous: a message leaves when both of its ends are ready, and occupies both communicators until it arrives.

This is how torch's ``_PipelineScheduleRuntime`` behaves over NCCL: ``isend`` and ``irecv`` are put on the stream of a
communicator, which first waits for the computation issued so far; the action that reads a message waits for it alone.
``communicators="rank"`` puts all messages of a rank on one communicator, as ``batch_isend_irecv`` does (torch 2.11, and
every ``isend`` of a process group that is bound to a device). ``"pair"`` has a communicator for each pair of ranks,
shared by both directions, as ``isend`` and ``irecv`` of an unbound group have (torch 2.13, pytorch#175712).

Over gloo a message waits for no other one. Each model has all the waits of those before it in the list gloo, pair,
rank.

An order deadlocks in a model if and only if the waits form a cycle: of the entries that never run, each waits for
another one of them, and these are finitely many. So an order that has no deadlock in one model has none in those before
it in the list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from splitkit.checks import shown
from splitkit.errors import ScheduleError
from splitkit.pipeline.order import ACTION, FORWARD, OTHER_CELL, PipelineOrder, action_of
from splitkit.solvers.topological import in_turn

Communicators = Literal["rank", "pair"]

_MESSAGE = re.compile(r"(\d{1,9})(SEND|RECV|WAIT_SEND)_([FB])(\d{1,9})", re.ASCII)
_REMEDY = "Leave all messages out, or let splitkit.order_messages place them."


class RowEntry(NamedTuple):
    """An entry of a row.

    Attributes:
        what: COMPUTE, SEND, RECV, or WAIT_SEND (torch 2.15: the rank computes on when the message has arrived).
        action: the number in ``order.columns`` of the action that is computed, or that computed the message.
        text: the entry as torch writes it.
    """

    what: str
    action: int
    text: str


class Waits(NamedTuple):
    """What the actions and messages of an order wait for.

    Node i is action i of ``order.columns``, and node actions + i the message with its result. The nodes after these are
    the entries ``WAIT_SEND``, row after row.

    Attributes:
        before: node -> the nodes that must be over before it starts.
        sequence: the actions and messages that exist, in a topological order.
    """

    before: list[list[int]]
    sequence: list[int]


@dataclass(frozen=True, eq=False)
class MessageOrder(PipelineOrder):
    """The actions of each rank with its messages in order: torch's schedule CSV in the format ``compute_comms``.

    Attributes:
        cells: the row of each rank in torch's notation: ``0F0``, ``0SEND_F0``, ``1RECV_F0``, ``0SEND_B1``. Entries such
            as ``0UNSHARD`` and ``0REDUCE_GRAD`` are kept, and take no part in the exchange.
        communicators: which messages wait for one another: all of a rank, or those of a pair of ranks.

    Raises:
        ScheduleError: SK331 if a message is missing, is there twice, leaves before it is computed or arrives after it
            is read, or if messages deadlock with these communicators; names the ring of waits. SK330 for another kind
            of communicators.
    """

    cells: tuple[tuple[str, ...], ...] = ()
    communicators: Communicators = "rank"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.communicators not in get_args(Communicators):
            raise ScheduleError("SK330", f"communicators={shown(self.communicators)}", 'Use "rank" or "pair".')
        waits(self)

    @cached_property
    def readers(self) -> dict[int, int]:
        """The action that computes a message to another rank -> the action that reads it."""
        return readers(self)

    @cached_property
    def entries(self) -> tuple[tuple[RowEntry, ...], ...]:
        """The actions and messages of each rank, checked."""
        if len(self.cells) != len(self.ranks):
            text = f"{self.name} has {len(self.ranks)} ranks and {len(self.cells)} rows with messages"
            raise ScheduleError("SK331", text, "Give a row for each rank.")
        numbers = {str(action): i for i, action in enumerate(a for row in self.ranks for a in row)}
        ends = {cell: maker for maker in self.readers for cell in ends_of(self, maker)}
        found = tuple(tuple(_parsed(self, rank, numbers, ends)) for rank in range(len(self.ranks)))
        for rank, row in enumerate(found):
            _require_complete(self, rank, row)
        return found


def readers(order: PipelineOrder) -> dict[int, int]:
    """Return maker -> reader of each message to another rank, as numbers of actions."""
    rank = order.columns.rank.tolist()
    pairs = ((maker, reader) for reader, maker in enumerate(order.links.data.tolist()))
    return {maker: reader for maker, reader in pairs if maker >= 0 and rank[maker] != rank[reader]}


def ends_of(order: PipelineOrder, maker: int) -> tuple[str, str]:
    """Return both ends of the message that an action computes as torch writes them: its SEND and its RECV."""
    stage, kind, microbatch = (int(column[maker]) for column in order.columns[1:])
    letter, step = ("F", 1) if kind == FORWARD else ("B", -1)
    return f"{stage}SEND_{letter}{microbatch}", f"{stage + step}RECV_{letter}{microbatch}"


def is_message(cell: str) -> bool:
    """Whether an entry of torch's CSV sends a message, receives it, or waits until it was sent."""
    return _MESSAGE.fullmatch(cell) is not None


def waits(order: MessageOrder) -> Waits:
    """Return what each action and message waits for with the communicators of the order.

    Raises:
        ScheduleError: SK331 if they deadlock; names a ring of waits: the ranks, entries and peers.
    """
    before = _before(order)
    there = {node for node, needs in enumerate(before) if needs or node < len(order.columns.rank)}
    sequence = [node for node in in_turn(before, lambda _, taken: taken) if node in there]
    if len(sequence) < len(there):
        raise _deadlock(order, before, there.difference(sequence))
    return Waits(before, sequence)


def _parsed(order: MessageOrder, rank: int, numbers: dict[str, int], ends: dict[str, int]) -> Iterator[RowEntry]:
    """Yield the entries of a rank that compute or communicate."""
    for column, cell in enumerate(order.cells[rank], 1):
        here = f"row {rank + 1}, column {column}: {cell!r:.80}"
        if ACTION.fullmatch(cell):
            text = str(action_of(cell))
            yield RowEntry("COMPUTE", numbers.get(text, -1), text)
        elif found := _MESSAGE.fullmatch(cell):
            what, end = found[2], f"{int(found[1])}{found[2].removeprefix('WAIT_')}_{found[3]}{int(found[4])}"
            if end not in ends:
                reason = f"{here} is not a message between two ranks of {order.name}"
                raise ScheduleError("SK331", reason, "Leave it out: stages on one rank pass on values by themselves.")
            place = order.columns.rank[order.readers[ends[end]] if what == "RECV" else ends[end]]
            if place != rank:
                raise ScheduleError("SK331", f"{here} belongs to rank {place}", f"Move it to row {place + 1}.")
            yield RowEntry(what, ends[end], cell)
        elif not OTHER_CELL.fullmatch(cell) or "SEND" in cell or "RECV" in cell:
            raise ScheduleError("SK331", f"{here} is not an action", "Write it as torch does: 3F0, 3SEND_F0, 4RECV_F0.")


def _require_complete(order: MessageOrder, rank: int, row: Sequence[RowEntry]) -> None:
    """Refuse a row that lacks actions or messages, has them twice, sends too early, or receives too late."""
    actions = tuple(entry.text for entry in row if entry.what == "COMPUTE")
    if actions != tuple(map(str, order.ranks[rank])):
        text = f"row {rank + 1} with messages has other actions than rank {rank}, or has them in another order"
        raise ScheduleError("SK331", text, _REMEDY)
    seen = set[tuple[str, int]]()
    for what, action, text in row:
        if (what, action) in seen:
            raise ScheduleError("SK331", f"rank {rank} has {text} twice", _REMEDY)
        seen.add((what, action))
        first = {"SEND": "COMPUTE", "WAIT_SEND": "SEND"}.get(what)
        if first and (first, action) not in seen:
            reason = "is computed" if first == "COMPUTE" else "is sent"
            raise ScheduleError("SK331", f"rank {rank} has {text} before the message {reason}", _REMEDY)
        maker = int(order.links.data[action]) if what == "COMPUTE" else -1
        if maker in order.readers and ("RECV", maker) not in seen:
            text = f"rank {rank} computes {text} without {ends_of(order, maker)[1]} before it"
            raise ScheduleError("SK331", text, _REMEDY)
    for maker in order.readers:
        if order.columns.rank[maker] == rank and ("SEND", maker) not in seen:
            raise ScheduleError("SK331", f"rank {rank} never sends: {ends_of(order, maker)[0]} is missing", _REMEDY)


def _before(order: MessageOrder) -> list[list[int]]:
    """Return node -> the nodes for which it waits, as in `Waits`."""
    rank, data = order.columns.rank.tolist(), order.links.data.tolist()
    count = len(rank)
    before: list[list[int]] = [[] for _ in range(2 * count)]
    for row in order.entries:
        computed = -1
        queued = dict[int, int]()
        for what, action, _ in row:
            if what in ("SEND", "RECV"):
                node = count + action
                peer = rank[order.readers[action] if what == "SEND" else action]
                queue = peer if order.communicators == "pair" else 0
                before[node] += [need for need in (computed, queued.get(queue, -1)) if need >= 0]
                queued[queue] = node
            else:
                node, need = action, data[action] if data[action] in order.readers else -1
                if what == "WAIT_SEND":
                    node, need = len(before), action
                    before.append([])
                before[node] += [need for need in (computed, count + need if need >= 0 else -1) if need >= 0]
                computed = node
    return before


def _deadlock(order: MessageOrder, before: Sequence[Sequence[int]], stuck: set[int]) -> ScheduleError:
    """Return an error that says which entries wait for one another in a ring."""
    path = [min(stuck)]
    while (need := next(n for n in before[path[-1]] if n in stuck)) not in path:
        path.append(need)
    ring = path[path.index(need) :]
    lines = [_wait(order, node, need) for node, need in zip(ring, [*ring[1:], ring[0]], strict=True)]
    text = f"{order.name} never ends, since its messages wait for one another: {'; '.join(lines)}"
    return ScheduleError("SK331", text, _REMEDY)


def _wait(order: MessageOrder, node: int, need: int) -> str:
    """Say on which rank a node waits for another one."""
    rank, count = order.columns.rank.tolist(), len(order.columns.rank)
    waiting = 2 * count
    for place, row in enumerate(order.entries):
        at: dict[int, str] = {}
        for what, action, text in row:
            if what in ("SEND", "RECV"):
                peer = rank[order.readers[action] if what == "SEND" else action]
                at[count + action] = f"{text} {'to' if what == 'SEND' else 'from'} rank {peer}"
            else:
                at[action if what == "COMPUTE" else waiting] = text
                waiting += what == "WAIT_SEND"
        places = list(at)
        if node in at and need in at and places.index(need) < places.index(node):
            return f"on rank {place}, {at[node]} waits for {at[need]} before it"
    raise AssertionError("nodes wait for what is before them on a rank")
