"""Seconds and workspace of one call: `torch.utils.benchmark` on a CPU, events on a CUDA device."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from splitkit import _torch

ROUNDS = 3  # of which the median is taken, however long one call lasts
BATCH = 10  # calls that wait on a GPU behind one pause
PAUSE = 2_000_000  # cycles, about 1 ms: meanwhile the host is ahead, so that no kernel waits for its launch

Run = Callable[[], Any]


@dataclass(frozen=True)
class Record:
    """What one call takes.

    Attributes:
        seconds: its time.
        workspace: bytes that were allocated at once inside the call, beyond those of its results.
    """

    seconds: float
    workspace: int


NOTHING = Record(0.0, 0)


def record(prepare: Callable[[], Run], device: torch.device, anew: bool, min_run_time: float) -> Record:
    """Run a call many times.

    Args:
        prepare: makes the call; not timed.
        device: a CPU or a CUDA device.
        anew: whether to make each call anew, because a call changes its arguments.
        min_run_time: seconds to spend; a call that takes longer runs `ROUNDS` times or a few more.
    """
    made = prepare()
    again = prepare if anew else lambda: made
    if device.type == "cuda":
        with torch.cuda.device(device):
            return Record(_cuda_seconds(again, min_run_time), _cuda_workspace(again()))
    seconds = _each_seconds(prepare, min_run_time) if anew else _cpu_seconds(made, min_run_time)
    return Record(seconds, _cpu_workspace(again()))


def _cpu_seconds(run: Run, min_run_time: float) -> float:
    from torch.utils.benchmark import Timer

    # Timer's own clock waits for accelerators
    timer = Timer("run()", timer=time.perf_counter, globals={"run": run}, num_threads=torch.get_num_threads())
    rounds = [timer.blocked_autorange(min_run_time=min_run_time / ROUNDS) for _ in range(ROUNDS)]
    return statistics.median(seconds for found in rounds for seconds in found.times)


def _each_seconds(prepare: Callable[[], Run], min_run_time: float) -> float:
    """As ``Timer`` would, which cannot make arguments anew for each call."""
    prepare()()
    times: list[float] = []
    end = time.perf_counter() + min_run_time
    while len(times) < ROUNDS or time.perf_counter() < end:
        run = prepare()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _cuda_seconds(again: Callable[[], Run], min_run_time: float) -> float:
    for _ in range(ROUNDS):
        again()()
    torch.cuda.synchronize()
    times: list[float] = []
    end = time.perf_counter() + min_run_time
    while not times or time.perf_counter() < end:
        times += _cuda_batch(again)
    return statistics.median(times)


def _cuda_batch(again: Callable[[], Run]) -> list[float]:
    event: Any = torch.cuda.Event
    pause: Any = _torch.CUDA_SLEEP
    pause(PAUSE)
    pairs: list[tuple[Any, Any]] = []
    for _ in range(BATCH):
        run = again()
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def _cpu_workspace(run: Run) -> int:
    held = list(accumulate(_torch.allocations(run), initial=0))
    return max(held) - max(held[-1], 0)


def _cuda_workspace(run: Run) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del result
    return peak - max(before, after)


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error while the ops are measured; nothing off a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # a slow refresh: the bar is drawn by a thread, which the ops should not feel
    with Progress(console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("measuring", total=total)
        yield lambda: bar.advance(task)
