"""Runs rows of actions and messages entry by entry, and tries all orders of the messages: slow, and plain to see."""

from __future__ import annotations

import re

from splitkit.pipeline.message_order import MessageOrder, ends_of, readers

TEXT = re.compile(r"(\d+)(SEND_|RECV_)?([FBIW])(\d+)")


class Machine:
    """Rows that are run: each entry as soon as the model lets it, at the earliest time."""

    def __init__(self, cells, communicators="rank", blocking=False):
        self.rows = [[cell for cell in row if TEXT.fullmatch(cell)] for row in cells]
        self.communicators, self.blocking = communicators, blocking
        self.rank_of = {int(TEXT.fullmatch(c)[1]): r for r, row in enumerate(self.rows) for c in row if "_" not in c}
        self.begun, self.over = {}, {}

    def run(self, seconds):
        """Run with the seconds of each action, and of a message by its SEND; return whether all entries ended."""
        there = [(rank, at) for rank, row in enumerate(self.rows) for at in range(len(row))]
        waiting = {}
        for rank, at in there:
            cell = self.rows[rank][at]
            ends = [(rank, at), self.other_end(cell)] if "SEND" in cell else [(rank, at)]
            if "RECV" not in cell and None not in ends:
                waiting[cell] = ends, {need for end in ends for need in self.needs(*end)}
        moved = True
        while moved:
            moved = False
            for cell, (ends, needs) in list(waiting.items()):
                if all(need in self.over for need in needs):
                    start = max([0.0, *(self.over[need] for need in needs)])
                    for end in ends:
                        self.begun[end], self.over[end] = start, start + seconds(cell)
                    del waiting[cell]
                    moved = True
        return len(self.over) == len(there)

    def other_end(self, cell):
        stage, _, kind, number = TEXT.fullmatch(cell).groups()
        target = int(stage) + (1 if kind == "F" else -1)
        wanted = f"{target}RECV_{kind}{number}"
        row = self.rows[self.rank_of[target]]
        return (self.rank_of[target], row.index(wanted)) if wanted in row else None

    def peer(self, cell):
        stage, way, kind, _ = TEXT.fullmatch(cell).groups()
        toward = (1 if kind == "F" else -1) * (1 if way == "SEND_" else -1)
        return self.rank_of[int(stage) + toward]

    def needs(self, rank, at):
        """The entries of a rank for which one of its entries waits."""
        row, cell = self.rows[rank], self.rows[rank][at]
        for before, other in enumerate(row[:at]):
            message, also = "_" in cell, "_" in other
            same = message and also and (self.communicators == "rank" or self.peer(cell) == self.peer(other))
            if self.blocking or not also or same:
                yield rank, before
        stage, _, kind, number = TEXT.fullmatch(cell).groups()
        if "_" not in cell and kind != "W":
            wanted = f"{stage}RECV_{'F' if kind == 'F' else 'B'}{number}"
            if wanted in row:
                yield rank, row.index(wanted)


def seconds_of(order, durations, travel):
    """A function that gives the seconds of each cell."""
    found = {str(action): d for action, d in zip((a for row in order.ranks for a in row), durations, strict=True)}
    return (found | {ends_of(order, maker)[0]: travel[maker] for maker in readers(order)}).__getitem__


def all_rows(order):
    """The rows of every order of messages, each as early as the order of the messages before it allows."""
    read, data = readers(order), order.links.data.tolist()
    rank = order.columns.rank.tolist()
    texts = [str(action) for row in order.ranks for action in row]

    def needed(action, done, found):
        """The actions that must be over before this one, and it; None if a message is missing."""
        if action in done or action in found:
            return found
        for need in [action - 1] * (action > 0 and rank[action - 1] == rank[action]):
            if needed(need, done, found) is None:
                return None
        if data[action] in read and data[action] not in done[-1]:
            return None
        found.append(action)
        return found

    def after(done, sent, rows):
        if len(sent) == len(read):
            rest = [
                row + [t for a, t in enumerate(texts) if rank[a] == r and t not in row] for r, row in enumerate(rows)
            ]
            yield tuple(map(tuple, rest))
            return
        for maker in sorted(set(read) - sent):
            first = needed(maker, {**done, -1: sent}, [])
            if first is None:
                continue
            more = [list(row) for row in rows]
            for action in first:
                more[rank[action]].append(texts[action])
            send, recv = ends_of(order, maker)
            more[rank[maker]].append(send)
            more[rank[read[maker]]].append(recv)
            yield from after(done | dict.fromkeys(first, True), sent | {maker}, more)

    return after({}, frozenset(), [[] for _ in order.ranks])


def with_rows(order, rows, communicators="rank"):
    return MessageOrder(order.name, order.ranks, rows, communicators)
