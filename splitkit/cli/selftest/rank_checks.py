"""Checks of pipelines on ranks: equal to the unsplit model, over NCCL or the host, and what a killed rank leaves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import monotonic

import torch

from splitkit.cli.selftest.check_runs import FAILED, NOT_RUN, OK, Finding

_APART = 1e-5
"""The most that losses, gradients and weights may differ by, as for ``train --check``: sums run in another order."""
_BOUND = 30.0
"""Seconds in which the other ranks must have ended after one is killed."""


def _trained(check: str, kinds: Sequence[str], devices: Sequence[torch.device]) -> Iterator[Finding]:
    backend, placed = _on(devices)
    for kind in kinds:
        yield _trial(check, kind, backend, placed)


def _trial(check: str, kind: str, backend: str, devices: Sequence[str]) -> Finding:
    codes, said, _ = _launch(kind, backend, devices)
    lines = [json.loads(line) for line in said if line.startswith("{")]
    what = f"{kind}, ranks on {' and '.join(devices)} over {backend}"
    if any(codes) or len(lines) != len(devices):
        return Finding(check, what, f"ranks ended with {codes}", "equal", FAILED, "\n".join(said))
    most = max(lines, key=lambda line: line["apart"])
    figure = f"{most['apart']:.1e} apart, most in {most['worst']}"
    return Finding(check, what, figure, f"at most {_APART:.0e}", OK if most["apart"] <= _APART else FAILED)


def _on(devices: Sequence[torch.device]) -> tuple[str, list[str]]:
    """Return the backend and the devices of two ranks: the two that are given, or both on the first."""
    first = str(devices[0])
    if devices[0].type == "cpu":
        return "gloo", [first, first]
    if devices[0].type == "cuda" and len(devices) > 1 and devices[1].type == "cuda":
        return "nccl", [first, str(devices[1])]
    return "host", [first, first]


def _nccl(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = "ranks: one rank of NCCL"
    if devices[0].type != "cuda":
        yield Finding(check, "a pipeline of one rank", f"{devices[0]} has no NCCL", "", NOT_RUN)
        return
    yield _trial(check, "forward plan", "nccl", [str(devices[0])])


def _killed(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = "ranks: a killed rank"
    backend, placed = _on(devices)
    codes, said, seconds = _launch("killed rank", backend, placed)
    named = any("rank 1" in line for line in said)
    good = named and codes[0] not in (0, None) and seconds <= _BOUND
    figure = f"rank 0 {'named rank 1 and ' if named else ''}ended with {codes[0]} after {seconds:.1f} s"
    limit = f"named, within {_BOUND:.0f} s"
    yield Finding(check, f"1f1b over {backend}", figure, limit, OK if good else FAILED, "" if good else "\n".join(said))


def _launch(kind: str, backend: str, devices: Sequence[str]) -> tuple[list[int | None], list[str], float]:
    """Run a trial on ranks; return their exit codes, all that they printed, and the seconds after the first ended."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(devices))}
    env |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "splitkit.cli.selftest.rank_trial", kind, backend, device],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, device in enumerate(devices)
    ]
    said = [*started[-1].communicate()[0].splitlines()]
    first = monotonic()
    for process in started[:-1]:
        try:
            said += process.communicate(timeout=_BOUND)[0].splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            said += process.communicate()[0].splitlines()
    return [process.returncode for process in started], said, monotonic() - first


CHECKS: dict[str, Callable[[Sequence[torch.device]], Iterable[Finding]]] = {
    "ranks: forward plan": partial(_trained, "ranks: forward plan", ("forward plan", "forward plan, ZBV")),
    "ranks: joint plan": partial(_trained, "ranks: joint plan", ("joint plan", "joint plan, ZBV")),
    "ranks: one rank of NCCL": _nccl,
    "ranks: a killed rank": _killed,
}
"""Name of a check -> what runs it on devices, the first of which is tested."""
