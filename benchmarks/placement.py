"""Placement on the published workloads, beside published values: ``--json`` for machines.

contiguous     stages: the most loaded device, each device's forward units a convex set, in an order without cycles
noncontiguous  sets: the most loaded device
latency        one sample: the makespan, each accelerator running one subgraph
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table

from splitkit.solvers.placement.latency_solver import latency
from splitkit.solvers.placement.problem import Problem, Slot
from splitkit.solvers.placement.set_solver import noncontiguous
from splitkit.solvers.placement.solution import InfeasibleError, Solution
from splitkit.solvers.placement.stages.contiguous import contiguous

WORKLOADS = Path(__file__).parent / "workloads"
FOLDERS = {"contiguous": "throughput", "noncontiguous": "throughput", "latency": "latency"}
SOLVERS: dict[str, Callable[..., Solution]] = {
    "contiguous": contiguous,
    "noncontiguous": noncontiguous,
    "latency": latency,
}
PUBLISHED: dict[tuple[str, str], dict[str, float | None]] = {
    ("throughput", "LayerGraphs_bert24_inference"): {"expert": 20.084, "pipedream": 17.790, "optimum": 17.7899},
    ("throughput", "LayerGraphs_bert24_training"): {"expert": 49.405, "pipedream": 187.9, "optimum": 41.7458},
    ("throughput", "LayerGraphs_resnet50_inference"): {"expert": 43.918, "pipedream": 39.398, "optimum": 33.7747},
    ("throughput", "LayerGraphs_resnet50_training"): {"expert": 112.108, "pipedream": 83.674, "optimum": 78.6318},
    ("throughput", "OperatorGraphs_bert_l-3_inference"): {"expert": None, "pipedream": 37.456, "optimum": 27.9186},
    ("throughput", "OperatorGraphs_bert_l-3_training"): {"expert": None, "pipedream": 122.99, "optimum": 65.3031},
    ("latency", "LayerGraphs_bert24_inference"): {"greedy": 100.219},
    ("latency", "OperatorGraphs_bert_l-3_inference"): {"greedy": 416.204},
}
"""What the programs beside the paper give (https://github.com/msr-fiddle/dnn-partitioning), by folder and file."""


@dataclass(frozen=True)
class Workload:
    """A file, and the problem that it states."""

    name: str
    folder: str
    ids: list[int]
    devices: list[str]
    problem: Problem


def read(path: Path) -> Workload:
    """Read the published format; `benchmarks/workloads/README.md` describes it."""
    data = json.loads(path.read_text())
    nodes, index = data["nodes"], {node["id"]: place for place, node in enumerate(data["nodes"])}
    readers: dict[int, dict[int, None]] = {}
    cost: dict[int, float] = {}
    for edge in data["edges"]:
        readers.setdefault(index[edge["sourceId"]], {})[index[edge["destId"]]] = None
        cost[index[edge["sourceId"]]] = max(edge["cost"], cost.get(index[edge["sourceId"]], 0.0))
    accelerator = [node["fpgaLatency"] if node["supportedOnFpga"] else np.inf for node in nodes]
    colours = [node.get("colorClass") for node in nodes]
    number = {colour: place for place, colour in enumerate(dict.fromkeys(c for c in colours if c is not None))}
    accelerators, cpus = int(data["maxFPGAs"]), int(data["maxCPUs"])
    problem = Problem.of(
        np.array([accelerator, [node["cpuLatency"] for node in nodes]], np.float64),
        [(cost[maker], (maker, *those)) for maker, those in readers.items()],
        _order([(index[edge["sourceId"]], index[edge["destId"]]) for edge in data["edges"]], nodes),
        [Slot(0, data["maxSizePerFPGA"])] * accelerators + [Slot(1, cpu=True)] * cpus,
        nbytes=np.array([int(np.ceil(node["size"])) for node in nodes]),
        colours=np.array([-1 if colour is None else number[colour] for colour in colours]),
    )
    names = [f"acc{d}" for d in range(accelerators)] + [f"cpu{d}" for d in range(cpus)]
    return Workload(path.stem, path.parent.name, [node["id"] for node in nodes], names, problem)


def _order(edges: list[tuple[int, int]], nodes: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """The order holds for forward nodes. A colour without them gets an artificial one: edges of its backward nodes
    count reversed (Tarnawski et al., NeurIPS 2020).
    """
    back = [bool(node["isBackwardNode"]) for node in nodes]
    colours = [node.get("colorClass") for node in nodes]
    group = [("alone", place) if colour is None else colour for place, colour in enumerate(colours)]
    forward = {group[place] for place, late in enumerate(back) if not late}
    straight = [(a, b) for a, b in edges if not back[a] and not back[b]]
    return straight + [(b, a) for a, b in edges if back[a] and back[b] and not {group[a], group[b]} <= forward]


def row(workload: Workload, objective: str, seconds: float | None) -> dict[str, Any]:
    """Solve one workload."""
    solver = SOLVERS[objective] if seconds is None else partial(SOLVERS[objective], seconds=seconds)
    head = {"workload": workload.name, "nodes": len(workload.ids), "objective": objective}
    published = PUBLISHED.get((workload.folder, workload.name), {})
    start = time.monotonic()
    try:
        found = solver(workload.problem)
    except InfeasibleError as error:
        return {**head, "value": None, "infeasible": str(error), "published": published}
    devices = [workload.devices[d] for d in found.device]
    return {
        **head,
        "value": found.value,
        "bound": found.bound,
        "gap": found.gap,
        "optimal": found.optimal,
        "seconds": time.monotonic() - start,
        "solver": found.solver,
        "published": published,
        "devices": {str(node): device for node, device in zip(workload.ids, devices, strict=True)},
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is claimed."""
    solved = [r for r in rows if r["value"] is not None]
    return {
        "workloads": len(rows),
        "proven": sum(r["optimal"] for r in solved),
        "largest_gap": max((r["gap"] for r in solved), default=None),
        "longest_seconds": max((r["seconds"] for r in solved), default=None),
    }


def own_stdout() -> TextIO:
    """Standard output for this program alone: what else is written there from now on goes to standard error.

    HiGHS prints a line there, whatever its options (``HighsMipSolverData::transformNewIntegerFeasibleSolution``).
    """
    sys.stdout.flush()
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return stream


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="workloads; those in benchmarks/workloads by default")
    parser.add_argument("--objective", choices=sorted(SOLVERS), default="contiguous")
    parser.add_argument("--seconds", type=float, help="for each search; the solver's own default if not given")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    out = own_stdout()
    files = options.files or sorted((WORKLOADS / FOLDERS[options.objective]).glob("*.json"))
    rows = [row(read(path), options.objective, options.seconds) for path in files]
    data = {"rows": rows, "summary": summary(rows)}
    if options.json:
        print(json.dumps(data, indent=1), file=out, flush=True)
        return
    table = Table()
    columns = ["workload", "nodes", "value", "bound", "gap", "seconds", "solver", "published"]
    for title in columns:
        table.add_column(title)
    for found in rows:
        cells = [found.get(title) for title in columns]
        table.add_row(*(f"{cell:.6g}" if isinstance(cell, float) else str(cell) for cell in cells))
    Console(width=200, file=out).print(table, data["summary"])


if __name__ == "__main__":
    main()
