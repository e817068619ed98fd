"""Run torch's pipeline schedules over gloo on stages that sleep, beside splitkit's simulation; ``--json`` for machines.

Every rank is a process; a stage sleeps in forward, in the part of backward that gives the gradient of its input, and
in the part for its weights, so that a few cores serve any number of ranks. Each rank writes down what it runs. A row
says whether that is the order that was simulated, how many microbatches were in flight at most, as run and as
simulated, and how the measured step (the least of several) compares with the simulated one, in which messages take
no time. On torch 2.11 the V-shaped schedules do not run over gloo and are left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.torch_version import TorchVersion

from splitkit.pipeline.schedules import known_schedules, schedule_named
from splitkit.pipeline.simulate import ScheduleRun, StageCosts, simulate_schedule

WIDTH = 8

# Before its first step torch 2.11 sends a message between stages that follow each other, also on one rank; gloo cannot.
RUNNABLE = [
    name
    for name in (schedule.name for schedule in known_schedules() if schedule.torch_class)
    if name not in ("ZBVZeroBubble", "DualPipeV") or TorchVersion(torch.__version__) >= "2.13"
]


@dataclass(frozen=True)
class Case:
    """One pipeline."""

    schedule: str
    ranks: int
    microbatches: int
    forward: tuple[float, ...]
    """Seconds of each stage; each part of backward takes as many."""

    @property
    def costs(self) -> list[StageCosts]:
        """Torch runs all of the first stage's backward as its weight part, where it tells the parts apart."""
        stages = [StageCosts(seconds, seconds, seconds) for seconds in self.forward]
        if schedule_named(self.schedule).divided:
            stages[0] = StageCosts(self.forward[0], 0.0, 2 * self.forward[0])
        return stages

    def simulate(self) -> ScheduleRun:
        """As splitkit foresees it."""
        return simulate_schedule(self.costs, self.schedule, self.microbatches, ranks=self.ranks)


Log = list[tuple[int, str, int]]
"""Stage, what was done, microbatch."""


class Sleep(torch.autograd.Function):
    """The identity; sleeps, and notes what it does. The microbatch is the first entry of its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor | None, stage: SleepingStage) -> torch.Tensor:
        ctx.stage, ctx.microbatch, ctx.anchor = stage, int(x[0, 0]), anchor
        stage.act("F", ctx.microbatch)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:  # type: ignore[override]
        ctx.stage.act("I", ctx.microbatch)
        return grad.contiguous(), None if ctx.anchor is None else torch.zeros_like(ctx.anchor), None


class Weigh(torch.autograd.Function):
    """Zeros that depend on a weight, whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor, stage: SleepingStage) -> torch.Tensor:
        ctx.stage, ctx.microbatch = stage, int(x[0, 0])
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        ctx.stage.act("W", ctx.microbatch)
        return grad.sum().reshape(1), None, None


class SleepingStage(nn.Module):
    """Passes its input on."""

    def __init__(self, index: int, seconds: float, log: Log) -> None:
        super().__init__()
        self.index, self.seconds, self.log = index, seconds, log
        self.weight = nn.Parameter(torch.zeros(1))
        # The model's input needs no gradient; this lets the first stage have an input part all the same.
        self.anchor = nn.Parameter(torch.zeros(1)) if index == 0 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(x, self.anchor, self) + Weigh.apply(self.weight, x.detach(), self)

    def act(self, kind: str, microbatch: int) -> None:
        """Sleep, and say so."""
        time.sleep(self.seconds)
        self.log.append((self.index, kind, microbatch))


def run_rank(rank: int, cases: list[Case], repeat: int, folder: str) -> None:
    """One process: all cases, one after the other; writes what it measured to ``folder/rank.json``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=cases[0].ranks)
    measured = [measure(case, rank, repeat) for case in cases]
    Path(folder, f"{rank}.json").write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


def measure(case: Case, rank: int, repeat: int) -> dict[str, Any]:
    """This rank's part: seconds of its quickest step, and the log of the last."""
    log: Log = []
    mine = [stage for stage, owner in enumerate(case.simulate().order.rank_of) if owner == rank]
    plain, made_here = torch.zeros(1, WIDTH), torch.zeros(1, WIDTH, requires_grad=True)
    stages = [
        PipelineStage(
            SleepingStage(index, case.forward[index], log),
            index,
            len(case.forward),
            torch.device("cpu"),
            input_args=(made_here if index else plain,),
            output_args=(made_here,),
        )
        for index in mine
    ]
    made: Any = schedules.get_schedule_class(case.schedule)
    single = schedule_named(case.schedule).is_single
    schedule = made(stages[0] if single else stages, case.microbatches, loss_fn=lambda out, target: out.sum())
    numbered = torch.arange(case.microbatches, dtype=torch.float32)[:, None].expand(-1, WIDTH).contiguous()
    target = numbered if len(case.forward) - 1 in mine else None
    times = []
    for _ in range(repeat + 1):  # the first warms up
        log.clear()
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*((numbered,) if 0 in mine else ()), target=target, return_outputs=False)
        dist.barrier()
        times.append(time.perf_counter() - start)
    return {"seconds": min(times[1:]), "log": log}


