"""Starts the ranks of a command on this machine, such as ``splitkit train --nproc N``, and ends them all."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryFile
from typing import Any

from splitkit.errors import PipelineError

GRACE = 10.0
"""Seconds that ranks have to say what they waited for, once one has ended with an error."""


def ranks(words: Sequence[str], count: int, wait: float) -> tuple[int, str]:
    """Run a splitkit command on so many ranks.

    Args:
        words: the command and its options.
        count: how many.
        wait: seconds that the ranks wait for each other.

    Returns:
        The exit code of the first rank that failed, 0 if none did, and what rank 0 wrote to standard output; where it
        failed for want of another rank, what that rank wrote.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    env.setdefault("PYTHONHASHSEED", "0")  # loops over sets of strings run in one order on all ranks
    command = [sys.executable, "-m", "splitkit", *words]
    started: list[subprocess.Popen[bytes]] = []
    with _kept() as came, ExitStack() as stack:
        said = [stack.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in range(count)]  # a pipe may be full
        try:
            for rank, out in enumerate(said):
                own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(subprocess.Popen(command, env=own, stdout=out, start_new_session=True))
            code = _wait(started, wait, came)
        finally:
            for process in started:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for out in said:
            out.seek(0)
        return code, _answer_of([out.read() for out in said]) if code else said[0].read()


def _answer_of(said: Sequence[str]) -> str:
    """What the rank wrote whose error tells most: a rank that fails takes the others with it, which lose a connection.

    That is an error with a code that no lost connection has, else one with any code, else one that is no lost
    connection. Where no rank printed an error, it is what rank 0 wrote.
    """
    return max(said, key=lambda text: _worth(_error_in(text)))


_LOST = ("connection closed", "connection reset", "broken pipe", "connection refused")


def _worth(error: Any) -> int:
    """How much an error tells of the cause."""
    if not isinstance(error, dict):
        return 0
    if error.get("code") is None:
        return 1 if any(words in str(error.get("reason")).lower() for words in _LOST) else 2
    return 3 if error["code"] == "SK805" else 4


def _error_in(text: str) -> Any:
    """The error that a command printed as JSON; ``None`` where it printed something else."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data.get("error") if isinstance(data, dict) else None


def answer(words: Sequence[str], count: int, wait: float) -> tuple[int, Any]:
    """As `ranks`, of a command that answers with JSON: the data, ``None`` where there is none.

    Raises:
        PipelineError: what a rank failed with, with its code, SK805 where it has none.
    """
    code, out = ranks(words if "--json" in words else [*words, "--json"], count, wait)
    data = json.loads(out) if out else None
    if data is not None and (error := data.get("error")) is not None:
        raise PipelineError(error["code"] or "SK805", error["reason"], error["remedy"], error["nodes"])
    return code, data


@contextmanager
def _kept() -> Iterator[list[int]]:
    """Keep signals that would end this process, so that it ends the ranks first, also one that it is just starting."""
    came = list[int]()
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) not in (signal.SIG_IGN, None)  # as nohup leaves it, or what is not of Python
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    _leave(came)


def _leave(came: Sequence[int]) -> None:
    if came:
        raise KeyboardInterrupt if came[0] == signal.SIGINT else SystemExit(128 + came[0])


def _wait(started: Sequence[subprocess.Popen[bytes]], wait: float, came: Sequence[int]) -> int:
    end: float | None = None
    while True:
        _leave(came)
        codes = [process.poll() for process in started]
        failed = [code for code in codes if code]
        if failed and end is None:
            end = time.monotonic() + wait + GRACE
        if None not in codes or (end is not None and time.monotonic() > end):
            return failed[0] if failed else 0
        time.sleep(0.05)
