"""Compare orders of the messages of pipeline schedules: torch's, naive ones, and ours with its bound; ``--json``.

A row is a schedule on ranks with microbatches, links and communicators (`splitkit.pipeline.message_order`). It has the
simulated step of each order of messages in milliseconds, or ``deadlock`` if they wait for one another under rendezvous:

* ``free``: no message waits for another one on a communicator of its rank (one at a time from rank to rank).
* ``torch``: where the installed torch places messages (``_add_send_recv``; its class for 1F1B, which runs one stage on
  each rank, joins a send and a receive into one batch instead).
* ``deferred``: torch 2.13 with ``defer_pp_recv=True`` (pytorch#178815).
* ``late``: each receive right before the action that reads it, each send right after its action (pytorch#172833).
* ``early``: as ``late``, but the receive of the next action goes before the send.
* ``ours``: `splitkit.order_messages`; ``bound``: no order has a shorter step. ``gain`` is torch / ours - 1, and
  ``gain ±10 %`` the same if actions and messages take up to 10 % more or less than was planned (mean of 5 draws).

Each rank has 10 ms of forward, input-gradient and weight-gradient time for each microbatch, shared by its stages, and
messages of 64 MiB: a Llama layer of width 8192 with 4096 tokens in bfloat16. On ``nvlink`` they take 0.15 ms; on
``nodes`` those between the two halves of the ranks go over 400 Gbit/s Ethernet, 1.35 ms.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.distributed.pipelining import schedules as torchs

from splitkit.costs.links import Links
from splitkit.errors import ScheduleError
from splitkit.pipeline.message_order import Communicators, MessageOrder, is_message
from splitkit.pipeline.order import ACTION, PipelineOrder
from splitkit.pipeline.order_messages import order_messages
from splitkit.pipeline.schedules import pipeline_order, schedule_named
from splitkit.pipeline.simulate import StageCosts, price_actions, simulate_schedule, times_of_messages
from splitkit.pipeline.torch_orders import torch_cells

SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SECONDS, BYTES = 0.010, 64 * 2**20
Rows = Sequence[Sequence[str]]


def deferred(order: PipelineOrder, rows: Rows) -> Rows:
    """Torch's own pass over its rows."""
    actions: Any = {rank: [torchs._Action.from_str(cell) for cell in row] for rank, row in enumerate(rows)}
    made: Any = torchs._defer_recv_ops(actions, lambda stage: order.rank_of[stage])  # type: ignore[attr-defined]
    return [list(map(str, made[rank])) for rank in range(len(rows))]


def late(order: PipelineOrder, rows: Rows) -> Rows:
    """Each receive right before the action that reads it."""
    return [[cell for unit in units(row) for cell in unit] for row in rows]


def early(order: PipelineOrder, rows: Rows) -> Rows:
    """Each receive before the sends of the action before."""
    found = []
    for row in rows:
        made = list[str]()
        for unit in units(row):
            at = len(made)
            while at and "SEND" in made[at - 1]:
                at -= 1
            receives = [cell for cell in unit if "RECV" in cell]
            made[at:at] = receives
            made += [cell for cell in unit if cell not in receives]
        found.append(made)
    return found


def units(row: Sequence[str]) -> list[list[str]]:
    """Each action of a row with its receive before it and its send after it."""
    there, found = set(row), list[list[str]]()
    for cell in row:
        if is_message(cell):
            continue
        found.append([cell])
        if action := ACTION.fullmatch(cell):
            stage, kind, number = action.groups()
            letter = "F" if kind == "F" else "B"
            ends = [f"{stage}{what}_{letter}{number}" for what in ("RECV", "SEND")] if kind != "W" else []
            found[-1] = [*(end for end in ends[:1] if end in there), cell, *(end for end in ends[1:] if end in there)]
    return found


NAIVE: dict[str, Callable[[PipelineOrder, Rows], Rows]] = {"deferred": deferred, "late": late, "early": early}