def expected_log(case: Case, rank: int, run: ScheduleRun) -> list[set[tuple[int, str, int]]]:
    """What the rank notes if it runs its order: each set in any order, one set behind the other."""
    parts: list[set[tuple[int, str, int]]] = []
    for stage, kind, microbatch in run.order.ranks[rank]:
        if kind == "B" or (stage == 0 and kind == "W"):
            parts.append({(stage, "I", microbatch), (stage, "W", microbatch)})
        elif stage or kind == "F":
            parts.append({(stage, kind, microbatch)})
    return parts


def same_order(log: list[tuple[int, str, int]], parts: list[set[tuple[int, str, int]]]) -> bool:
    """Whether the log is that."""
    start = 0
    for part in parts:
        if set(log[start : start + len(part)]) != part:
            return False
        start += len(part)
    return start == len(log)


def most_in_flight(log: list[tuple[int, str, int]]) -> int:
    """The most microbatches, counted once a stage, whose forward has run and whose backward has not ended."""
    open_parts: dict[tuple[int, int], int] = {}
    most = 0
    for stage, kind, microbatch in log:
        key = stage, microbatch
        open_parts[key] = 2 if kind == "F" else open_parts[key] - 1
        most = max(most, sum(left > 0 for left in open_parts.values()))
    return most


def rows_of(cases: list[Case], repeat: int) -> list[dict[str, Any]]:
    """Run all cases, of one number of ranks, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (cases, repeat, folder), nprocs=cases[0].ranks, start_method="spawn")
        measured = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(cases[0].ranks)]
    rows = []
    for number, case in enumerate(cases):
        run, ranks = case.simulate(), [results[number] for results in measured]
        logs = [[(stage, kind, microbatch) for stage, kind, microbatch in rank["log"]] for rank in ranks]
        seconds = max(rank["seconds"] for rank in ranks)
        row = {
            "same_order": all(same_order(log, expected_log(case, rank, run)) for rank, log in enumerate(logs)),
            "in_flight": [most_in_flight(log) for log in logs],
            "in_flight_simulated": list(run.in_flight),
            "seconds": seconds,
            "seconds_simulated": run.seconds,
            "ratio": seconds / run.seconds if run.seconds else None,
        }
        rows.append({**asdict(case), **row})
    return rows


def cases_of(names: list[str], ranks: int, microbatches: int, seconds: float, heavy: float) -> list[Case]:
    """Each schedule with equal stages, with a heavy first, and with a heavy last."""
    cases = []
    for name in names:
        count = ranks * schedule_named(name).usual_stages_per_rank
        equal = (seconds,) * count
        more = (heavy * seconds,)
        shapes = [equal] if heavy == 1 else [equal, more + equal[1:], equal[1:] + more]
        cases += [Case(name, ranks, microbatches, shape) for shape in shapes]
    return cases


def show(rows: list[dict[str, Any]], summary: dict[str, Any]) -> None:
    """Print the table and the summary."""
    table = Table("schedule", "stages", "order", "in flight", "simulated", "seconds", "simulated", "ratio")
    for row in rows:
        stages = " ".join(f"{seconds * 1e3:g}" for seconds in row["forward"])
        flights = (",".join(map(str, row[name])) for name in ("in_flight", "in_flight_simulated"))
        times = f"{row['seconds']:.3f}", f"{row['seconds_simulated']:.3f}", f"{row['ratio'] or 0:.3f}"
        table.add_row(row["schedule"], stages, "same" if row["same_order"] else "ANOTHER", *flights, *times)
    console = Console(width=max(Console().width, 160))
    console.print(table)
    console.print_json(json.dumps(summary))


def main() -> None:
    """Run the schedules and print a table, or with ``--json`` one object with rows and a summary."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--schedules", nargs="+", default=RUNNABLE, choices=RUNNABLE)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.02, help="that a stage's forward sleeps")
    parser.add_argument("--heavy", type=float, default=2.0, help="times as much in one stage; 1: equal stages only")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = rows_of(cases_of(args.schedules, args.ranks, args.microbatches, args.seconds, args.heavy), args.repeat)
    ratios = [row["ratio"] for row in rows if row["ratio"]]
    summary = {
        "torch": torch.__version__,
        "same_order": sum(row["same_order"] for row in rows),
        "same_in_flight": sum(row["in_flight"] == row["in_flight_simulated"] for row in rows),
        "rows": len(rows),
        "ratio_least": min(ratios, default=None),
        "ratio_most": max(ratios, default=None),
    }
    if args.json:
        print(json.dumps({"rows": rows, "summary": summary}))
    else:
        show(rows, summary)


if __name__ == "__main__":
    main()
