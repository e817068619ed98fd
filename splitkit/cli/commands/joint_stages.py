"""Plan and run a training step in pipeline stages: ``splitkit plan --what fwd-bwd`` and ``splitkit run``."""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli.common import TRAINING, versions
from splitkit.cli.outcome import Outcome, seconds_text
from splitkit.cli.pages import wrote
from splitkit.cli.source import Source, next_command, options_of_own_code, source_record
from splitkit.pipeline.purpose import ranks_of
from splitkit.prices import price_name
from splitkit.training.stage_plan import computed_again
from splitkit.units import duration, size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.costs import Costs
    from splitkit.engine.staged_step import StagedStep
    from splitkit.plans.record import Plan
    from splitkit.training.flow import JointFlow


def stages_outcome(
    args: Namespace, made: Source, took: Mapping[str, float], costs: Costs, flow: JointFlow, step: StagedStep
) -> Outcome:
    """Return what ``splitkit plan`` says of a plan in stages."""
    train, view = _train_command(made, args.output, step), _view_command(made, args.output)
    data: dict[str, Any] = {
        "command": "plan",
        "what": TRAINING,
        "model": made.to_dict(),
        "note": step.plan.note,
        "prices": price_name(costs),
        "unit": sk.costs.unit_of(costs),
        "stages": stage_rows(flow, step, costs),
        "seconds": dict(took),
        "file": args.output,
        "next": train or next_command(made, args.output),
        "view": view,
    }
    text: list[RenderableType] = [
        facts(
            {
                "plan": data["note"].replace("; ", ";\n"),
                **({} if made.mesh is None else {"mesh": f"a rank's share; {made.mesh} ranks for each stage"}),
                "prices": data["prices"],
                "took": seconds_text(data["seconds"]["plan"]),
            }
        ),
        "",
        stage_table(data["stages"], data["unit"]),
        *([f"wrote {args.output}"] if args.output else []),
        *(_next_lines(train, next_command(made, args.output), view)),
    ]
    files: dict[str, Mapping[str, Any] | str] = {}
    if args.view:
        from splitkit.view.renderers import html

        files[args.view] = page = html(step, costs=costs, title=made.spec)
        text.append(wrote(args.view, page))
    if args.output:
        record = source_record(made, args.output)
        files[args.output] = {**step.plan.to_dict(), "model": record, "what": TRAINING, **versions()}
    return Outcome(data, text, files=files)


def _next_lines(train: str | None, run: str | None, view: str | None) -> list[str]:
    """Return what can be done with the plan file; nothing without a file."""
    found = {"next": train, "next, in one process" if train else "next": run, "picture": view}
    return [f"{what}: {words}" for what, words in found.items() if words]


def _train_command(made: Source, file: str | None, step: StagedStep) -> str | None:
    """Return the command that trains with the plan on the ranks of its schedule, as the plan was made for.

    A plan that was made for no schedule trains under 1F1B, or under ZBV if its backward is divided and ZBV takes its
    stages. There is no command for one stage.
    """
    count, asked = len(step.stages), step.plan.request
    if count < 2:
        return None
    schedule, microbatches = asked.schedule, asked.microbatches or 2 * count
    if schedule is None:
        divided = all(stage.weight is not None for stage in step.stages)
        schedule = "zbv" if divided and count % 2 == 0 else "1f1b"
    ranks = max(ranks_of(schedule, microbatches, count)) + 1
    return next_command(made, file, ranks, schedule, microbatches)


def _view_command(made: Source, file: str | None) -> str | None:
    """Return the command that draws the plan."""
    if file is None or file.startswith("/dev/"):
        return None
    words = ["splitkit", "view", file, *options_of_own_code(made)]
    return shlex.join([*words, "-o", "page.html"])


def stage_rows(flow: JointFlow, step: StagedStep, costs: Costs) -> list[dict[str, Any]]:
    """Return a row for each stage: seconds of its graphs, what it computes again, and what it saves and sends."""
    rows = []
    again = _again(flow, step, costs)
    for number, stage in enumerate(step.stages):
        seconds = {
            half: _seconds(step.plan, half, number, costs) for half in ("forward", "backward", "input", "weight")
        }
        row: dict[str, Any] = {
            "stage": number,
            "forward": seconds["forward"],
            "backward": seconds["backward"] + seconds["input"],
            "weight": seconds["weight"] if stage.weight is not None else None,
            "recomputed": len(again[number]),
            "recompute": sum(again[number]),
            "saved": stage.saved_bytes + stage.host_bytes,
            "host": stage.host_bytes,
            "waiting": stage.waiting_bytes if stage.weight is not None else None,
            "sent": stage.sent_bytes,
            "gradients_sent": stage.gradients_sent_bytes,
        }
        rows.append(row)
    return rows


def _again(flow: JointFlow, step: StagedStep, costs: Costs) -> list[list[float]]:
    """Return for each stage the seconds of each op that its backward computes again."""
    found: list[list[float]] = [[] for _ in step.stages]
    for node in flow.nodes:
        for part in computed_again(flow, step.plan, node):
            if part.half != "weight":
                found[part.stage].append(costs.seconds(node))
    return found


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
        "recomputed": [
            f"{row['recomputed']} ops, {duration(row['recompute'], unit)}" if row["recomputed"] else "-" for row in rows
        ],
        **_bytes(rows, split),
    }
    return table(tuple(columns), list(zip(*columns.values(), strict=True)), tuple(columns)[1:])


def _bytes(rows: list[dict[str, Any]], split: bool) -> dict[str, list[str]]:
    return {
        "saved": [size(row["saved"]) for row in rows],
        **({"on the host": [size(row["host"]) for row in rows]} if any(row["host"] for row in rows) else {}),
        **({"waits for weight": [size(row["waiting"] or 0) for row in rows]} if split else {}),
        "sent": [size(row["sent"]) for row in rows],
        "gradients sent": [size(row["gradients_sent"]) for row in rows],
    }
