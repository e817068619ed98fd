"""``splitkit compare``: says what two plans of one model put elsewhere, and what that costs."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from splitkit.cli.commands.explain import graph_of_file, require_file
from splitkit.cli.common import TRAINING, decoded, read_plan
from splitkit.cli.outcome import Outcome
from splitkit.cli.staged_plan_files import stages_of_file
from splitkit.errors import FileError


def run(args: Namespace) -> Outcome:
    """Run ``splitkit compare``."""
    for path in (args.target, args.other):
        require_file(path, "compare")
    first, second = read_plan(args.target), read_plan(args.other)
    kinds = [data.get("what") == TRAINING or bool(stages_of_file(data)) for data in (first, second)]
    if kinds[0] != kinds[1]:
        what = ("splits a forward graph", "divides a training step")
        reason = f"{args.target} {what[kinds[0]]}, and {args.other} {what[kinds[1]]}"
        raise FileError("SK502", f"the plans are for different graphs: {reason}", "Compare plans of one kind.")
    wanted, graph, clock = graph_of_file(args, first)
    plans = decoded(graph, args.target, first), decoded(graph, args.other, second)
    from splitkit.studies.explanation.compare_plans import compare_plans

    with clock.step("compare", "pricing both plans"):
        found = compare_plans(*plans)
    data: dict[str, Any] = {
        "command": "compare",
        "model": wanted.to_dict(),
        "first": args.target,
        "second": args.other,
        "comparison": found.to_dict(),
        "seconds": clock.seconds,
    }
    names = (Path(args.target).name, Path(args.other).name)
    return Outcome(data, (replace(found, names=names) if names[0] != names[1] else found).lines())
