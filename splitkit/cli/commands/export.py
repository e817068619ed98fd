"""``splitkit export``: writes a plan as another tool reads it, and says what rounding it to modules costs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import placement
from splitkit.cli.commands.train import schedule_or_order
from splitkit.cli.common import decoded, is_step, plan_file, planned_by, prepare_step, with_recompute
from splitkit.cli.outcome import Lines, Outcome
from splitkit.cli.source import from_plan
from splitkit.errors import UsageError
from splitkit.exports.format_list import WRITES
from splitkit.exports.import_plan import FORMATS, format_named
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from splitkit.exports.export import Export


def run(args: Namespace) -> Outcome:
    """Run ``splitkit export``."""
    if args.to == "list":
        return _formats()
    _check(args)
    file = plan_file(args, takes=("costs", "training"))
    if file is not None and is_step(file):
        return _training_step(args, file)
    work, plan, costs = planned_by(args, file)
    _require_schedule(args, plan)
    plan = with_recompute(plan, args, work.gm)
    with work.clock.step("export", f"writing the plan for {format_named(args.to).tool}"):
        found = sk.export(
            plan,
            to=args.to,
            schedule=None if args.schedule is None else schedule_or_order(args.schedule),
            microbatches=args.microbatches,
            memory=args.memory,
            links=None if args.links == "none" else args.links,
            optimizer=args.optimizer,
            costs=costs,
        )
    return _outcome(args, found, {"model": work.source.to_dict(), "seconds": work.clock.seconds})


def _check(args: Namespace) -> None:
    """Refuse options that do not go together, before the model is made.

    Raises:
        FileError: SK521 for an unknown format.
        UsageError: SK601.
    """
    form = format_named(args.to)
    if args.target is None:
        raise UsageError("SK601", "there is nothing to export", "Name a plan file, or a model with --stages N.")
    if args.memory is not None and "%" in args.memory:
        raise UsageError("SK601", "--memory is a share, but no device is named", "Write bytes: --memory 80GiB.")
    placement.check_memory(Namespace(memory=args.memory, devices=None), least=False)
    if args.order is not None and form.schedules != "csv":
        out = " and --schedule" if form.schedules == "none" else ""
        reads = ", ".join(one.name for one in FORMATS.values() if one.schedules == "csv")
        raise UsageError(
            "SK601", f"{form.tool} reads no schedule CSV", f"Leave --order{out} out; it works with {reads}."
        )


def _require_schedule(args: Namespace, plan: sk.Plan) -> None:
    """Refuse options of a schedule if neither the command line nor the plan names one."""
    if args.schedule is None and plan.request.schedule is None and (args.order or args.microbatches is not None):
        option = "--order" if args.order is not None else "--microbatches"
        raise UsageError("SK601", f"{option} needs --schedule", "Name a schedule: --schedule 1f1b.")


def _formats() -> Outcome:
    """Return the table of the formats."""
    rows = [(name, WRITES[name], _cuts(name), FORMATS[name].example) for name in WRITES]
    data = {
        "formats": [
            {"name": name, "writes": what, "cuts": cuts, "example": example, "where": FORMATS[name].where}
            for name, what, cuts, example in rows
        ],
    }
    return Outcome(data, [table(("format", "writes", "cuts", "example"), rows)])


def _cuts(name: str) -> str:
    level = FORMATS[name].level
    return {"nodes": "anywhere", "modules": "before any module"}.get(level, "between whole layers")


def _training_step(args: Namespace, file: Mapping[str, Any]) -> Outcome:
    """Export a plan of a training step, whose graph has forward and backward."""
    work = prepare_step(from_plan(args.target, file, args))
    plan = decoded(work.gm.graph, args.target, dict(file))
    _require_schedule(args, plan)
    found = sk.export(
        work.joint.split(plan),
        to=args.to,
        schedule=None if args.schedule is None else schedule_or_order(args.schedule),
        microbatches=args.microbatches,
    )
    return _outcome(args, found, {"model": work.source.to_dict()})


def _outcome(args: Namespace, found: Export, data: dict[str, Any]) -> Outcome:
    both = {args.output: found.text, args.order: found.schedule_csv}
    files = {path: text for path, text in both.items() if path}
    rounding = found.rounding
    price = "not rounded: the plan cuts between layers" if rounding is None else str(rounding)
    data = {
        "to": found.to,
        "text": found.text,
        "where": found.where,
        "rounding": None
        if rounding is None
        else {
            "before": asdict(rounding.before),
            "after": asdict(rounding.after),
            "moved": rounding.moved,
            "ratio": rounding.ratio,
        },
        "schedule_csv": found.schedule_csv or None,
        "file": args.output,
        **data,
    }
    text: Lines = [facts({"price": price, "where": found.where}), *(f"wrote {path}" for path in files)]
    if not args.output:
        text += ["", found.text.rstrip()]
    return Outcome(data, text, files=files)
