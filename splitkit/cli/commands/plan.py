"""``splitkit plan``: makes a plan, describes its parts and writes it to a file."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import splitkit as sk
from splitkit.cli import factories, placement
from splitkit.cli.common import TRAINING, make_plan, versions, with_recompute
from splitkit.cli.outcome import Outcome, plan_page, seconds_text, wrote
from splitkit.cli.source import next_command, source_record
from splitkit.errors import UsageError


def run(args: Namespace) -> Outcome:
    """Run ``splitkit plan``."""
    if args.form is not None and args.from_file is None:
        raise UsageError("SK601", "--form needs --from", "Name the file: --from layout.txt.")
    if args.from_file is not None:
        if args.what == TRAINING:
            raise UsageError(
                "SK601", "--from cannot be combined with --what fwd-bwd", "Stages of other tools cut the forward."
            )
        from splitkit.cli.commands.plan_devices import plan_from_text

        return plan_from_text(args)
    if args.what == TRAINING or args.mesh is not None:
        from splitkit.cli.commands import plan_training as trainplan

        taken = () if args.stages is None else trainplan.IN_STAGES
        other = tuple(name for name in trainplan.OTHERS if name not in taken)
        remedy = "Leave one of the two out; --schedule, --microbatches and --links go with --stages."
        placement.refuse_with(args, f"--what {TRAINING}", remedy, (*other, "recompute"))
        return trainplan.plan_step(args)
    if any(getattr(args, name) is not None for name in (*placement.OPTIONS, "memory")):
        placement.check_placement(args)
        from splitkit.cli.commands import plan_devices as placed

        return placed.plan_for_devices(args)
    factories.check_model_name(args.model, plans=False)
    if args.stages is None and args.policy is None:
        raise UsageError("SK601", f"{args.model} needs a policy", "Add --devices 4xh200, --stages N or --policy EXPR.")
    work, plan, costs = make_plan(args, args.model)
    plan = with_recompute(plan, args, work.gm)
    report = sk.report(work.gm, plan, costs)
    took = work.clock.seconds
    times = f"captured in {seconds_text(took['capture'])}, planned in {seconds_text(took['plan'])}"
    tokens = getattr(work.example.model, "main_input_name", "input_ids") == "input_ids"
    data = {
        "model": work.source.to_dict(),
        "note": plan.note,
        "report": report.to_dict(),
        "seconds": took,
        "file": args.output,
        "next": next_command(work.source, args.output, tokens=tokens),
    }
    written = [f"wrote {args.output}", f"next: {data['next']}"] if args.output else []
    files: dict[str, Mapping[str, Any] | str] = {}
    if args.output:
        files[args.output] = {**plan.to_dict(), "model": source_record(work.source, args.output), **versions()}
    if args.view:
        files[args.view] = text = plan_page(plan, costs=costs, title=work.source.spec)
        written.append(wrote(args.view, text))
    return Outcome(data, [report.table(), "", times, *written], files=files)
