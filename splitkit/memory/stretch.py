"""The memory of any stretch of a line of nodes, to be asked often: by numpy, in time linear in the stretch.

A *line* is all placeable nodes in one topological order; a part of consecutive nodes is a stretch of it. What a stretch
holds depends on where it begins and ends only through the first and the last of its nodes that touch a storage::

    position     0       1      2       3     4        stretch [1, 4)
    node         linear  relu   linear  add   relu     taken: A   given: D   saved: B (by relu and linear)
    value        A       B      C       D     E        C dies after 3; the gradient of D is there from the start
    reads        x       A      B       A, C  D        the gradient of A grows from 3 down to 1, and is sent

Forward goes up, and holds what is taken throughout, what is saved or given from where it is first touched, all else
until it was last read. Backward goes down, gives up what is saved after the first node that saved it, and holds the
gradient of a value from its last reader in the stretch down to its maker, beside the gradients that it was given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from splitkit.memory.touches import BEFORE, Bools, Ints, Touches


@dataclass(frozen=True)
class Stretch:
    """The bytes of a part.

    Attributes:
        parameters: bytes of the parameters and buffers that it reads, each once.
        gradients: bytes of the gradients of those that require grad.
        saved: held from forward to the end of backward: taken, given, or saved by autograd. 0 without training.
        temporary: held besides, at most. Without training: all activations, at most.
    """

    parameters: int
    gradients: int
    saved: int
    temporary: int


@dataclass(frozen=True)
class Line:
    """What nodes in a row touch, by position. Items of each kind go by number.

    Attributes:
        length: how many nodes.
        training: whether there is a backward.
        storages: what each node reads, makes or saves, and the bytes of each.
        storage_bytes: how large each storage is.
        saves: what autograd saves; of a run without it, what stays to the end of the part (weights cast by autocast).
        reads: the values that each node reads.
        made: where each value is made; -1 for an input of the graph.
        last: where each value is last read; the length of the line if the graph yields it.
        lies: (value, storage) pairs, by value.
        value_bytes: of each, as a message; 0 for an input of the graph, which is there for every part.
        copied_from: the position of the first node such that a part which has it and gives the value sends a copy, as
            its elements do not lie side by side; -1 for a value that is sent as it lies.
        gradient_of: the gradient that is the value's own, -1 for none. A view has that of what it views.
        gradient_reads: the gradients to which each node's backward adds.
        gradient_bytes: how large each gradient is.
        gradient_made: where what it is a gradient of is made; -1 for inputs and parameters.
        is_parameter: gradients that are of a parameter.
        parameters: what each node reads of parameters and buffers.
        parameter_bytes: how large each parameter is; and each of those that require grad.
        forward: bytes that each node takes for a while in forward.
        backward: the same in its backward.
    """

    length: int
    training: bool
    storages: Touches
    storage_bytes: Ints
    saves: Touches
    reads: Touches
    made: Ints
    last: Ints
    lies: tuple[Ints, Ints]
    value_bytes: Ints
    copied_from: Ints
    gradient_of: Ints
    gradient_reads: Touches
    gradient_bytes: Ints
    gradient_made: Ints
    is_parameter: Bools
    parameters: Touches
    parameter_bytes: Ints
    trained_bytes: Ints
    forward: Ints
    backward: Ints

    def stretch(self, start: int, end: int) -> Stretch:
        """The bytes of the part of the nodes from ``start`` to before ``end``."""
        parameters, trained = self.fixed(start, end)
        taken, given = self._taken(start, end), self._given(start, end)
        copied = given[self.copied_from[given] >= start] if end < self.length else given[:0]
        kept = given if not len(copied) else np.setdiff1d(given, copied)
        comes = self._lie_in(taken)
        crosses = comes | self._lie_in(kept)
        apart = self._apart(taken) + int(self.value_bytes[copied].sum())
        lasting = self._bytes_of(crosses) + apart
        first = self._first_saved(start, end, crosses)
        held = crosses.copy()
        held[self.saves.item[self.saves.within(start, end)]] = True
        forward = self._bytes_of(comes) + self._forward(start, end, comes, held) + apart
        if not self.training:
            return Stretch(parameters, 0, 0, forward)
        saved = lasting + int(first.sum())
        backward = lasting + self._backward(start, end, first, given)
        return Stretch(parameters, trained, saved, max(0, forward - saved, backward - saved))

    def _apart(self, taken: Ints) -> int:
        """What values that come from other stages take beyond the storages that they lie in: each is its own there."""
        counts = self._lie_counts[taken]
        one, come = counts == 1, self.value_bytes[taken]
        at = self.lies[1][self._lie_starts[taken[one]]]
        storages = np.flatnonzero(_marked(at, len(self.storage_bytes)))
        sums = np.bincount(np.searchsorted(storages, at), come[one], len(storages)).astype(np.int64)
        inputs = self._lie_in(taken[self.made[taken] == BEFORE])[storages]  # are there, too
        room = np.where(inputs, 0, self.storage_bytes[storages])
        return int(np.maximum(0, sums - room).sum()) + int(come[counts == 0].sum())

    def fixed(self, start: int, end: int) -> tuple[int, int]:
        """Bytes of the parameters and buffers of a stretch, and of those that require grad."""
        pairs = self.parameters.within(start, end)
        items = self.parameters.item[pairs][self.parameters.before[pairs] < start]
        return int(self.parameter_bytes[items].sum()), int(self.trained_bytes[items].sum())

    def least(self, start: int, end: int) -> Stretch:
        """What every part holds at least that has these nodes in a row: nothing taken or given.

        Unlike `stretch` it never falls as the stretch grows: the longer, the more there is at each of its nodes.
        """
        parameters, trained = self.fixed(start, end)
        nothing = np.zeros(len(self.storage_bytes), np.bool_)
        held = nothing.copy()
        held[self.saves.item[self.saves.within(start, end)]] = True
        forward = self._forward(start, end, nothing, held)
        if not self.training:
            return Stretch(parameters, 0, 0, forward)
        first = self._first_saved(start, end, nothing)
        saved = int(first.sum())
        backward = self._backward(start, end, first, np.zeros(0, np.int64))
        return Stretch(parameters, trained, saved, max(0, forward - saved, backward - saved))

    def alone(self) -> tuple[Ints, Ints, Ints, Ints]:
        """`least` of each node by itself, of all of them in one pass.

        Returns:
            (length,) parameters, gradients, saved and temporary, as of `Stretch`.
        """
        # What a node reads twice is one pair; nothing comes or goes, and no gradient is added to one that is there.
        parameters = self._summed(self.parameters, self.parameter_bytes)
        touched = self._summed(self.storages, self.storage_bytes) + self.forward
        if not self.training:
            nothing = np.zeros(self.length, np.int64)
            return parameters, nothing, nothing, np.maximum(touched, 0)
        saved = self._summed(self.saves, self.storage_bytes)
        back = saved + self._summed(self.gradient_reads, self.gradient_bytes) + self.backward
        most = np.maximum(np.maximum(touched, 0) - saved, np.maximum(back, 0) - saved)
        return parameters, self._summed(self.parameters, self.trained_bytes), saved, np.maximum(0, most)

    def _summed(self, touches: Touches, nbytes: Ints) -> Ints:
        """(length,) bytes of all that is touched at each position."""
        total = np.zeros(self.length, np.int64)
        np.add.at(total, touches.position, nbytes[touches.item])
        return total

    @cached_property
    def messages(self) -> Ints:
        """(length + 1,) bytes that cross before each position: values made before it, and read there or later."""
        return self._crossing(self.value_bytes)

    @cached_property
    def gradient_messages(self) -> Ints:
        """The same of the gradients that come back."""
        has = self.gradient_of >= 0
        return self._crossing(np.where(has, self.value_bytes, 0))

    @cached_property
    def last_reader(self) -> Ints:
        """(values,) where each is last read by a node; its maker if no node reads it."""
        last = self.made.copy()
        np.maximum.at(last, self.reads.item, self.reads.position)
        return last

    def _crossing(self, nbytes: Ints) -> Ints:
        change = np.zeros(self.length + 2, np.int64)
        np.add.at(change, self.made + 1, nbytes)
        np.subtract.at(change, self.last_reader + 1, nbytes)
        return change.cumsum()[: self.length + 1]

    def _taken(self, start: int, end: int) -> Ints:
        """The values that come from outside, each once."""
        items = self.reads.item[self.reads.within(start, end)]
        return np.flatnonzero(_marked(items[self.made[items] < start], len(self.made)))

    @cached_property
    def _by_maker(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.made, kind="stable")
        return order, np.searchsorted(self.made[order], np.arange(self.length + 1))

    def _given(self, start: int, end: int) -> Ints:
        """The values that go outside."""
        order, starts = self._by_maker
        items = order[starts[start] : starts[end]]
        return items[self.last[items] >= end]

    @cached_property
    def _lie_starts(self) -> Ints:
        return np.searchsorted(self.lies[0], np.arange(len(self.made) + 1))

    @cached_property
    def _lie_counts(self) -> Ints:
        return np.diff(self._lie_starts)

    def _lie_in(self, values: Ints) -> Bools:
        """Which storages values lie in."""
        starts, counts = self._lie_starts[values], self._lie_counts[values]
        offset = np.repeat(starts - (counts.cumsum() - counts), counts)
        return _marked(self.lies[1][offset + np.arange(len(offset))], len(self.storage_bytes))

    def _bytes_of(self, storages: Bools) -> int:
        return int(self.storage_bytes[np.flatnonzero(storages)].sum())

    @cached_property
    def _touched_bytes(self) -> Ints:
        """Of each pair of `storages`."""
        return self.storage_bytes[self.storages.item]

    @cached_property
    def _saved_bytes(self) -> Ints:
        """Of each pair of `saves`."""
        return self.storage_bytes[self.saves.item]

    @cached_property
    def _added_to(self) -> tuple[Ints, Bools, Ints]:
        """Of each pair of `gradient_reads` its bytes, whether it is of a value, and where it is made."""
        item, position = self.gradient_reads.item, self.gradient_reads.position
        parameter = self.is_parameter[item]
        return self.gradient_bytes[item], ~parameter, np.where(parameter, position, self.gradient_made[item])

    def _first_saved(self, start: int, end: int, lasting: Bools) -> Ints:
        """The bytes of each pair of `saves`, 0 if its storage was saved before in the stretch, or is there anyhow."""
        pairs = self.saves.within(start, end)
        return self._saved_bytes[pairs] * ((self.saves.before[pairs] < start) & ~lasting[self.saves.item[pairs]])

    def _forward(self, start: int, end: int, stays: Bools, held: Bools) -> int:
        """The most that is there while a node runs, beside what stays."""
        touches, pairs = self.storages, self.storages.within(start, end)
        item, nbytes = touches.item[pairs], self._touched_bytes[pairs]
        born = _up_to(nbytes * ((touches.before[pairs] < start) & ~stays[item]))
        died = _up_to(nbytes * ((touches.after[pairs] >= end) & ~held[item]))
        at = touches.starts[start : end + 1] - touches.starts[start]
        return int((born[at[1:]] - died[at[:-1]] + self.forward[start:end]).max(initial=0))

    def _backward(self, start: int, end: int, first: Ints, given: Ints) -> int:
        """The most that is there while the backward of a node runs, beside what lasts."""
        at = self.saves.starts[start + 1 : end + 1] - self.saves.starts[start]
        there = _up_to(first)[at] + self._gradients(start, end, given)
        return int((there + self.backward[start:end]).max(initial=0))

    def _gradients(self, start: int, end: int, given: Ints) -> Ints:
        """Bytes of gradients at each node, those that adding to one that is there takes among them.

        Gradients that come from outside are held by whoever sent for backward, to its end.
        """
        given = given[self.gradient_of[given] >= 0]
        come = _marked(self.gradient_of[given], len(self.gradient_bytes))
        touches, pairs = self.gradient_reads, self.gradient_reads.within(start, end)
        nbytes, of_value, made = self._added_to
        nbytes, of_value, made = nbytes[pairs], of_value[pairs], made[pairs]
        again = touches.after[pairs] < end
        change = np.zeros(end - start, np.int64)
        np.add.at(change, np.maximum(made, start) - start, nbytes * (touches.before[pairs] < start))
        more = _up_to(nbytes * (again | come[touches.item[pairs]]))
        over = _up_to(nbytes * ~again)
        at = touches.starts[start : end + 1] - touches.starts[start]
        sums = np.zeros(end - start, np.int64)  # others may hold the same: the sum is new memory
        np.maximum.at(sums, touches.position[pairs] - start, nbytes * (again & of_value))
        change[:1] += self.value_bytes[given].sum()
        there: Ints = change.cumsum() - over[at[:-1]] + (more[at[1:]] - more[at[:-1]]) + sums
        return there


def _marked(items: Ints, count: int) -> Bools:
    """(count,) which numbers are among the items."""
    found = np.zeros(count, np.bool_)
    found[items] = True
    return found


def _up_to(nbytes: Ints) -> Ints:
    """The sums of the first 0, 1, ... of them."""
    return np.concatenate([[0], nbytes.cumsum()])
