"""Starts the ranks of a command such as ``splitkit train --nproc N`` on this machine, and ends all of them.

torchrun's `elastic_launch` ends all ranks as soon as one has failed. Where rank 0 loses its connection and exits, and
rank 1 prints the cause two seconds later, `elastic_launch` is done after 0.5 s and has only the output of rank 0
(torch 2.13). Here the other ranks have time to print the cause, and the error that tells most is shown.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from tempfile import TemporaryFile
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from splitkit.errors import PipelineError

if TYPE_CHECKING:
    from splitkit.testing.models import Example


GRACE = 10.0
"""Seconds that the other ranks have to report what they waited for after one has failed."""


def ranks(words: Sequence[str], count: int, wait: float) -> tuple[int, str]:
    """Run a splitkit command on several ranks.

    Args:
        words: the command and its options.
        count: the number of ranks.
        wait: the seconds that the ranks wait for each other.

    Returns:
        The exit code of the first rank that failed, or 0, and a rank's standard output: that of rank 0 if none failed,
        else that of the rank whose error says most, with what the system says of ranks that could not report an error.
    """
    raise_interrupt()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))  # port 0: the system chooses a free one
        port = found.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # torch's C++ code prints a stack for each lost connection, and the error of a rank says what was lost
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    env.setdefault("PYTHONHASHSEED", "0")  # loops over sets of strings must run in the same order on all ranks
    command = [sys.executable, "-m", "splitkit", *words]
    started: list[subprocess.Popen[bytes]] = []
    with _kept() as came, ExitStack() as stack:
        reading, writing = os.pipe()
        stack.callback(os.close, writing)
        env[LAUNCHER] = str(reading)
        said = [
            stack.enter_context(TemporaryFile("w+", encoding="utf-8")) for _ in range(count)
        ]  # files: a rank would block on a full pipe
        try:
            for rank, out in enumerate(said):
                own = env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                started.append(
                    subprocess.Popen(command, env=own, stdout=out, start_new_session=True, pass_fds=(reading,))
                )
            code = _wait(started, wait, came)
            fates = [fate for rank, process in enumerate(started) if (fate := _fate(rank, process))] if code else []
        finally:
            os.close(reading)
            for process in started:
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)  # the whole session: compilers and loaders, too
                    process.wait()
        for out in said:
            out.seek(0)
        return code, _with_fates(_answer_of([out.read() for out in said]), fates) if code else said[0].read()


def _fate(rank: int, process: subprocess.Popen[bytes]) -> str:
    """Say how a rank ended or hangs, if it could not say so itself."""
    if process.returncode is not None:
        code = process.returncode
        return f"rank {rank} was ended by {signal.Signals(-code).name}" if code < 0 else ""
    return f"rank {rank} is stopped (SIGSTOP)" if _is_stopped(process) else f"rank {rank} hangs"


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process is stopped, by the letter that ``ps`` shows on Linux and macOS."""
    command = ["ps", "-o", "state=", "-p", str(process.pid)]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, text=True, capture_output=True, timeout=5).stdout.strip().startswith("T")
    return False


def _with_fates(text: str, fates: Sequence[str]) -> str:
    """Add to the error that a rank printed how others ended; make one if none printed any."""
    if not fates:
        return text
    error = _error_in(text)
    if not isinstance(error, dict):
        remedy = "Look at standard error above; the system ends processes by SIGKILL where memory runs out."
        return json.dumps({"error": {"code": "SK805", "reason": "; ".join(fates), "remedy": remedy, "nodes": []}})
    return json.dumps({"error": {**error, "reason": "; ".join([str(error.get("reason")), *fates])}})


def _answer_of(said: Sequence[str]) -> str:
    """Return the output of the rank whose error says most about the cause.

    A rank that fails takes the others with it, and these only report a lost connection. So an error with another code
    than SK805 (a lost rank) comes first, then any code, then an error other than a lost connection; without an error it
    is the output of rank 0. Of several that name the same cause, the shortest is that of the rank that failed: the
    others add what they were waiting for.
    """
    return max(said, key=lambda text: (worth := _worth(_error_in(text)), -len(text) if worth else 0))


_LOST = ("connection closed", "connection reset", "broken pipe", "connection refused", "timed out", "connect timeout")


def _worth(error: Any) -> int:
    """Return how much an error says about the cause, from 0 to 5."""
    if not isinstance(error, dict):
        return 0
    if error.get("code") is None:
        return 1 if any(words in str(error.get("reason")).lower() for words in _LOST) else 2
    if error["code"] != "SK805":
        return 5
    return 3 if str(error.get("reason")).startswith("another rank") else 4


