"""Compare the seconds of ``costs.measured`` and ``costs.roofline`` with real forward runs: ``--json`` for machines.

For each model: the sum of its nodes' seconds over the time of a real run of the same graph (without autograd, on the
CPU, the median of several runs just before and just after the measuring), and how long measuring takes.

measured    measured sum / real run; each op is timed in a run, with its dispatch
cpu         roofline(gm, "cpu") sum / real run, for another CPU than this one: only its constancy over models counts
rank        Spearman's rank correlation of the two prices, over the nodes that both give a price
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import spearmanr
from torch import fx, nn
from torch.utils.benchmark import Timer

import splitkit as sk
from splitkit import costs
from splitkit.costs.measuring_run import Measured, measured
from splitkit.testing import models

ROUNDS = 7


class Residual(nn.Module):
    """A residual network of 3x3 convolutions with batch norm, as in ResNet-18."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, stride=2, padding=3)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
            )
            for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of images."""
        x = nn.functional.max_pool2d(self.stem(x), 3, 2, 1)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


def graphs(layers: int) -> Iterator[tuple[str, fx.GraphModule, tuple[Any, ...], dict[str, Any]]]:
    """(name, graph, args, kwargs)."""
    for name in models.NAMES:
        example = models.build(name, layers=layers)
        yield name, sk.capture(example.model, **example.kwargs), (), example.kwargs
    images = torch.randn(8, 3, 112, 112)
    yield "residual", sk.capture(Residual(), images), (images,), {}


def real(run: Callable[[], Any], rounds: int) -> float:
    """Seconds of a run."""
    timer = Timer("run()", timer=time.perf_counter, globals={"run": run}, num_threads=torch.get_num_threads())
    with torch.no_grad():
        return statistics.median(timer.timeit(1).median for _ in range(rounds))


def rank(gm: fx.GraphModule, one: Measured, other: costs.Costs) -> float:
    """Spearman's correlation of the prices of the nodes that both give one."""
    pairs = [(one.seconds(n), other.seconds(n)) for n in gm.graph.nodes]
    return float(spearmanr([p for p in pairs if min(p) > 0]).statistic)


def measure(name: str, gm: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """One row: ms, and ratios."""
    before = real(lambda: gm(*args, **kwargs), ROUNDS)
    start = time.perf_counter()
    found = measured(gm, kwargs or args)
    took = time.perf_counter() - start
    whole = statistics.mean([before, real(lambda: gm(*args, **kwargs), ROUNDS)])
    guess = costs.roofline(gm, "cpu")
    return {
        "model": name,
        "nodes": len(gm.graph.nodes),
        "real_ms": whole * 1e3,
        "measured": sum(map(found.seconds, gm.graph.nodes)) / whole,
        "cpu": sum(map(guess.seconds, gm.graph.nodes)) / whole,
        "rank": rank(gm, found, guess),
        "workspace_mb": max(map(found.workspace, gm.graph.nodes)) / 1e6,
        "seconds_to_measure": took,
    }


def summary_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The range of each ratio, and the longest measuring."""
    summary: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    for ratio in ("measured", "cpu", "rank"):
        found = [row[ratio] for row in rows]
        summary |= {f"{ratio}_least": min(found), f"{ratio}_most": max(found)}
    return summary | {"seconds_to_measure_most": max(row["seconds_to_measure"] for row in rows)}


def show(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print the table and the summary."""
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    console = Console(width=max(Console().width, 120))
    console.print(table)
    console.print_json(json.dumps(summary))


def main() -> None:
    """Measure all models and print a table, or with ``--json`` one object with rows and a summary."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", help="only these")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [measure(*case) for case in graphs(args.layers) if not args.models or case[0] in args.models]
    summary = summary_of(rows)
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary}))
    else:
        show(rows, summary)


if __name__ == "__main__":
    main()
