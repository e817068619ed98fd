"""Lists the checks of a device, and runs them: one after the other, in processes that a failed check ends alone.

A worker (`splitkit.cli.selftest.device_checks`) runs the checks that are left, and prints what it finds as lines of
JSON. When a check raises, crashes or takes too long, its worker is ended, and a new one goes on with the next check: an
error of a GPU stays in the process that had it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from time import monotonic
from typing import Any

OK, FAILED, MEASURED, NOT_RUN = "ok", "FAILED", "measured", "not run"
"""The verdicts; `MEASURED` is a figure without a limit, `NOT_RUN` says in the figure what is missing."""

SECONDS: dict[str, float] = {
    "equal: gpt2": 60,
    "equal: llama": 60,
    "equal: t5": 60,
    "equal: conv net": 60,
    "equal: two devices": 60,
    "capture: on meta": 30,
    "capture: CUDA graphs": 60,
    "memory: forward": 60,
    "memory: budgets": 90,
    "memory: a training loop": 60,
    "streams: offload": 90,
    "speed: prices": 60,
    "speed: order of plans": 90,
    "speed: torch's peak": 60,
    "speed: compiled": 120,
    "ranks: forward plan": 120,
    "ranks: joint plan": 120,
    "ranks: one rank of NCCL": 120,
    "ranks: a killed rank": 120,
}
"""Check -> the seconds that it may take, cheapest first. On two cores of a CPU all take about three minutes."""


WHOLE = 480.0
"""Seconds after which no further check starts."""


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        check: the check, one of `SECONDS`.
        what: what was compared or measured.
        figure: what was found.
        limit: what was required; empty if nothing was.
        verdict: `OK`, `FAILED`, `MEASURED` or `NOT_RUN`.
        trace: of an exception, where it came from.
    """

    check: str
    what: str
    figure: str
    limit: str = ""
    verdict: str = OK
    trace: str = ""


def run_checks(devices: Sequence[str], show: Callable[[Finding], None], names: Sequence[str]) -> list[Finding]:
    """Run checks on devices, and return what they found.

    Args:
        devices: the devices, the one that is tested first.
        show: is called with each finding when it is made.
        names: the checks, of `SECONDS`.
    """
    found: list[Finding] = []
    left, until = list(names), monotonic() + WHOLE

    def take(finding: Finding) -> None:
        found.append(finding)
        show(finding)

    while left and monotonic() < until:
        for finding in _findings(devices, left, until):
            take(finding)
    for name in left:
        take(Finding(name, "the whole check", f"the {WHOLE:.0f} s are over", "", NOT_RUN))
    return found


def _findings(devices: Sequence[str], left: list[str], end: float) -> Iterator[Finding]:
    """Start a process that runs checks, and yield what they find, until one of them ends the process or none is left.

    Takes the checks that have run off the list, and starts none at the end.
    """
    words = worker(devices, left)
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    with (
        TemporaryFile("w+", encoding="utf-8") as said,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=said, text=True, env=env, start_new_session=True) as own,
    ):
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(own.stdout, lines), daemon=True)
        reader.start()
        try:
            while left and monotonic() < end:
                name, failed = left[0], False
                until = monotonic() + SECONDS[name]
                while (line := _next(lines, until)) is not None and line.get("end") != name:
                    if "check" in line:
                        finding = Finding(**line)
                        failed |= bool(finding.trace)
                        yield finding
                del left[0]
                if line is None:
                    how = _how_it_ended(own, until, SECONDS[name])
                    said.seek(0)
                    yield Finding(name, "the whole check", how, "ends", FAILED, "".join(said.readlines()[-20:]))
                if line is None or failed:
                    return
        finally:
            with suppress(ProcessLookupError):
                os.killpg(own.pid, signal.SIGKILL)  # and the ranks that it started
            reader.join(10)


def worker(devices: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the command of a process that runs checks on devices."""
    return [sys.executable, "-m", "splitkit.cli.selftest.device_checks", json.dumps([*devices]), json.dumps([*names])]


def _read(stdout: Iterable[str], lines: queue.Queue[str | None]) -> None:
    for line in stdout:
        lines.put(line)
    lines.put(None)


def _next(lines: queue.Queue[str | None], until: float) -> dict[str, Any] | None:
    """Return the next line of JSON; ``None`` if the process has ended, or the time is over."""
    while True:
        try:
            line = lines.get(timeout=max(0.0, until - monotonic()))
        except queue.Empty:
            return None
        if line is None or line.startswith("{"):
            return None if line is None else json.loads(line)


def _how_it_ended(process: subprocess.Popen[str], until: float, seconds: float) -> str:
    if monotonic() >= until:
        return f"not done after {seconds:.0f} s"
    code = process.wait(timeout=10)
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}"
