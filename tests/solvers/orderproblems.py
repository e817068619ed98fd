"""Random problems of ordering actions, and the best value by enumeration of all orders."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from splitkit.solvers.order_problem import ActionBytes, OrderProblem, Row, Rows, time_rows

SHAPES = (((0, 1), 1), ((0, 1), 2), ((0, 1), 3), ((0, 1, 2), 2), ((0, 1, 1, 0), 1), ((0, 1, 0, 1), 1))
"""(rank of each stage, microbatches) for which all orders can be enumerated."""
NO_LIMIT = 10**9


def random_problem(number: int, bytes_during: bool = True) -> OrderProblem:
    """A problem with times of 0, ties, messages longer than actions, tight and no memory."""
    rng = random.Random(number)
    rank_of, microbatches = SHAPES[number % len(SHAPES)]
    last, ranks = len(rank_of) - 1, max(rank_of) + 1
    seconds, travel, uses = [], [], []
    for stage, rank in enumerate(rank_of):
        seconds.append(tuple(float(rng.choice((0, 1, 1, 2, 3, 5, rng.random() * 4))) for _ in range(3)))
        apart = [0 <= other <= last and rank_of[other] != rank for other in (stage + 1, stage - 1)]
        travel.append(tuple(float(rng.choice((0, 0.5, 1, 4))) * away for away in apart))
        saved = rng.randint(0, 6)
        left, extra = rng.randint(0, saved), rng.choice((0, 0, 2))
        during = [rng.choice((0, 1)) * bytes_during for _ in range(3)]
        uses.append(
            (
                ActionBytes(saved, during[0]),
                ActionBytes(extra, during[1], left - saved),
                ActionBytes(0, during[2], -left - extra),
            )
        )
    need = [max(1, sum(use[0].start for use, on in zip(uses, rank_of, strict=True) if on == r)) for r in range(ranks)]
    room = tuple(float(rng.choice((NO_LIMIT, one + rng.randint(1, 8)))) for one in need)
    late = tuple(float(rng.choice((0, 0, -1, 2))) for _ in range(ranks))
    return OrderProblem(microbatches, rank_of, tuple(seconds), tuple(travel), tuple(uses), room, late)


def rows_of_rank(stages: tuple[int, ...], microbatches: int) -> Iterator[Row]:
    """All orders of the actions of one rank in which each stage takes the microbatches in turn."""
    counts = {(stage, kind): 0 for stage in stages for kind in range(3)}

    def more(row: Row) -> Iterator[Row]:
        if len(row) == 3 * microbatches * len(stages):
            yield list(row)
        for (stage, kind), count in counts.items():
            if count < microbatches and (kind == 0 or count < counts[stage, kind - 1]):
                counts[stage, kind] += 1
                yield from more([*row, (stage, kind)])
                counts[stage, kind] -= 1

    return more([])


def all_rows(problem: OrderProblem) -> Iterator[Rows]:
    """All orders of all ranks, those that deadlock or take too much memory among them."""
    each = [list(rows_of_rank(stages, problem.microbatches)) for stages in problem.of_rank]
    return (list(rows) for rows in product(*each))


def least_value(problem: OrderProblem) -> float | None:
    """The best value of all orders; ``None`` if memory holds none."""
    values = [found.value for rows in all_rows(problem) if (found := time_rows(problem, rows)) is not None]
    return min(values, default=None)
