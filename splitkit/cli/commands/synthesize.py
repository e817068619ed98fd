"""``splitkit synthesize``: makes an order of actions for the parts of a plan, and writes it as torch's schedule CSV."""

from __future__ import annotations

from argparse import Namespace

import splitkit as sk
from splitkit.cli import placement
from splitkit.cli.common import links_asked, plan_file, planned_by, with_recompute
from splitkit.cli.outcome import Lines, Outcome, seconds_text
from splitkit.errors import UsageError
from splitkit.pipeline.schedules import USUAL_MICROBATCHES
from splitkit.pipeline.synthesize import order_to_csv
from splitkit.prices import price_name
from splitkit.units import read_size, size
from splitkit.view.tables import facts


def run(args: Namespace) -> Outcome:
    """Run ``splitkit synthesize``.

    Raises:
        UsageError: SK601 for a memory that is not a size.
        NoPlanError: SK303 if a rank has no room for one microbatch.
    """
    if args.memory is not None and "%" in args.memory:
        raise UsageError("SK601", "--memory is a share, but no device is named", "Write bytes: --memory 80GiB.")
    placement.check_memory(Namespace(memory=args.memory, devices=None), least=False)
    memory = None if args.memory is None else read_size(args.memory)
    work, plan, costs = planned_by(args, plan_file(args, takes=("costs", "training")))
    plan = with_recompute(plan, args, work.gm)
    with work.clock.step("costs", "pricing the parts"):
        asked = plan.request
        links = links_asked(args, plan)
        optimizer = args.optimizer or asked.counted or "adam"
        stages = sk.stage_costs(sk.analyze(work.gm), plan, costs, optimizer=optimizer)
    with work.clock.step("synthesize", "ordering the actions"):
        found = sk.synthesize(
            stages,
            args.microbatches or asked.microbatches or USUAL_MICROBATCHES,
            memory,
            ranks=args.ranks,
            placement=args.placement,
            links=links,
            objective=args.objective,
            effort=args.effort,
        )
    named = None if links is None else args.links or (asked.links if isinstance(asked.links, str) else "of the plan")
    data = {
        "model": work.source.to_dict(),
        "prices": price_name(costs),
        "links": named,
        "optimizer": optimizer,
        **found.to_dict(),
        "order": args.output,
        "seconds": work.clock.seconds,
    }
    rows = {
        "prices": data["prices"],
        "links": f"{named or 'none: transfers are free (--links nvlink4 prices them)'}",
        "memory": "no limit" if memory is None else f"{size(memory)} per rank",
        "took": f"capture {seconds_text(work.clock.seconds['capture'])}, "
        f"order {seconds_text(work.clock.seconds['synthesize'])}",
    }
    text: Lines = [facts(rows), "", str(found)]
    if args.output is None:
        return Outcome(data, text)
    text.append(f"wrote {args.output} (splitkit train --schedule runs it)")
    return Outcome(data, text, files={args.output: order_to_csv(found.order)})
