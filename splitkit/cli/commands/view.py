"""``splitkit view``: a plan as a page to look at and to steer."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.checks import nbytes
from splitkit.cli.outcome import Outcome
from splitkit.cli.pages import wrote
from splitkit.cli.work import planned

if TYPE_CHECKING:
    from splitkit.pipeline.stageprices import Optimizer


def run(args: Namespace) -> Outcome:
    """See the module."""
    from splitkit.view.showing import html

    optimizer: Optimizer = None if args.optimizer == "none" else args.optimizer or "adam"
    memory = nbytes("view", "memory", args.memory) if args.memory else None
    if args.training is None and optimizer and not args.target.endswith(".json"):
        args.training = True  # what is drawn is what is to be even
    work, plan, costs = planned(args)
    with work.clock.step("view", "pricing the rows"):
        step = None
        if args.schedule is not None:
            stages = sk.stage_costs(sk.analyze(work.gm), plan, costs, optimizer=optimizer)
            links = None if args.links in (None, "none") else args.links
            step = sk.simulate_schedule(stages, args.schedule, args.microbatches or 2 * len(stages), links=links)
        title = work.source.spec
        text = html(plan, costs=costs, optimizer=optimizer, memory=memory, run=step, title=title)
    data: dict[str, Any] = {
        "command": "view",
        "model": work.source.to_dict(),
        "file": str(args.output),
        "bytes": len(text.encode()),
        "seconds": work.clock.seconds,
    }
    return Outcome(data, [wrote(args.output, text)], files={args.output: text})
