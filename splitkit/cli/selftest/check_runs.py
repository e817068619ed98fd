"""Lists the checks of a device, and runs them: one after the other, in processes that a failed check ends alone.

A worker (`splitkit.cli.selftest.checks`) runs the checks that are left, and prints what it finds as lines of JSON. When
a check raises, crashes or takes too long, its worker is ended, and a new one goes on with the next check: an error of a
GPU stays in the process that had it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
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

    def to_dict(self) -> dict[str, str]:
        """Return plain data."""
        return asdict(self)


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
        for finding in _Worker(devices, left, until).findings():
            take(finding)
    for name in left:
        take(Finding(name, "the whole check", f"the {WHOLE:.0f} s are over", "", NOT_RUN))
    return found


class _Worker:
    """A process that runs checks; `findings` takes those off the list that it has run, and starts none at the end."""

    def __init__(self, devices: Sequence[str], left: list[str], end: float) -> None:
        self.left, self.end = left, end
        words = [sys.executable, "-m", "splitkit.cli.selftest.checks", json.dumps([*devices]), json.dumps(left)]
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=env, start_new_session=True)
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.said: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._keep_errors, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def _keep_errors(self) -> None:
        assert self.process.stderr is not None
        self.said.extend(self.process.stderr)

    def findings(self) -> Iterator[Finding]:
        """Yield what the checks find, until one of them ends the process or none is left."""
        try:
            while self.left and monotonic() < self.end:
                name, failed = self.left[0], False
                until = monotonic() + SECONDS[name]
                while (line := self._next(until)) is not None and line.get("end") != name:
                    if "check" in line:
                        finding = Finding(**line)
                        failed |= bool(finding.trace)
                        yield finding
                del self.left[0]
                if line is None:
                    yield Finding(
                        name,
                        "the whole check",
                        self._how_it_ended(until, SECONDS[name]),
                        "ends",
                        FAILED,
                        "".join(self.said[-20:]),
                    )
                if line is None or failed:
                    return
        finally:
            self._end()

    def _next(self, until: float) -> dict[str, Any] | None:
        """Return the next line of JSON; ``None`` if the process has ended, or the time is over."""
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, until - monotonic()))
            except queue.Empty:
                return None
            if line is None or line.startswith("{"):
                return None if line is None else json.loads(line)

    def _how_it_ended(self, until: float, seconds: float) -> str:
        if monotonic() >= until:
            return f"not done after {seconds:.0f} s"
        code = self.process.wait(timeout=10)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"the process ended with {code}"

    def _end(self) -> None:
        """End the process, and the ranks that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
