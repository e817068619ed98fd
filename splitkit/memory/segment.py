"""The memory of any segment of an order of nodes, by numpy in time linear in the segment.

A *segment* is a run of consecutive nodes in a topological order of the graph. Searches ask for thousands of them, so
nothing is simulated: what a segment holds depends on its ends only through the first and the last of its nodes that
touch a storage, and `Incidence` knows for each touch where the same storage was touched before and is touched next::

    position     0       1      2       3     4        segment [1, 4)
    node         linear  relu   linear  add   relu     received: A   sent: D   saved: B (by relu and linear)
    value        A       B      C       D     E        C dies after 3; the gradient of D is there from the start
    reads        x       A      B       A, C  D        the gradient of A grows from 3 down to 1, and is sent back

Forward runs up the order. It holds received values throughout, saved and sent values from their first touch, and
everything else until its last reader. Backward runs down. It releases a saved storage after the first node that saved
it, and holds the gradient of a value from its last reader in the segment down to its maker, next to the gradients that
the segment received. All this is summed with cumulative sums over the touches of the segment: a storage adds its bytes
where it has no earlier touch in the segment, and takes them off where it has no later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
BEFORE = -1
"""The position of what is made before the first node: the inputs of the graph."""
RNG_STATE_BYTES = 5_056
"""The state of the CPU's random number generator, which ``torch.utils.checkpoint`` keeps for the second run."""


