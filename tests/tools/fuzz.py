"""Run the fuzzer by hand: ``python tests/tools/fuzz.py --plans 20000 --seed 1000``."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

HERE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE / "tests" / "helpers"))

from fuzzing import fuzz  # noqa: E402


def main() -> None:
    """Try random plans on random graphs, and print how many were legal and how many were refused."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--plans", type=int, default=1000, help="how many plans to try (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first graph (default: 0)")
    parser.add_argument("--judge", action="store_true", help="count refused plans that some order of parts disproves")
    args = parser.parse_args()
    start = time.perf_counter()
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("plans", total=args.plans)
        report = fuzz(args.plans, args.seed, tick=lambda done: progress.update(task, completed=done), judge=args.judge)
    print(f"{report}; {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
