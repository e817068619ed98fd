"""Starts real processes with a gloo group, and collects what each prints as JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def launch(script: str, ranks: int, *args: str, seconds: float = 300, check: bool = True) -> list[dict[str, Any]]:
    """Run a script of this folder on some ranks.

    Returns:
        The lines that the ranks printed, each with its ``rank``; with ``check=False`` also ``code`` and ``error`` of
        each rank as a last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "SPLITKIT_STORE": f"file://{folder}/store",
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }  # fmt: skip
        run = [
            subprocess.Popen(
                [sys.executable, str(HERE / script), *args], env=env | {"RANK": str(rank)}, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        lines: list[dict[str, Any]] = []
        try:
            for rank, process in enumerate(run):
                out, error = process.communicate(timeout=seconds)
                lines += [json.loads(line) | {"rank": rank} for line in out.splitlines() if line.startswith("{")]
                lines.append({"rank": rank, "code": process.returncode, "error": error})
        finally:
            for process in run:
                process.kill()
    failed = [line["error"][-3000:] for line in lines if line.get("code")]
    assert not (check and failed), min(failed, key=lambda text: "Connection closed" in text)
    return [line for line in lines if not check or "code" not in line]
