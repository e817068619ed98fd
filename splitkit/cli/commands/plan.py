"""``splitkit plan``: decide, show the parts, write the plan."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import splitkit as sk
from splitkit.cli import factories, placement
from splitkit.cli.outcome import Outcome, seconds
from splitkit.cli.pages import plan_page, wrote
from splitkit.cli.source import next_command, record
from splitkit.cli.work import TRAINING, make_plan, versions
from splitkit.errors import UsageError


def run(args: Namespace) -> Outcome:
    """See the module."""
    if args.what == TRAINING:
        from splitkit.cli.commands import plan_training as trainplan

        remedy = "That divides the step of one device; leave one of them out."
        placement.refuse_with(args, f"--what {TRAINING}", remedy, trainplan.OTHERS)
        return trainplan.plan(args)
    if placement.wanted(args):
        placement.check(args)
        from splitkit.cli.commands import plan_devices as placed

        return placed.plan(args)
    factories.check(args.model, plans=False)
    if args.stages is None and args.policy is None:
        raise UsageError("SK601", f"{args.model} needs a policy", "Add --devices 4xh200, --stages N or --policy EXPR.")
    work, plan, costs = make_plan(args, args.model)
    report = sk.report(work.gm, plan, costs)
    took = work.clock.seconds
    times = f"captured in {seconds(took['capture'])}, planned in {seconds(took['plan'])}"
    data = {
        "command": "plan",
        "model": work.source.to_dict(),
        "note": plan.note,
        "report": report.to_dict(),
        "seconds": took,
        "file": args.output,
        "next": next_command(work.source, args.output),
    }
    written = [f"wrote {args.output}", f"next: {data['next']}"] if args.output else []
    files: dict[str, Mapping[str, Any] | str] = {}
    if args.output:
        files[args.output] = {**plan.to_dict(), "model": record(work.source, args.output), **versions()}
    if args.view:
        files[args.view] = text = plan_page(plan, costs=costs, title=work.source.spec)
        written.append(wrote(args.view, text))
    return Outcome(data, [report.table(), "", times, *written], files=files)
