"""Plan and run a training step in pipeline stages: ``splitkit plan --what fwd-bwd`` and ``splitkit run``."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli.common import TRAINING, versions
from splitkit.cli.outcome import Outcome, seconds_text
from splitkit.cli.source import Source, next_command, source_record
from splitkit.errors import UsageError
from splitkit.prices import price_name
from splitkit.units import duration, size
from splitkit.view.console.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType
    from torch import fx

    from splitkit.costs import Costs
    from splitkit.engine.joint_stages.staged_step import StagedStep
    from splitkit.plans.record import Plan


def stages_outcome(args: Namespace, made: Source, took: Mapping[str, float], costs: Costs, step: StagedStep) -> Outcome:
    """Return what ``splitkit plan`` says of a plan in stages."""
    if args.view:
        raise no_picture(args.view)
    data: dict[str, Any] = {
        "command": "plan",
        "what": TRAINING,
        "model": made.to_dict(),
        "note": step.plan.note,
        "prices": price_name(costs),
        "unit": sk.costs.unit_of(costs),
        "stages": stage_rows(step, costs),
        "seconds": dict(took),
        "file": args.output,
        "next": next_command(made, args.output),
    }
    text: list[RenderableType] = [
        facts({"plan": data["note"], "prices": data["prices"], "took": seconds_text(data["seconds"]["plan"])}),
        "",
        stage_table(data["stages"], data["unit"]),
        *([f"wrote {args.output}", f"next: {data['next']}"] if args.output else []),
    ]
    files: dict[str, Mapping[str, Any] | str] = {}
    if args.output:
        record = source_record(made, args.output)
        files[args.output] = {**step.plan.to_dict(), "model": record, "what": TRAINING, **versions()}
    return Outcome(data, text, files=files)


def no_picture(file: str) -> UsageError:
    """Return the error for a picture of a training step in stages."""
    return UsageError(
        "SK601",
        f"{file} would show a training step in stages, which no page draws yet",
        "Leave out the page, or plan a forward graph with --stages N.",
    )


def stage_rows(step: StagedStep, costs: Costs) -> list[dict[str, Any]]:
    """Return a row for each stage: seconds and ops of its graphs, and what it saves and sends."""
    rows = []
    for number, stage in enumerate(step.stages):
        seconds = {
            half: _seconds(step.plan, half, number, costs) for half in ("forward", "backward", "input", "weight")
        }
        ops = _members(step.plan, number)
        row: dict[str, Any] = {
            "stage": number,
            "forward": seconds["forward"],
            "backward": seconds["backward"] + seconds["input"],
            "weight": seconds["weight"] if stage.weight is not None else None,
            "recomputed": sum(n > 1 for n in ops.values()),
            "saved": stage.saved_bytes,
            "waiting": stage.waiting_bytes if stage.weight is not None else None,
            "sent": stage.sent_bytes,
            "gradients_sent": stage.gradients_sent_bytes,
        }
        rows.append(row)
    return rows


def _members(plan: Plan, stage: int) -> dict[Any, int]:
    """Return node -> how many parts of a stage compute it."""
    return {n: count for n, keys in plan.items() if (count := sum(k[1] == stage for k in keys if isinstance(k, tuple)))}


def _seconds(plan: Plan, half: str, stage: int, costs: Costs) -> float:
    nodes = (n for n in plan.members((half, stage)) if n.op not in ("placeholder", "get_attr"))
    return sum(costs.seconds(n) for n in nodes)


def stage_table(rows: list[dict[str, Any]], unit: str) -> RenderableType:
    """Return the table of `stage_rows`."""
    split = any(row["weight"] is not None for row in rows)
    columns = {
        "stage": [str(row["stage"]) for row in rows],
        "forward": [duration(row["forward"], unit) for row in rows],
        "input" if split else "backward": [duration(row["backward"], unit) for row in rows],
        **({"weight": [duration(row["weight"] or 0.0, unit) for row in rows]} if split else {}),
        "recomputed": [f"{row['recomputed']} ops" for row in rows],
        **_bytes(rows, split),
    }
    return _table(columns)


def graph_rows(step: StagedStep) -> list[dict[str, Any]]:
    """Return a row for each stage: the ops of its graphs, and what it saves and sends."""
    return [
        {
            "stage": number,
            "forward_ops": _ops(stage.forward),
            "backward_ops": _ops(stage.backward),
            "weight_ops": None if stage.weight is None else _ops(stage.weight),
            "saved": stage.saved_bytes,
            "waiting": stage.waiting_bytes if stage.weight is not None else None,
            "sent": stage.sent_bytes,
            "gradients_sent": stage.gradients_sent_bytes,
        }
        for number, stage in enumerate(step.stages)
    ]


def _ops(graph: fx.GraphModule) -> int:
    return sum(node.op.startswith("call_") for node in graph.graph.nodes)


def graph_table(rows: list[dict[str, Any]]) -> RenderableType:
    """Return the table of `graph_rows`."""
    split = any(row["weight_ops"] is not None for row in rows)
    columns = {
        "stage": [str(row["stage"]) for row in rows],
        "ops forward": [str(row["forward_ops"]) for row in rows],
        "input" if split else "backward": [str(row["backward_ops"]) for row in rows],
        **({"weight": [str(row["weight_ops"] or 0) for row in rows]} if split else {}),
        **_bytes(rows, split),
    }
    return _table(columns)


def _bytes(rows: list[dict[str, Any]], split: bool) -> dict[str, list[str]]:
    return {
        "saved": [size(row["saved"]) for row in rows],
        **({"waits for weight": [size(row["waiting"] or 0) for row in rows]} if split else {}),
        "sent": [size(row["sent"]) for row in rows],
        "gradients sent": [size(row["gradients_sent"]) for row in rows],
    }


def _table(columns: dict[str, list[str]]) -> RenderableType:
    titles = tuple(columns)
    return table(titles, list(zip(*columns.values(), strict=True)), titles[1:])
