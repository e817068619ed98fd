"""``splitkit profile``: predicts and measures the memory of a model, in total and part by part."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import source
from splitkit.cli.commands import profile_ranks
from splitkit.cli.common import CapturedModel, planned, prepare
from splitkit.cli.outcome import Outcome
from splitkit.cli.pages import still_pages, wrote
from splitkit.cli.source import require_inputs
from splitkit.errors import CaptureError, UsageError
from splitkit.units import bounded, size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.engine.split import Split
    from splitkit.memory.measurement import MeasuredMemory
    from splitkit.memory.profile import MemoryProfile
    from splitkit.testing.timing import TrainingRun


TOP = 10
"""How many of the largest values are shown."""


def run(args: Namespace) -> Outcome:
    """Run ``splitkit profile``."""
    if args.ranks is not None:
        if args.view:
            remedy = "splitkit view PLAN.json --schedule 1f1b -o page.html draws a step as simulated."
            raise UsageError("SK601", "--view cannot be combined with --ranks", remedy)
        return profile_ranks.run(args)
    if args.trace:
        raise UsageError("SK601", "--trace shows what ranks do, but there are no ranks", "Add --ranks N.")
    if args.recompute:
        raise UsageError("SK601", "--recompute is for the parts of a pipeline", "Add --ranks N.")
    work, split = _split(args)
    with work.clock.step("simulate", "simulating the memory"):
        profile = sk.simulate_memory(split or work.gm)
    rows = [_row("forward", profile)]
    rows += [_row(f"  {split.names[key]} alone", part) for key, part in profile.parts.items()] if split else []
    step, why_not = _training(work, args.forward_only)
    training = step.profile if step else None
    rows += [_row("forward + backward", training)] if training else []
    if args.run:
        from splitkit.testing import timing

        with work.clock.step("measure", "running the model"):
            measured = timing.measure_forward(split.module if split else work.gm, work.example, work.source.seed)
            parts = timing.measure_parts(split, work.example, work.source.seed) if split else []
            both = [timing.measure_training(step, work.example, work.source.seed)] if step else []
        for row, found in zip(rows, [measured, *parts, *both], strict=True):
            row |= beside(found, row["predicted"])
    data: dict[str, Any] = {
        "command": "profile",
        "model": work.source.to_dict(),
        "note": split.plan.note if split else "",
        "rows": rows,
        "forward": profile.to_dict(TOP),
        "training": training.to_dict(TOP) if training else None,
        "why_no_training": why_not,
        "seconds": work.clock.seconds,
    }
    text, files = _text(data, args), {}
    if args.view:
        shown = {"forward": profile, **({"forward + backward": training} if training else {})}
        files[args.view] = page = still_pages(work.source.spec, shown)
        text += ["", wrote(args.view, page)]
    return Outcome(data, text, files=files)


def _split(args: Namespace) -> tuple[CapturedModel, Split | None]:
    """Return the model, and its split if the command line names a plan or a policy."""
    if args.target.endswith(".json") or args.stages is not None or args.policy is not None:
        work, plan, _ = planned(args)
        require_inputs(work.source, "profile")
        with work.clock.step("split", "splitting"):
            return work, sk.split(work.gm, plan)
    return prepare(source.from_args(args.target, args)), None


def _training(work: CapturedModel, forward_only: bool) -> tuple[TrainingRun | None, str]:
    """Return forward and backward of the unsplit model as eager autograd runs them, or why they cannot be captured."""
    if forward_only:
        return None, "--forward-only"
    from splitkit.testing import timing

    with work.clock.step("joint", "capturing forward and backward"):
        try:
            return timing.TrainingRun.of(work.example), ""
        except CaptureError as error:
            return None, str(error)


def _row(what: str, profile: MemoryProfile) -> dict[str, Any]:
    at = profile.to_dict(0)["at"]
    row = {"what": what, "predicted": profile.peak, "before": profile.baseline, "saved": profile.saved, "at": at}
    return row | {"bounds": dict(profile.bounds), "unseen": sorted(profile.unseen)}


def beside(found: MeasuredMemory, predicted: int) -> dict[str, Any]:
    """Return what was measured, beside a prediction."""
    error = predicted / found.peak - 1 if found.peak else float(predicted > 0)
    return {"measured": found.peak, "error": error, "allocator": found.allocator_peak}


def _text(data: dict[str, Any], args: Namespace) -> list[RenderableType]:
    measured = ("measured", "error", "allocator") if args.run else ()
    titles = ("peak of", "predicted", *measured, "before", "saved", "at")
    cells, spare = (_cells(row, args.run) for row in data["rows"]), ("allocator", "before", "saved")
    lines: list[RenderableType] = [table(titles, cells, titles[1:-1], spare=spare)]
    if data["why_no_training"] and not args.forward_only:
        lines += ["", f"no forward + backward: {data['why_no_training']}"]
    for what in ("forward", "training"):
        if data[what]:
            lines += ["", *_live(what, data[what])]
    return lines


def _cells(row: Mapping[str, Any], measured: bool) -> list[str]:
    cells = [row["what"], bounded(row["predicted"], row["bounds"], row["unseen"])]
    if measured:
        error = "exact" if not row["error"] else f"{100 * row['error']:+.3f} %"
        cells += [size(row["measured"]), error, "" if row["allocator"] is None else size(row["allocator"])]
    return [*cells, size(row["before"]), size(row["saved"]) if row["saved"] else "", _place(row["at"])]


def _place(at: Mapping[str, Any] | None) -> str:
    if at is None:
        return ""
    return f"{at['node']} in {at['module']}" if at["module"] else str(at["node"])


def _live(what: str, profile: Mapping[str, Any]) -> list[RenderableType]:
    named = "forward" if what == "forward" else "forward + backward"
    rows = [(b["name"], b["module"], b["kind"], size(b["nbytes"])) for b in profile["live_at_peak"]]
    most = bounded(profile["peak"], profile["bounds"], profile["unseen"])
    summary = facts({"alive at the peak of": f"{named}: {_place(profile['at'])}, {most}"})
    return [summary, table(("made by", "module", "kind", "bytes"), rows, ("bytes",))]
