"""Starts real processes with a gloo group, and collects what each prints as JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def launch(script: str, ranks: int | str, *args: str, seconds: float = 300, check: bool = True) -> list[dict[str, Any]]:
    """Run a script of the tests on some ranks; on "2,4", on two and then on four.

    Returns:
        The lines that the ranks printed, each with its ``rank``; with ``check=False`` also one with ``code`` and
        ``error`` for each rank.
    """
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    run = subprocess.Popen(
        [sys.executable, str(HERE / "ranks.py"), str(HERE / script), str(ranks), *args],
        env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, error = run.communicate(timeout=seconds)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, 9)
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    failed = [line["error"][-3000:] for line in lines if "error" in line and line["code"]]
    assert run.returncode == 0, error[-3000:]
    assert not (check and failed), min(failed, key=lambda text: "Connection closed" in text)
    return [line for line in lines if not check or "error" not in line]