def links_of(name: str, ranks: int) -> Links:
    """The links of a row, by name."""
    if name == "nvlink":
        return Links.preset("nvlink4")
    return Links.nodes(ranks // 2, inside="nvlink4", between="ethernet400")


def row_of(name: str, ranks: int, microbatches: int, links: str, communicators: Communicators) -> dict[str, Any]:
    """One row of the table, with steps in seconds; ``None`` is a deadlock."""
    local = schedule_named(name).usual_stages_per_rank
    order = pipeline_order(name, local * ranks, microbatches, ranks)
    stages = [StageCosts(*[SECONDS / local] * 3, activation_bytes=BYTES)] * (local * ranks)
    on, rows = links_of(links, ranks), torch_cells(order)
    row: dict[str, Any] = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "links": links}
    row |= {"communicators": communicators, "free": simulate_schedule(stages, order, links=on).seconds}
    torchs_own = MessageOrder(order.name, order.ranks, rows, communicators)
    row["torch"] = simulate_schedule(stages, torchs_own, links=on).seconds
    for word, place in NAIVE.items():
        if word != "deferred" or hasattr(torchs, "_defer_recv_ops"):
            row[word] = step_of(stages, order, place(order, rows), on, communicators)
    begun = time.perf_counter()
    found = order_messages(stages, order, links=on, communicators=communicators)
    row |= {"ours": found.seconds, "bound": found.bound, "gap": found.gap, "took": time.perf_counter() - begun}
    row["gain"] = row["torch"] / found.seconds - 1
    row["gain_if_off"] = gain_if_off(stages, torchs_own, found.order, on)
    return row


def step_of(
    stages: Sequence[StageCosts], order: PipelineOrder, rows: Rows, links: Links, communicators: Communicators
) -> float | None:
    """The simulated step; ``None`` if its messages deadlock with these communicators."""
    try:
        made = MessageOrder(order.name, order.ranks, tuple(map(tuple, rows)), communicators)
    except ScheduleError as error:
        assert "its messages wait for one another" in str(error), error
        return None
    return simulate_schedule(stages, made, links=links).seconds


def gain_if_off(stages: Sequence[StageCosts], one: MessageOrder, other: MessageOrder, links: Links) -> float:
    """By how much the mean step of one order is longer than that of the other one, if prices are off by 10 %."""
    step, totals = price_actions(stages, one, links=links), [0.0, 0.0]
    for seed in range(5):
        rng = random.Random(seed)
        durations = [seconds * rng.uniform(0.9, 1.1) for seconds in step.durations]
        travel = [seconds * rng.uniform(0.9, 1.1) for seconds in step.travel]
        for i, order in enumerate((one, other)):
            totals[i] += max(times_of_messages(order, durations, travel)[1])
    return totals[0] / totals[1] - 1


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows as text."""
    steps = [word for word in ("free", "torch", "deferred", "late", "early", "ours", "bound") if word in rows[0]]
    table = Table(box=None, pad_edge=False)
    for title in ("schedule", "ranks", "mb", "links", "comm", *steps, "gap", "gain", "gain ±10 %", "took"):
        table.add_column(title, justify="left" if title in ("schedule", "links", "comm") else "right")
    for row in rows:
        cells = ["deadlock" if row[word] is None else f"{1000 * row[word]:.1f}" for word in steps]
        named = [str(row[word]) for word in ("schedule", "ranks", "microbatches", "links", "communicators")]
        percent = [f"{100 * row[word]:.1f}" for word in ("gap", "gain", "gain_if_off")]
        table.add_row(*named, *cells, *percent, f"{row['took']:.1f} s")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    kinds: tuple[Communicators, ...] = ("rank", "pair")
    rows = [
        row_of(name, ranks, microbatches, links, communicators)
        for communicators in kinds
        for name in SCHEDULES
        for ranks in args.ranks
        for microbatches in args.microbatches
        if not (name == "DualPipeV" and microbatches < 2 * ranks)
        for links in ("nvlink", "nodes")
    ]
    print(json.dumps({"rows": rows})) if args.json else Console(width=160).print(table_of(rows))


if __name__ == "__main__":
    main()
