"""Starts real processes with a gloo group, and collects what each prints as JSON lines."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import select
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiers import ON_RANKS

TESTS = Path(__file__).parents[1]


def launch(
    script: str, ranks: int | str, *args: str, seconds: float = 300, check: bool = True, at_once: bool = False
) -> list[dict[str, Any]]:
    """Run a script of the tests on some ranks; on "2,4", on two and then on four.

    Runs whose arguments are divided by "--" follow one another, or are all ``at_once``.

    Returns:
        The lines that the ranks printed, each with its ``rank``; with ``check=False`` also one with ``code`` and
        ``error`` for each rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        told = {
            "words": [str(TESTS / script), str(ranks), *args],
            "folder": folder,
            "at": str(Path.cwd()),
            "at_once": at_once,
        }
        code = _answer(told | {"environment": _environment()}, seconds)
        out, error = ((Path(folder) / kind).read_text() for kind in ("out", "err"))
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    failed = [line["error"][-3000:] for line in lines if "error" in line and line["code"]]
    assert code == 0, error[-3000:]
    assert not (check and failed), min(failed, key=lambda text: "Connection closed" in text)
    return [line for line in lines if not check or "error" not in line]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a splitkit command in this process, and its ranks as forks: `--nproc` or `--ranks` would start them anew."""
    from splitkit import cli

    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr("splitkit.cli.launcher.ranks", _forked)
        patch.setattr(sys, "argv", ["splitkit", *words])
        patch.delenv("RANK", raising=False)
        code = cli.main(list(words))
    return subprocess.CompletedProcess(words, code, out.getvalue())


def _forked(words: list[str], count: int, wait: float) -> tuple[int, str]:
    """As `splitkit.cli.launcher.ranks`."""
    (first,) = [line for line in launch("cli/commanded.py", count, *words) if "ended" in line]
    return first["ended"], json.dumps(first["data"])


def _environment() -> dict[str, str]:
    paths = [str(TESTS.parent), str(TESTS / "helpers"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


@cache
def _server() -> subprocess.Popen[str]:
    """The process that forks the scripts."""
    server = subprocess.Popen(
        [sys.executable, str(TESTS / "helpers" / "ranks.py")],
        env=_environment(), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    atexit.register(server.communicate)  # its input ends, and so does it
    return server


def _answer(told: dict[str, Any], seconds: float) -> int:
    """The exit code of a script; where there is none in time, the server ends with all that it started."""
    server, said = _server(), ""
    try:
        server.stdin.write(json.dumps(told) + "\n")
        server.stdin.flush()
        if select.select([server.stdout], [], [], seconds)[0]:
            said = server.stdout.readline()
        assert said, f"{told['words']} did not end in {seconds} s"
    finally:
        if not said:
            _server.cache_clear()
            atexit.unregister(server.communicate)
            os.killpg(server.pid, 9)
            server.wait()
    code, used = said.split()
    ON_RANKS[0] += float(used)
    return int(code)
