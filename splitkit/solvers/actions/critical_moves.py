"""Improves an order by moving actions of its critical path: neighbours change places, weight parts go to idle times.

Only a move that touches the critical path can shorten it (as in job shops: Van Laarhoven, Aarts and Lenstra, 1992).
"""

from __future__ import annotations

from collections.abc import Iterator

from splitkit.solvers.actions.order_problem import OrderProblem, Row, Rows, TimedRows, W, time_rows

_Place = tuple[int, int]
"""A rank, and the place of an action in its row."""


def improve_rows(problem: OrderProblem, start: TimedRows, evaluations: int, enough: float) -> tuple[TimedRows, int]:
    """Return the best order found by descent from one, and how many orders were timed.

    An order is taken if its value falls, or stays and the ends of all ranks fall in sum. Ends at a value of ``enough``.
    """
    best, used, tabu = start, 0, set[str]()
    while best.value > enough:
        following = None
        for rows in _neighbours(problem, best.rows):
            key = repr(rows)
            if key in tabu:
                continue
            if used == evaluations:
                return best, used
            tabu.add(key)
            used += 1
            found = time_rows(problem, rows)
            if found is not None and _rank_of_order(found) < _rank_of_order(best):
                following = found
                break
        if following is None:
            return best, used
        best = following
    return best, used


def _rank_of_order(timed: TimedRows) -> tuple[float, float]:
    return timed.value, sum(timed.ends)


def _neighbours(problem: OrderProblem, rows: Rows) -> Iterator[Rows]:
    """Yield the orders that one move away from the critical path makes."""
    starts, path = _critical(problem, rows)
    for rank, place in path:
        row = rows[rank]
        if place and row[place - 1][0:2] != row[place]:
            yield _with(rows, rank, [*row[: place - 1], row[place], row[place - 1], *row[place + 1 :]])
    for rank, place in path:
        row = rows[rank]
        if row[place][1] == W:
            rest = [*row[:place], *row[place + 1 :]]
            for gap in _gaps(problem, row, starts[rank]):
                to = gap - (gap > place)
                if to != place:
                    yield _with(rows, rank, [*rest[:to], row[place], *rest[to:]])


def _with(rows: Rows, rank: int, row: Row) -> Rows:
    return [row if r == rank else other for r, other in enumerate(rows)]


def _gaps(problem: OrderProblem, row: Row, starts: list[float]) -> Iterator[int]:
    """Yield the places before which a rank waits, and the end."""
    end = 0.0
    for place, ((stage, kind), start) in enumerate(zip(row, starts, strict=True)):
        if place and start > end * (1 + 1e-12):
            yield place
        end = start + problem.seconds[stage][kind]
    yield len(row)


def _critical(problem: OrderProblem, rows: Rows) -> tuple[list[list[float]], list[_Place]]:
    """Return the start of every action, and the places of a longest path from its end to its start."""
    starts, maker = _starts(problem, rows)
    ends = [
        starts[r][-1] + problem.seconds[row[-1][0]][row[-1][1]] + problem.late[r] if row else -1.0
        for r, row in enumerate(rows)
    ]
    rank = ends.index(max(ends))
    path = [(rank, len(rows[rank]) - 1)]
    while True:
        rank, place = path[-1]
        start = starts[rank][place]
        if place:
            stage, kind = rows[rank][place - 1]
            if starts[rank][place - 1] + problem.seconds[stage][kind] >= start * (1 - 1e-12):
                path.append((rank, place - 1))
                continue
        if (rank, place) not in maker:
            return starts, path
        path.append(maker[rank, place])


def _starts(problem: OrderProblem, rows: Rows) -> tuple[list[list[float]], dict[_Place, _Place]]:
    """Return the start of every action, and the action whose message it waits for."""
    from splitkit.solvers.actions.order_problem import StepState

    state, at = StepState(problem), [0] * problem.ranks
    starts: list[list[float]] = [[] for _ in rows]
    places: dict[tuple[int, int, int], _Place] = {}
    maker: dict[_Place, _Place] = {}
    ready = list(range(problem.ranks))
    while ready:
        rank = ready.pop()
        while at[rank] < len(rows[rank]):
            stage, kind = rows[rank][at[rank]]
            start = state.start(stage, kind)
            if start is None:
                break
            number, here = state.counts[stage][kind], (rank, at[rank])
            places[stage, kind, number] = here
            source = places.get((stage - 1 if kind == 0 else stage + 1, kind, number)) if kind != W else None
            if source is not None:
                maker[here] = source
            starts[rank].append(start)
            at[rank] += 1
            target = state.run(stage, kind, start)
            if target >= 0 and problem.rank_of[target] != rank:
                ready.append(problem.rank_of[target])
    return starts, maker