def _error_in(text: str) -> Any:
    """Return the error that a command printed as JSON, or ``None`` if it printed something else."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data.get("error") if isinstance(data, dict) else None


def answer(words: Sequence[str], count: int, wait: float, restarts: int = 0) -> tuple[int, Any]:
    """Run a command as `ranks` does and return its exit code and JSON data, ``None`` if it printed nothing.

    Args:
        words: the command and its options.
        count: the number of ranks.
        wait: the seconds that the ranks wait for each other.
        restarts: how often all ranks are started anew, with ``--resume``, after a rank failed or was lost (SK805).

    Raises:
        PipelineError: the error of a rank with its code, or SK805 if it has none.
    """
    words = words if "--json" in words else [*words, "--json"]
    code, out = ranks(words, count, wait)
    for attempt in range(1, restarts + 1):
        error = _error_in(out)
        if not isinstance(error, dict) or error["code"] != "SK805":
            break
        print(f"{error['reason']}; restart {attempt} of {restarts}", file=sys.stderr)
        code, out = ranks(words if "--resume" in words else [*words, "--resume"], count, wait)
    data = json.loads(out) if out else None
    if data is not None and (error := data.get("error")) is not None:
        raise PipelineError(error["code"] or "SK805", error["reason"], error["remedy"], error["nodes"])
    return code, data


@contextmanager
def _kept() -> Iterator[list[int]]:
    """Hold back signals that would end this process, so that it ends the ranks first.

    A handler that raised at once could leave a rank behind that `Popen` is just starting.
    """
    came = list[int]()
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number)
        not in (signal.SIG_IGN, None)  # ignored (nohup does that), or not installed by Python
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
    """Wait until all ranks have ended; after one has failed, for no longer than the others can take to report it."""
    end: float | None = None
    while True:
        _leave(came)
        codes = [process.poll() for process in started]
        failed = [code for code in codes if code]
        if failed and end is None:
            end = time.monotonic() + wait + GRACE
        running = [process for process, code in zip(started, codes, strict=True) if code is None]
        if not running or (end is not None and (time.monotonic() > end or all(map(_is_stopped, running)))):
            return failed[0] if failed else 0
        time.sleep(0.05 if end is None else 0.2)


# Remembers an interrupt (SIGINT) that the import of a module has swallowed.
#
# Python raises ``KeyboardInterrupt`` wherever it is. If that is in C code which imports a module and goes on without
# it, as torch's does with numpy (2.13), the exception is cleared: the command would end with an error about a module
# that is half imported, or would start its ranks and train.


class Interrupt:
    """Handles SIGINT as Python does.

    Attributes:
        came: whether there was one.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        """Note the interrupt, and raise it."""
        self.came = True
        raise KeyboardInterrupt


@contextmanager
def remembered_interrupts() -> Iterator[Interrupt]:
    """Remember whether SIGINT came, unless something else than Python handles it."""
    found, before = Interrupt(), signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield found
        return
    signal.signal(signal.SIGINT, found)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)


def raise_interrupt() -> None:
    """Raise ``KeyboardInterrupt`` if SIGINT came and was swallowed."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupt) and handler.came:
        raise KeyboardInterrupt


# Joins the process of a rank to its process group, and ends it with the launcher that started it.


T = TypeVar("T")
LAUNCHER = "SPLITKIT_LAUNCHER_PIPE"
"""The environment variable with the file descriptor of a pipe that the launcher holds open for as long as it lives."""


def end_with_launcher() -> None:
    """End this rank, and what it started, as soon as its launcher has ended, even by SIGKILL.

    The launcher has the only writing end of a pipe, which the system closes when it ends; a thread of the rank waits
    for that. Linux's ``PR_SET_PDEATHSIG`` would not work on macOS, and would not end what the rank started.
    """
    descriptor = os.environ.pop(LAUNCHER, None)
    if descriptor is not None:
        threading.Thread(target=_wait_for_end, args=(int(descriptor),), name="launcher", daemon=True).start()


def _wait_for_end(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1):
            pass
    except OSError:
        return
    is_leader = os.getpgrp() == os.getpid()
    (os.killpg if is_leader else os.kill)(os.getpid(), signal.SIGKILL)


def in_group(work: Callable[[], T], seconds: float, backend: str | None = None) -> T:
    """Join the process group that the environment names, do the work of this rank, and leave the group.

    Args:
        work: what the rank does.
        seconds: how long the ranks wait for each other.
        backend: torch's backend; by default the one for the rank's accelerator.
    """
    import torch
    import torch.distributed as dist

    from splitkit.runtime.ranks.rank_device import backend_of_rank

    # torch's default is all cores in every process, and the ranks share them
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _join(backend or backend_of_rank(int(os.environ.get("LOCAL_RANK", "0"))), seconds)
    found = work()
    dist.destroy_process_group()  # not after an error: it would wait for the other ranks
    return found


def _join(backend: str, seconds: float) -> None:
    """Join the default process group that the environment names.

    Where torchrun restarts its workers (``--max-restarts``), they meet at the same store as those before, and would
    find addresses of ranks that are gone: each attempt therefore has keys of its own. Several agents count restarts
    differently, so this is done for one agent only.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=seconds)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        dist.init_process_group(backend, timeout=limit)
        return
    public: Any = dist
    store, rank, size = next(rendezvous("env://", timeout=limit))
    own = public.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)


def rolled_batch(example: Example, count: int, step: int, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make a batch of different microbatches: an example's inputs, each rolled along the last dimension.

    Args:
        example: the inputs of one microbatch.
        count: the number of microbatches.
        step: the number of the step, on which the batch depends.
        seed: the seed of the run.
    """
    import torch

    from splitkit._torch import pytree

    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    shifts = torch.randint(2**20, (count,), generator=generator).tolist()

    def rolled(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        return torch.cat([value.roll(shift, -1) for shift in shifts])

    args, kwargs = pytree.tree_map(rolled, (tuple(example.args), dict(example.kwargs)))
    return args, kwargs


def peak_of_process() -> int:
    """Return the peak memory of this process in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
