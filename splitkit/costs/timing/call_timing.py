"""Measure the seconds and the workspace of one call: `torch.utils.benchmark` on a CPU, events on a CUDA device."""

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
from splitkit.costs.timing.cpu_time import OwnTime

ROUNDS = 3  # the least number of timings, of which the median is taken, however long one call lasts
BATCH = 10  # calls launched behind one pause on a GPU
PAUSE = 2_000_000  # GPU cycles, about 1 ms: the CPU launches a batch meanwhile, so that no kernel waits for its launch

Run = Callable[[], Any]


@dataclass(frozen=True)
class Record:
    """The measurements of one call.

    Attributes:
        seconds: its time.
        workspace: peak bytes allocated inside the call, beyond those of its results.
        busy: whether the machine was busy with other work, so that the time may be too long; it is then not cached.
    """

    seconds: float
    workspace: int
    busy: bool = False


NOTHING = Record(0.0, 0)


def time_call(prepare: Callable[[], Run], device: torch.device, anew: bool, min_run_time: float) -> Record:
    """Run a call many times and return its median time and its workspace.

    Args:
        prepare: makes the call; its own time does not count.
        device: a CPU or a CUDA device.
        anew: whether to prepare each call anew, because a call changes its arguments.
        min_run_time: seconds to spend; a call that takes longer runs `ROUNDS` times or a few more.
    """
    made = prepare()
    again = prepare if anew else lambda: made
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _cuda_seconds(again, min_run_time)
    clock = OwnTime()
    seconds = _each_seconds(prepare, min_run_time, clock) if anew else _cpu_seconds(made, min_run_time, clock)
    return Record(seconds, _cpu_workspace(again()), clock.is_busy())


def _cpu_seconds(run: Run, min_run_time: float, clock: OwnTime) -> float:
    from torch.utils.benchmark import Timer

    # Timer's default clock synchronizes accelerators at each reading
    timer = Timer("run()", timer=clock.now, globals={"run": run}, num_threads=torch.get_num_threads())
    rounds = [timer.blocked_autorange(min_run_time=min_run_time / ROUNDS) for _ in range(ROUNDS)]
    return statistics.median(seconds for found in rounds for seconds in found.times)


def _each_seconds(prepare: Callable[[], Run], min_run_time: float, clock: OwnTime) -> float:
    """Return the median time of calls with new arguments each, which ``Timer`` cannot do."""
    prepare()()
    times: list[float] = []
    end = time.perf_counter() + min_run_time
    while len(times) < ROUNDS or time.perf_counter() < end:
        run = prepare()
        start = clock.now()
        run()
        times.append(clock.now() - start)
    return statistics.median(times)


def _cuda_seconds(again: Callable[[], Run], min_run_time: float) -> Record:
    """Return the least median of several batches; busy if in every batch the CPU was too slow to stay ahead."""
    for _ in range(ROUNDS):
        again()()
    torch.cuda.synchronize()
    batches: list[tuple[bool, float]] = []
    end = time.perf_counter() + min_run_time
    while not batches or (time.perf_counter() < end) or (batches[0][0] and len(batches) < ROUNDS):
        batches.append(_cuda_batch(again))
    late, seconds = min(batches)
    return Record(seconds, _cuda_workspace(again()), late)


def _cuda_batch(again: Callable[[], Run]) -> tuple[bool, float]:
    """Return whether the CPU was busy with other work while calls were launched, and the median time of the calls."""
    event: Any = torch.cuda.Event
    pause: Any = _torch.CUDA_SLEEP
    pairs: list[tuple[Any, Any]] = []
    clock = OwnTime()
    pause(PAUSE)
    for _ in range(BATCH):
        run = again()
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        run()
        end.record()
        pairs.append((start, end))
    late = clock.is_busy()
    torch.cuda.synchronize()
    return late, statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairs)


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
    """Show a progress bar on standard error while ops are measured, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # a slow refresh, as the thread that draws the bar competes with the ops
    with Progress(console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("measuring", total=total)
        yield lambda: bar.advance(task)