@dataclass(frozen=True)
class Incidence:
    """Which positions of an order touch which items (storages, values, gradients or parameters): distinct pairs.

    The pairs are sorted by position and then by item, as in a CSR matrix, with links between pairs of one item.

    Attributes:
        position: the position of each pair.
        item: the item of each pair.
        starts: the pairs of position p are ``starts[p]`` to ``starts[p + 1]``.
        before: the previous position that touches the same item, -1 if there is none.
        after: the next position that touches the same item, the length of the order if there is none.
    """

    position: Ints
    item: Ints
    starts: Ints
    before: Ints
    after: Ints

    @classmethod
    def of_pairs(cls, position: Ints, item: Ints, length: int) -> Incidence:
        """Sort the pairs and drop duplicates."""
        count = int(item.max(initial=0)) + 1
        keys = np.unique(position * count + item)
        return cls.of_sorted_pairs(keys // count, keys % count, length)

    @classmethod
    def of_sorted_pairs(cls, position: Ints, item: Ints, length: int) -> Incidence:
        """Link distinct pairs that are sorted by position and then by item."""
        before, after = np.full(len(item), BEFORE, np.int64), np.full(len(item), length, np.int64)
        by_item = np.argsort(item, kind="stable")
        same = np.flatnonzero(item[by_item][1:] == item[by_item][:-1])
        before[by_item[same + 1]] = position[by_item[same]]
        after[by_item[same]] = position[by_item[same + 1]]
        return cls(position, item, np.searchsorted(position, np.arange(length + 1)), before, after)

    def within(self, start: int, end: int) -> slice:
        """Return the pairs of a segment."""
        return slice(int(self.starts[start]), int(self.starts[end]))


@dataclass(frozen=True)
class SegmentMemory:
    """The bytes that a segment holds when it runs as a part of its own.

    Attributes:
        parameters: bytes of the parameters and buffers that it reads, each once.
        gradients: bytes of the gradients of the parameters that require grad.
        saved: bytes held from forward to the end of backward: received, sent or saved by autograd. 0 without training.
        temporary: the most bytes held on top of these at any time. Without training, the peak of all activations.
    """

    parameters: int
    gradients: int
    saved: int
    temporary: int


@dataclass(frozen=True)
class _Border:
    """What crosses the ends of a segment.

    Attributes:
        sent: the values that it sends.
        arrives: which storages it receives.
        crosses: which storages it receives or sends, except what it sends as copies.
        extra: bytes of these copies, and the bytes by which received values exceed their storages.
    """

    sent: Ints
    arrives: Bools
    crosses: Bools
    extra: int


@dataclass(frozen=True)
class OrderMemory:
    """What the nodes of one topological order touch, by position. Storages, values and gradients go by number.

    Attributes:
        length: the number of nodes.
        training: whether there is a backward.
        storages: the storages that each node reads, makes or saves.
        storage_bytes: the bytes of each storage.
        saves: the storages that autograd saves; without training, those that stay to the end of the part (weights that
            autocast has cast).
        reads: the values that each node reads.
        made: the position that makes each value; -1 for an input of the graph.
        last: the position of the last reader of each value; the length of the order if the graph returns it.
        value_storages: (value, storage) pairs, sorted by value.
        value_bytes: the bytes of each value as a message; 0 for an input of the graph, which every part has.
        copied_from: the position of the first node such that a part which has it and sends the value sends a copy,
            because its elements are not contiguous; -1 for a value that is sent as it lies.
        gradient_of: the gradient of each value, -1 for none. A view shares the gradient of its base.
        gradient_reads: the gradients to which the backward of each node adds.
        gradient_bytes: the bytes of each gradient.
        gradient_made: the position that makes the value of each gradient; -1 for inputs and parameters.
        is_parameter: which gradients are gradients of parameters.
        parameters: the parameters and buffers that each node reads.
        parameter_bytes: the bytes of each parameter and buffer.
        trained_bytes: the bytes of the gradients of each parameter; 0 for those that do not require grad.
        forward: the bytes that the forward of each node takes temporarily.
        backward: the bytes that the backward of each node takes temporarily.
        apart: whether the gradients that a segment receives are counted elsewhere, as messages.
    """

    length: int
    training: bool
    storages: Incidence
    storage_bytes: Ints
    saves: Incidence
    reads: Incidence
    made: Ints
    last: Ints
    value_storages: tuple[Ints, Ints]
    value_bytes: Ints
    copied_from: Ints
    gradient_of: Ints
    gradient_reads: Incidence
    gradient_bytes: Ints
    gradient_made: Ints
    is_parameter: Bools
    parameters: Incidence
    parameter_bytes: Ints
    trained_bytes: Ints
    forward: Ints
    backward: Ints
    apart: bool = False

    def segment(self, start: int, end: int) -> SegmentMemory:
        """Return the memory of the part that has the nodes from ``start`` to before ``end``."""
        return self._alone(start, end, self._border(start, end))

    def _alone(self, start: int, end: int, border: _Border) -> SegmentMemory:
        parameters, trained = self.parameters_of(start, end)
        first = self._first_saved(start, end, border.crosses)
        forward = self._bytes_of(border.arrives) + border.extra
        forward += self._forward(start, end, border.arrives, self._with_saved(start, end, border.crosses))
        if not self.training:
            return SegmentMemory(parameters, 0, 0, forward)
        lasting = self._bytes_of(border.crosses) + border.extra
        saved = lasting + int(first.sum())
        backward = lasting + self._backward(start, end, first, border.sent)
        return SegmentMemory(parameters, trained, saved, max(0, forward - saved, backward - saved))

    def recomputed(self, start: int, end: int) -> SegmentMemory:
        """Return the memory of the same part under ``torch.utils.checkpoint``, which runs it again in backward.

        Between forward and backward it holds what it received and sent, and the state of the random number generator.
        What the second run makes is new memory, also the values that the first run sent. That run starts at the first
        node of backward that asks for a saved tensor, next to the gradients that are there by then; it is counted to
        the end of the part, though torch stops it after the last tensor that backward needs. Without training,
        `segment`.
        """
        if not self.training:
            return self.segment(start, end)
        parameters, trained = self.parameters_of(start, end)
        border = self._border(start, end)
        received = self._bytes_of(border.arrives) + border.extra + RNG_STATE_BYTES
        saved = self._bytes_of(border.crosses) + border.extra + RNG_STATE_BYTES
        forward = received + self._forward(start, end, border.arrives, border.crosses)
        # torch keeps the generator's state of the moment too, to restore it after the second run
        again = saved + RNG_STATE_BYTES + self._waiting_gradients(start, end, border.sent)
        again += self._forward(start, end, border.arrives, self._with_saved(start, end, border.arrives))
        first = self._first_saved(start, end, border.arrives)
        backward = saved + self._backward(start, end, first, border.sent)
        return SegmentMemory(parameters, trained, saved, max(0, forward - saved, again - saved, backward - saved))

    def _border(self, start: int, end: int) -> _Border:
        received, sent = self._received(start, end), self._sent(start, end)
        copied = sent[self.copied_from[sent] >= start] if end < self.length else sent[:0]
        uncopied = sent if not len(copied) else np.setdiff1d(sent, copied)
        arrives = self._storages_of(received)
        extra = self._extra_bytes(received) + int(self.value_bytes[copied].sum())
        return _Border(sent, arrives, arrives | self._storages_of(uncopied), extra)

    def _with_saved(self, start: int, end: int, storages: Bools) -> Bools:
        """Return a mask of some storages and of what autograd saves in a segment."""
        held = storages.copy()
        held[self.saves.item[self.saves.within(start, end)]] = True
        return held

    def _waiting_gradients(self, start: int, end: int, sent: Ints) -> int:
        """Return the most bytes of gradients that are there before backward needs a saved storage."""
        pairs = self.saves.within(start, end)
        last = int(self.saves.position[pairs.stop - 1]) if pairs.stop > pairs.start else start
        there, _ = self._gradients(start, end, sent)
        return int(there[last - start :].max(initial=0))

    def _extra_bytes(self, received: Ints) -> int:
        """Return the bytes of received values beyond those of their storages.

        Two views of one storage arrive as two tensors with a storage each, so their bytes add up to more.
        """
        counts = self._storage_counts[received]
        one, arrives = counts == 1, self.value_bytes[received]
        at = self.value_storages[1][self._storage_starts[received[one]]]
        storages = np.flatnonzero(_marked(at, len(self.storage_bytes)))
        sums = np.bincount(np.searchsorted(storages, at), arrives[one], len(storages)).astype(np.int64)
        # An input of the graph keeps its storage to itself, so what shares it in the graph comes on top of it here.
        inputs = self._storages_of(received[self.made[received] == BEFORE])[storages]
        counted = np.where(inputs, 0, self.storage_bytes[storages])
        return int(np.maximum(0, sums - counted).sum()) + int(arrives[counts == 0].sum())

    def parameters_of(self, start: int, end: int) -> tuple[int, int]:
        """Return the bytes of the parameters and buffers of a segment, and of the gradients of its parameters."""
        pairs = self.parameters.within(start, end)
        items = self.parameters.item[pairs][self.parameters.before[pairs] < start]
        return int(self.parameter_bytes[items].sum()), int(self.trained_bytes[items].sum())

    def lower_bound(self, start: int, end: int) -> SegmentMemory:
        """Return a lower bound for every part that contains this segment: nothing is received or sent.

        Unlike `segment`, it never decreases as the segment grows, because each node then only sees more storages.
        """
        nothing = np.zeros(len(self.storage_bytes), np.bool_)
        return self._alone(start, end, _Border(np.zeros(0, np.int64), nothing, nothing, 0))

    def single_nodes(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return `lower_bound` of every single node, computed in one pass.

        Returns:
            (length,) parameters, gradients, saved and temporary, as in `SegmentMemory`.
        """
        # What a node reads twice is one pair; nothing is received or sent, and no gradient is added to another.
        parameters = self._summed(self.parameters, self.parameter_bytes)
        touched = self._summed(self.storages, self.storage_bytes) + self.forward
        if not self.training:
            nothing = np.zeros(self.length, np.int64)
            return parameters, nothing, nothing, np.maximum(touched, 0)
        saved = self._summed(self.saves, self.storage_bytes)
        back = saved + self._summed(self.gradient_reads, self.gradient_bytes) + self.backward
        most = np.maximum(np.maximum(touched, 0) - saved, np.maximum(back, 0) - saved)
        return parameters, self._summed(self.parameters, self.trained_bytes), saved, np.maximum(0, most)

    def _summed(self, incidence: Incidence, nbytes: Ints) -> Ints:
        """Return the bytes of all items that each position touches, shape (length,)."""
        total = np.zeros(self.length, np.int64)
        np.add.at(total, incidence.position, nbytes[incidence.item])
        return total

    @cached_property
    def messages(self) -> Ints:
        """(length + 1,) bytes that cross before each position: values made before it and read there or later."""
        return self._crossing_bytes(self.value_bytes)

    @cached_property
    def gradient_messages(self) -> Ints:
        """(length + 1,) bytes of the gradients that are sent back across each position."""
        has = self.gradient_of >= 0
        return self._crossing_bytes(np.where(has, self.value_bytes, 0))

    @cached_property
    def last_reader(self) -> Ints:
        """(values,) the last node that reads each value; its maker if no node reads it."""
        last = self.made.copy()
        np.maximum.at(last, self.reads.item, self.reads.position)
        return last

    def _crossing_bytes(self, nbytes: Ints) -> Ints:
        change = np.zeros(self.length + 2, np.int64)
        np.add.at(change, self.made + 1, nbytes)
        np.subtract.at(change, self.last_reader + 1, nbytes)
        return change.cumsum()[: self.length + 1]

    def _received(self, start: int, end: int) -> Ints:
        """Return the values that a segment reads and does not make, each once."""
        items = self.reads.item[self.reads.within(start, end)]
        return np.flatnonzero(_marked(items[self.made[items] < start], len(self.made)))

    @cached_property
    def _by_maker(self) -> tuple[Ints, Ints]:
        order = np.argsort(self.made, kind="stable")
        return order, np.searchsorted(self.made[order], np.arange(self.length + 1))

    def _sent(self, start: int, end: int) -> Ints:
        """Return the values that a segment makes and that later nodes read, or the graph returns."""
        order, starts = self._by_maker
        items = order[starts[start] : starts[end]]
        return items[self.last[items] >= end]

    @cached_property
    def _storage_starts(self) -> Ints:
        return np.searchsorted(self.value_storages[0], np.arange(len(self.made) + 1))

    @cached_property
    def _storage_counts(self) -> Ints:
        return np.diff(self._storage_starts)

    def _storages_of(self, values: Ints) -> Bools:
        """Return a mask of the storages that some values lie in."""
        starts, counts = self._storage_starts[values], self._storage_counts[values]
        offset = np.repeat(starts - (counts.cumsum() - counts), counts)
        return _marked(self.value_storages[1][offset + np.arange(len(offset))], len(self.storage_bytes))

    def _bytes_of(self, storages: Bools) -> int:
        return int(self.storage_bytes[np.flatnonzero(storages)].sum())

    @cached_property
    def _gradient_pairs(self) -> tuple[Ints, Bools, Ints]:
        """For each pair of `gradient_reads` its bytes, whether its item belongs to a value, and the position of that.

        The gradient of a parameter stays to the end, so it counts as made where it is added to.
        """
        item, position = self.gradient_reads.item, self.gradient_reads.position
        parameter = self.is_parameter[item]
        return self.gradient_bytes[item], ~parameter, np.where(parameter, position, self.gradient_made[item])

    def _first_saved(self, start: int, end: int, lasting: Bools) -> Ints:
        """Return the bytes of each pair of `saves`: 0 if an earlier node of the segment saves it, or if it lasts."""
        pairs = self.saves.within(start, end)
        item = self.saves.item[pairs]
        return self.storage_bytes[item] * ((self.saves.before[pairs] < start) & ~lasting[item])

    def _forward(self, start: int, end: int, present: Bools, held: Bools) -> int:
        """Return the peak of forward beyond the storages ``present`` throughout; ``held`` ones are never freed."""
        incidence, pairs = self.storages, self.storages.within(start, end)
        item = incidence.item[pairs]
        nbytes = self.storage_bytes[item]
        born = _prefix_sums(nbytes * ((incidence.before[pairs] < start) & ~present[item]))
        died = _prefix_sums(nbytes * ((incidence.after[pairs] >= end) & ~held[item]))
        at = incidence.starts[start : end + 1] - incidence.starts[start]
        # A node holds what it frees while it runs: births up to and with it, deaths only before it.
        return int((born[at[1:]] - died[at[:-1]] + self.forward[start:end]).max(initial=0))

    def _backward(self, start: int, end: int, first: Ints, sent: Ints) -> int:
        """Return the peak of backward beyond what lasts to its end."""
        at = self.saves.starts[start + 1 : end + 1] - self.saves.starts[start]
        # When the backward of a node runs, the nodes before it have not released what they were the first to save.
        there, new = self._gradients(start, end, sent)
        alive = _prefix_sums(first)[at] + there + new
        return int((alive + self.backward[start:end]).max(initial=0))

    def _gradients(self, start: int, end: int, sent: Ints) -> tuple[Ints, Ints]:
        """Return the bytes of gradients that are there when the backward of each node begins, and those that it adds.

        The latter include the temporary memory of adding two gradients.

        Received gradients are held to the end of backward by whoever called it.
        """
        sent = sent[self.gradient_of[sent] >= 0]
        received = _marked(self.gradient_of[sent], len(self.gradient_bytes))
        incidence, pairs = self.gradient_reads, self.gradient_reads.within(start, end)
        nbytes, of_value, made = self._gradient_pairs
        nbytes, of_value, made = nbytes[pairs], of_value[pairs], made[pairs]
        again = incidence.after[pairs] < end
        # Backward runs from `end` down, but positions count up: a gradient is there from its maker (or the start of
        # the segment) up to its last reader, so it is added at the first and taken off behind the last.
        change = np.zeros(end - start, np.int64)
        np.add.at(change, np.maximum(made, start) - start, nbytes * (incidence.before[pairs] < start))
        more = _prefix_sums(nbytes * (again | received[incidence.item[pairs]]))
        over = _prefix_sums(nbytes * ~again)
        at = incidence.starts[start : end + 1] - incidence.starts[start]
        # Autograd adds out of place (others may hold either addend), so the sum of two gradients is new memory.
        sums = np.zeros(end - start, np.int64)
        np.maximum.at(sums, incidence.position[pairs] - start, nbytes * (again & of_value))
        change[:1] += 0 if self.apart else self.value_bytes[sent].sum()
        there, new = change.cumsum() - over[at[1:]], (over + more)[at[1:]] - (over + more)[at[:-1]] + sums
        return there, new


def _marked(items: Ints, count: int) -> Bools:
    """Return a (count,) mask of the numbers that are among the items."""
    found = np.zeros(count, np.bool_)
    found[items] = True
    return found


def _prefix_sums(nbytes: Ints) -> Ints:
    """Return the sums of the first 0, 1, ... entries."""
    return np.concatenate([[0], nbytes.cumsum()])


# Bounds on how much a segment's peak can shrink when the segment is extended.
#
# A longer segment takes less memory only where it makes a value that the shorter one received, or contains the last
# reader of a value that the shorter one sent. Everything else only grows::
#
#     peak(inner) <= peak(outer) + possible decrease at the nodes that only the outer segment has
#
# So one exact peak answers for many segments near it: where a segment is over the limit by some bytes, every extension
# whose possible decrease is smaller is over it too; where one fits with bytes to spare, so do the segments inside it
# that can be larger by no more than these bytes.


@dataclass(frozen=True)
class PeakBounds:
    """Prefix sums of the bytes by which a segment can shrink, for a number of microbatches in flight.

    Attributes:
        ends: (length + 1,) extending a segment from end i to end j lowers its peak by at most ``ends[j] - ends[i]``.
        starts: (length + 1,) extending one from start j to start i < j lowers it by at most ``starts[j] - starts[i]``.
    """

    ends: Ints
    starts: Ints

    @classmethod
    def of(cls, order: OrderMemory, in_flight: int) -> PeakBounds:
        """Return the bounds for one order."""
        nbytes = np.zeros(len(order.made), np.int64)
        np.add.at(nbytes, order.value_storages[0], order.storage_bytes[order.value_storages[1]])
        inner = order.made >= 0
        sent = inner & (order.last > order.made)
        ends = np.where(order.copied_from != BEFORE, order.value_bytes, 0)  # even for what the graph returns
        within = order.last < order.length
        if not order.training:
            # A value that is sent is held to its last reader, which the longer segment has: nothing else is freed.
            starts = nbytes + order.value_bytes
        else:
            ends = in_flight * (ends + np.where(within, nbytes, 0)) + np.where(within, _gradients(order), 0)
            starts = in_flight * (nbytes + order.value_bytes)
        last = np.minimum(order.last, order.length - 1)
        return cls(_sums(last[sent], ends[sent], order.length), _sums(order.made[inner], starts[inner], order.length))


def _gradients(order: OrderMemory) -> Ints:
    """Return the bytes of the gradient that a sent value receives, and of adding to it, shape (values,)."""
    has = order.gradient_of >= 0
    sums = np.zeros(len(has), np.int64)
    sums[has] = order.value_bytes[has] + order.gradient_bytes[order.gradient_of[has]]
    return sums


def _sums(position: Ints, nbytes: Ints, length: int) -> Ints:
    at = np.zeros(length + 1, np.int64)
    np.add.at(at, position + 1, nbytes)
    return at.cumsum()
