"""Ops timed where they stand among the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch.fx import Node

from splitkit.costs.copies import Private
from splitkit.costs.measuring import MeasuringRun, call_of
from splitkit.costs.timing import ROUNDS, Record

MOST_ROUNDS = 9


class TimedRun(MeasuringRun):
    """One run more, which times the ops of a first run where they stand.

    Attributes:
        seconds: what each op takes.
    """

    def __init__(self, run: MeasuringRun, private: Private) -> None:
        super().__init__(run.flow, private, run.cache, run.min_run_time, lambda: None)
        self.seconds: dict[Node, float] = {}

    def _measured(self, n: Node) -> Any:
        args, kwargs = self.private.moved(self.fetch_args_kwargs_from_env(n))
        call = call_of(n, self.private.module(str(n.target)) if n.op == "call_module" else n.target, args, kwargs)
        start = time.perf_counter()
        result = call()
        self.seconds[n] = time.perf_counter() - start
        return result


def time_in_place(run: MeasuringRun, inputs: Any, dice: torch.Tensor) -> None:
    """What ops take among the others: dispatch, memory that is given anew, arguments that the caches have lost.

    The graph runs some times more, always from the same state. Views are priced too.

    Args:
        run: the first run.
        inputs: as they were given.
        dice: the state of the random generator before it.
    """
    runs: list[Mapping[Node, float]] = []
    for _ in rounds(len(set(run.keys.values())), run.min_run_time):
        torch.random.set_rng_state(dice)
        again = TimedRun(run, Private(run.flow, run.private.device))
        with again.safely():
            again.run(*again.private.inputs(inputs), enable_io_processing=False)
        runs.append(again.seconds)
    seconds = undisturbed(run.keys, runs)
    for node, key in run.keys.items():
        run.keep(node, key, Record(seconds[key], run.found[node].workspace))
    run.cache.save()


def undisturbed(keys: Mapping[Node, str], runs: Sequence[Mapping[Node, float]]) -> dict[str, float]:
    """What each group takes: the mean of its nodes in the run where that is least.

    The least, for whatever else the machine does only ever adds; the mean within a run, so that the prices of all nodes
    add up to what a run takes.

    Args:
        keys: the group of each node.
        runs: seconds by node; 0 for a node that has none.
    """
    groups: dict[str, list[Node]] = {}
    for node, key in keys.items():
        groups.setdefault(key, []).append(node)
    return {key: min(fmean(run.get(n, 0.0) for n in nodes) for run in runs) for key, nodes in groups.items()}


def rounds(groups: int, min_run_time: float, settled: Callable[[], bool] = lambda: True) -> Iterator[int]:
    """Numbers of runs: a few, and some more as long as time is left for so many groups, or until they have settled."""
    end = time.perf_counter() + min_run_time * groups
    for number in range(MOST_ROUNDS):
        if number >= ROUNDS and time.perf_counter() >= end and settled():
            return
        yield number
