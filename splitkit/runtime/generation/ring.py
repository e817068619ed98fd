"""Sends requests from each rank to the next one, and from the last one back to the first.

A message says its own sizes, for those of a request change with every token::

    header    kind, request, query, last, bytes of the note, whether values enter, bytes in all, the sizes of each
              tensor, the numbers
    payload   the note, and the tensors one after another, each from a multiple of 64 bytes on

Every message of the first rank but the last is answered, and at most ``window`` of them are unanswered. So a message
that was sent ``window`` messages ago has been received, and its memory can be given back.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

RUN, END = 0, 1
"""The kinds of messages: run a request's next tokens, and end."""
_FIXED = 7
_ALIGNMENT = 64


@dataclass(frozen=True)
class Message:
    """What crosses a border for one request.

    Attributes:
        kind: ``RUN`` or ``END``.
        request: the number of the request.
        query: the tokens of each of its sequences that are run.
        last: whether the next token is wanted; from the last rank, whether the request is done.
        note: what else there is to say, as JSON.
        values: tensors and numbers, as the `Border` says; none for ``END``.
        entering: tensors that cross the border once, with a new request; empty for all other messages.
    """

    kind: int
    request: int = -1
    query: int = 0
    last: bool = False
    note: bytes = b""
    values: tuple[Any, ...] = ()
    entering: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class BorderType:
    """What a value that crosses a border is in every message.

    Attributes:
        dtype: of a tensor.
        dims: the number of dimensions.
        order: the dimensions from the largest stride to the smallest, if that is not the usual order.
        scalar: the type of a number; ``None`` for a tensor.
    """

    dtype: torch.dtype = torch.long
    dims: int = 1
    order: tuple[int, ...] = ()
    scalar: type | None = None


@dataclass(frozen=True)
class RingBorder:
    """The types of what crosses a border.

    Attributes:
        values: in every message that runs a request.
        entering: tensors that come behind them, once for each request.
    """

    values: tuple[BorderType, ...]
    entering: tuple[BorderType, ...] = ()

    def of(self, enters: bool) -> tuple[BorderType, ...]:
        """Return the types of what one message has."""
        return (*self.values, *self.entering) if enters else self.values

    @property
    def length(self) -> int:
        """The numbers of a header."""
        return _FIXED + sum(1 if how.scalar is not None else how.dims for how in self.of(True))


class Ring:
    """The connections of this rank with the one before and the one after it."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        received: RingBorder,
        sent: RingBorder,
        window: int,
    ) -> None:
        self._group, self._device, self._window = group, device, window
        self._received, self._sent = received, sent
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._underway: deque[list[tuple[Any, torch.Tensor]]] = deque()
        self._header = torch.empty(received.length, dtype=torch.long, device=device)
        # a single rank is its own neighbour
        self._own: deque[Message] = deque()

    def send(self, message: Message) -> None:
        """Send a message to the next rank, without waiting for it to be received."""
        if self.size == 1:
            self._own.append(message)
            return
        pieces, sizes, numbers = [], list[int](), list[int]()
        if message.note:
            pieces.append(torch.frombuffer(bytearray(message.note), dtype=torch.uint8).to(self._device))
        crossing = (*message.values, *message.entering)
        for how, value in zip(self._sent.of(bool(message.entering)), crossing, strict=False):
            if how.scalar is not None:
                numbers.append(_as_int(value, how.scalar))
                continue
            sizes += value.shape
            laid = value.permute(how.order) if how.order else value
            pieces.append(laid.contiguous().reshape(-1).view(torch.uint8))
        total = sum(map(_aligned, map(len, pieces)))
        fixed = [message.kind, message.request, message.query, message.last, len(message.note)]
        fixed += [bool(message.entering), total]
        words = fixed + (sizes + numbers if crossing else [])
        header = torch.zeros(self._sent.length, dtype=torch.long)
        header[: len(words)] = torch.tensor(words)
        self._start([header.to(self._device), _joined(pieces, total)] if total else [header.to(self._device)])

    def receive(self) -> Message:
        """Wait for the next message of the rank before."""
        if self.size == 1:
            return self._own.popleft()
        before = (self.rank - 1) % self.size
        dist.recv(self._header, group=self._group, group_src=before)
        words = self._header.tolist()
        kind, request, query, last, noted, enters, total = words[:_FIXED]
        payload = torch.empty(total, dtype=torch.uint8, device=self._device)
        if total:
            dist.recv(payload, group=self._group, group_src=before)
        note = bytes(payload[:noted].tolist()) if noted else b""
        types = self._received.of(bool(enters)) if kind == RUN else ()
        values, count = _values(types, words[_FIXED:], payload, _aligned(noted)), len(self._received.values)
        return Message(kind, request, query, bool(last), note, values[:count], values[count:])

    def finish(self) -> None:
        """Wait until all messages have been received."""
        while self._underway:
            self._complete()

    def _start(self, tensors: Sequence[torch.Tensor]) -> None:
        after = (self.rank + 1) % self.size
        self._underway.append([(dist.isend(t, group=self._group, group_dst=after), t) for t in tensors])
        if len(self._underway) > self._window:
            self._complete()

    def _complete(self) -> None:
        for work, _ in self._underway.popleft():
            work.wait()


def _values(types: Sequence[BorderType], words: Sequence[int], payload: torch.Tensor, at: int) -> tuple[Any, ...]:
    """Return the values of a message, whose sizes and numbers are ``words``, and whose tensors begin ``at`` a byte."""
    found, tensors = list[Any](), sum(how.dims for how in types if how.scalar is None)
    numbers, sizes = iter(words[tensors:]), iter(words)
    for how in types:
        if how.scalar is not None:
            found.append(_from_int(next(numbers), how.scalar))
            continue
        shape = [next(sizes) for _ in range(how.dims)]
        laid = [shape[i] for i in how.order] if how.order else shape
        count = math.prod(shape) * how.dtype.itemsize
        value = payload[at : at + count].view(how.dtype).view(laid)
        at += _aligned(count)
        found.append(value.permute([how.order.index(i) for i in range(how.dims)]) if how.order else value)
    return tuple(found)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _joined(pieces: Sequence[torch.Tensor], total: int) -> torch.Tensor:
    if len(pieces) == 1 and len(pieces[0]) == total:
        return pieces[0]
    whole, at = pieces[0].new_empty(total), 0
    for piece in pieces:
        whole[at : at + len(piece)] = piece
        at += _aligned(len(piece))
    return whole


def _as_int(value: Any, kind: type) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0]) if kind is float else int(value)


def _from_int(value: int, kind: type) -> Any:
    return struct.unpack("<d", struct.pack("<q", value))[0] if kind is float else kind(value)
