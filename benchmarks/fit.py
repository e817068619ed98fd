"""What fits on cards that people own: published models, and the time and memory that planning them takes.

    python benchmarks/fit.py          # a few minutes
    python benchmarks/fit.py --json

Each row is one `splitkit fit` in a process of its own: the tokens that fit, the fullest device, seconds and CPU seconds
of the whole process with its imports, and the most memory that it had. The configurations are in `benchmarks/configs/`,
written by hand from the published ones. The aim: 70 billion parameters in less than a minute and 2 GB. There is no peer
that plans from a configuration: accelerate's estimate has neither cache nor activations, and llama.cpp needs the
weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from splitkit.units import size
from splitkit.view.tables import table

CONFIGS = Path(__file__).parent / "configs"
CASES = (
    ("llama-3-70b", "2xrtx-3090", ()),
    ("llama-3-70b", "2xrtx-3090", ("--dtype", "int4")),
    ("llama-3-70b", "8x24GB", ()),
    ("llama-3-70b", "2xh100", ("--tokens", "8192", "--dtype", "float8", "--requests", "16")),
    ("llama-3-70b", "16xh100", ("--tokens", "4096", "--train", "adamw", "--recompute", "--microbatches", "32")),
    ("mixtral-8x22b", "4xrtx-4090", ("--dtype", "int4")),
    ("mixtral-8x22b", "4xh100", ("--tokens", "65536")),
    ("deepseek-v3", "8xh100", ()),
    ("deepseek-v3", "8xh200", ("--tokens", "32768")),
    ("deepseek-v3", "8xrtx-5090", ("--dtype", "int4")),
    ("whisper-large-v3", "rtx-3060", ("--requests", "16")),
    ("whisper-large-v3", "rtx-3090", ("--requests", "8", "--train", "adamw", "--tokens", "448")),
)


def measured(name: str, devices: str, options: tuple[str, ...]) -> dict[str, Any]:
    """Run one case in a process of its own, and return its row."""
    words = [sys.executable, "-m", "splitkit", "fit", str(CONFIGS / f"{name}.json"), "--devices", devices, *options]
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen([*words, "--json"], stdout=output)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        found = json.load(output)
    if process.returncode not in (0, 3):
        raise SystemExit(f"{name} on {devices}: {found['error']}")
    fullest = max(found["devices"], key=lambda device: device["total"] / device["limit"])
    return {
        "model": name,
        "devices": devices,
        "options": " ".join(options),
        "fits": found["fits"],
        "tokens": found["tokens"],
        "weights": sum(device["weights"] for device in found["devices"]),
        "fullest": {key: fullest[key] for key in ("weights", "cache", "activations", "total", "limit")},
        "instead": [one["text"] for one in found["alternatives"]],
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_rss": used.ru_maxrss * 1024,
    }


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    as_json = parser.parse_args().json
    rows = [measured(*case) for case in CASES]
    if as_json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    titles = (
        "model",
        "devices",
        "options",
        "fits",
        "tokens",
        "weights",
        "cache",
        "activations",
        "limit",
        "s",
        "CPU s",
        "RSS",
    )
    cells = [
        (
            row["model"], row["devices"], row["options"], "yes" if row["fits"] else "no", f"{row['tokens']:,}",
            *(size(row["fullest"][key]) for key in ("weights", "cache", "activations", "limit")),
            f"{row['seconds']:.0f}", f"{row['cpu_seconds']:.0f}", size(row["peak_rss"]),
        )
        for row in rows
    ]  # fmt: skip
    console = Console(width=200)
    console.print(table(titles, cells, titles[4:], "weights, cache and activations of the fullest device"))
    for row in rows:
        for instead in row["instead"]:
            console.print(f"{row['model']} on {row['devices']} {row['options']}: {instead}")


if __name__ == "__main__":
    main()
