"""``splitkit compare``: says what two plans of one model put elsewhere, and what that costs."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitkit.cli.commands.explain import require_file
from splitkit.cli.common import decoded, is_step, prepare_for, read_plan
from splitkit.cli.outcome import Outcome
from splitkit.errors import FileError


def run(args: Namespace) -> Outcome:
    """Run ``splitkit compare``."""
    for path in (args.target, args.other):
        require_file(path, "compare")
    first, second = read_plan(args.target), read_plan(args.other)
    kinds = [is_step(data) for data in (first, second)]
    if kinds[0] != kinds[1]:
        what = ("splits a forward graph", "divides a training step")
        reason = f"{args.target} {what[kinds[0]]}, and {args.other} {what[kinds[1]]}"
        raise FileError("SK502", f"the plans are for different graphs: {reason}", "Compare plans of one kind.")
    work = prepare_for(args, first)
    plans = decoded(work.gm.graph, args.target, first), decoded(work.gm.graph, args.other, second)
    from splitkit.studies.explanation.explain import compare_plans

    with work.clock.step("compare", "pricing both plans"):
        found = compare_plans(*plans)
    data: dict[str, Any] = {
        "model": work.source.to_dict(),
        "first": args.target,
        "second": args.other,
        "comparison": found.to_dict(),
        "seconds": work.clock.seconds,
    }
    names = (Path(args.target).name, Path(args.other).name)
    return Outcome(data, (replace(found, names=names) if names[0] != names[1] else found).lines())
