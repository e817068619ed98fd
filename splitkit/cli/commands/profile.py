"""``splitkit profile``: predicts and measures the memory of a model, in total and part by part."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import launcher, source
from splitkit.cli.commands import train
from splitkit.cli.commands.train import ranks_of_stages, require_model
from splitkit.cli.common import CapturedModel, plan_file, planned_by, prepare, with_recompute
from splitkit.cli.outcome import Lines, Outcome, seconds_text, still_pages, wrote
from splitkit.cli.source import require_inputs
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import CaptureError, PipelineError, ScheduleError, UsageError
from splitkit.pipeline.schedules import USUAL_MICROBATCHES, known_schedules
from splitkit.units import bounded, in_words, size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from splitkit.engine.split import Split
    from splitkit.memory.measurement import MeasuredMemory
    from splitkit.memory.profile import MemoryProfile
    from splitkit.pipeline.order import PipelineOrder
    from splitkit.pipeline.run import ScheduleRun
    from splitkit.runtime.ranks.measurements import RankStep
    from splitkit.runtime.ranks.stage_chain import Chain
    from splitkit.testing.timing import TrainingRun


TOP = 10
"""How many of the largest values are shown."""


def run(args: Namespace) -> Outcome:
    """Run ``splitkit profile``."""
    if args.ranks is not None:
        if args.view:
            remedy = "splitkit view PLAN.json --schedule 1f1b -o page.html draws a step as simulated."
            raise UsageError("SK601", "--view cannot be combined with --ranks", remedy)
        return profile_on_ranks(args)
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
        work, plan, _ = planned_by(args, plan_file(args))
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


def _text(data: dict[str, Any], args: Namespace) -> Lines:
    measured = ("measured", "error", "allocator") if args.run else ()
    titles = ("peak of", "predicted", *measured, "before", "saved", "at")
    cells, spare = (_cells(row, args.run) for row in data["rows"]), ("allocator", "before", "saved")
    lines: Lines = [table(titles, cells, titles[1:-1], spare=spare)]
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


def _live(what: str, profile: Mapping[str, Any]) -> Lines:
    named = "forward" if what == "forward" else "forward + backward"
    rows = [(b["name"], b["module"], b["kind"], size(b["nbytes"])) for b in profile["live_at_peak"]]
    most = bounded(profile["peak"], profile["bounds"], profile["unseen"])
    summary = facts({"alive at the peak of": f"{named}: {_place(profile['at'])}, {most}"})
    return [summary, table(("made by", "module", "kind", "bytes"), rows, ("bytes",))]


# ``splitkit profile PLAN --ranks N``: compares simulated pipeline steps with steps that real processes run.


_PATIENCE = 300
"""Seconds that ranks wait for each other."""


def profile_on_ranks(args: Namespace) -> Outcome:
    """Run ``splitkit profile --ranks N``: start the ranks, or be one of them."""
    if args.microbatches == 1:
        raise UsageError("SK601", "--microbatches 1 makes no pipeline", "Give 2 or more.")
    if "RANK" in os.environ:
        data = launcher.in_group(lambda: _profile(args), _PATIENCE, "gloo")
        traces, is_first = data.pop("traces"), data["rank"] == 0
        return Outcome(data, _ranks_text(data), files=traces if is_first else {}, quiet=not is_first)
    train.require_trace_file(args)
    ranks_of_stages(require_model(args, plan_file(args), "profile"), args.ranks)
    code, data = launcher.answer(sys.argv[1:], args.ranks, _PATIENCE)
    if data is None:
        return Outcome({}, [], code or 1, quiet=True)
    return Outcome(data, _ranks_text(data), code)


def _profile(args: Namespace) -> dict[str, Any]:
    import torch.distributed as dist

    from splitkit.costs.measuring_run import progress
    from splitkit.pipeline.stage_prices import StagePrices
    from splitkit.runtime.ranks import measurements
    from splitkit.runtime.ranks.pipeline import pipeline
    from splitkit.runtime.ranks.planned_chain import chain_of_any
    from splitkit.runtime.ranks.rank_agreement import from_every
    from splitkit.testing.differences import untouched

    work, plan = train.planned_together(args)
    group = train.group_of(work)
    count = args.microbatches or max(2, plan.request.microbatches or USUAL_MICROBATCHES)
    split = train.split_as_planned(work, with_recompute(plan, args))
    if max(part.replicas for part in plan.parts.values()) > 1:
        remedy = "Plan without --replicas; in Python, without replicas=."
        raise PipelineError("SK801", "parts have replicas, but each stage is profiled on one rank", remedy)
    # only the bytes of these stages are used: times are measured, and what kernels take inside
    chain = chain_of_any(split)
    if isinstance(split, StagedStep):
        assert split.source is not None, "joint.split names the joint graph"
        held = list(split.stage_costs(sk.costs.flops(split.source.graph_module), optimizer="sgd"))
    else:
        stages = StagePrices(split.flow, sk.costs.flops(split.flow.root), "sgd", apart=True).of(split.plan)
        held = measurements.without_batch(chain, measurements.with_passed_on(chain, stages))
    held = measurements.with_rng_states(chain, held)
    orders, left_out = _orders(args, chain.stages, count, dist.get_world_size(group))
    batch = train.batch_of(work, count, 0)
    widest = next(filter(measurements.is_divided, orders), orders[0])
    runs, traces, static = [], {}, measurements.STATIC_BUFFERS

    def measured(order: PipelineOrder) -> RankStep:
        with untouched(work.example.model):  # each rank has written the buffers of its own stages only
            return measurements.run_steps(pipeline(split, order, group=group), batch, args.repeat)

    with progress(1 + len(orders), hidden=dist.get_rank() > 0) as advance:
        in_turn = measurements.one_by_one(widest, count)
        alone = measured(in_turn)
        times = {key: found for actions in from_every(alone.actions, group) for key, found in actions.items()}
        every = from_every(alone.held, group)
        known, held = held, measurements.with_inner_bytes(held, in_turn, every)
        before = [most for (most, _), *_ in every]
        advance()
        for order in orders:
            links = measurements.measure_links(order, max(stage.activation_bytes for stage in held), group=group)
            found = from_every(measured(order), group)
            priced = measurements.timed_stages(held, times, measurements.is_divided(order))
            simulated = sk.simulate_schedule(priced, order, links=links, static_buffers=static)
            trace = _named(args.trace, order.name, len(orders)) if args.trace else None
            runs.append(_compared(simulated, found, links, chain, before) | {"trace": trace})
            if trace:
                traces[trace] = measurements.measured_step(order.name, found).to_chrome_trace()
            advance()
    cores = len(os.sched_getaffinity(0))
    return {
        "rank": dist.get_rank(),
        "model": work.source.to_dict(),
        "note": split.plan.note,
        "microbatches": count,
        "cores": cores,
        "oversubscribed": dist.get_world_size() > cores,
        "stages": [
            {k: median(times[s, k]) if times.get((s, k)) else None for k in "FBIW"} for s in range(chain.stages)
        ],
        "inside_kernels": [a.temporary_bytes - b.temporary_bytes for a, b in zip(held, known, strict=True)],
        "schedules": runs,
        "left_out": left_out,
        "pairs": _pairs(runs),
        "traces": traces,
    }


def _named(path: str, schedule: str, count: int) -> str:
    """Return the file of a schedule's trace: ``--trace`` itself, or one name for each of several schedules."""
    file = Path(path)
    return path if count == 1 else str(file.with_name(f"{file.stem}-{schedule}{file.suffix}"))


def _orders(args: Namespace, stages: int, microbatches: int, ranks: int) -> tuple[list[PipelineOrder], dict[str, str]]:
    """Return the orders of ``--schedules``, or of all schedules that fit, with the reasons why the others do not."""
    from splitkit.runtime.ranks.order_runner import order_of

    found, left_out = [], dict[str, str]()
    for name in args.schedules or [schedule.name for schedule in known_schedules()]:
        try:
            found.append(order_of(train.schedule_or_order(name), stages, microbatches, ranks))
        except ScheduleError as error:
            if args.schedules:
                raise
            left_out[name] = error.reason
    if not found:
        reason = "; ".join(left_out.values())
        raise ScheduleError("SK330", f"no schedule fits: {reason}", f"Split into {ranks} or {2 * ranks} stages.")
    return found, left_out


def _compared(
    run: ScheduleRun, found: Sequence[RankStep], links: Any, chain: Chain, before: Sequence[int]
) -> dict[str, Any]:
    """Return a step as simulated and as it ran; peaks are the bytes beyond what a rank holds throughout.

    ``before`` are the bytes with which ranks compare their batches, before their first action.
    """
    from splitkit.runtime.ranks.measurements import moving_peaks, tied_gradients

    peaks, ranks = moving_peaks(run, tied_gradients(chain, run.order.rank_of)), []
    for rank, (real, moving) in enumerate(zip(found, peaks, strict=True)):
        ranks.append(
            {
                "rank": rank,
                "stages": [s for s, on in enumerate(run.order.rank_of) if on == rank],
                "busy": _both(run.busy[rank], real.busy),
                "peak": _both(max(moving, before[rank]), real.nbytes),
            }
        )
    return {
        "schedule": run.order.name,
        "step": _both(run.seconds, max(real.seconds for real in found)),
        "links": [
            {"ranks": list(pair), "latency": link.latency, "bandwidth": link.bandwidth}
            for pair, link in sorted(links.pairs.items())
        ],
        "ranks": ranks,
    }


def _both(predicted: float, real: float) -> dict[str, float]:
    return {"predicted": predicted, "measured": real, "error": predicted / real - 1 if real else 0.0}


def _pairs(runs: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count the pairs of schedules of which the faster one was predicted."""
    steps = [(found["step"]["predicted"], found["step"]["measured"]) for found in runs]
    both = list(combinations(steps, 2))
    return {"right": sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in both), "all": len(both)}


def _ranks_text(data: dict[str, Any]) -> Lines:
    rows = {"pipeline": f"{data['microbatches']} microbatches on {len(data['schedules'][0]['ranks'])} ranks"}
    if data["oversubscribed"]:
        rows["caution"] = f"processes share {data['cores']} cores: measured times include waiting for a core"
    if (pairs := data["pairs"])["all"]:
        rows["order"] = f"the faster of two schedules was predicted in {pairs['right']} of {pairs['all']} pairs"
    cells = []
    for found in data["schedules"]:
        for row in found["ranks"]:
            head = (found["schedule"], *_three(found["step"], seconds_text)) if row["rank"] == 0 else ("", "", "", "")
            stages = ", ".join(map(str, row["stages"]))
            cells.append((*head, row["rank"], stages, *_three(row["busy"], seconds_text), *_three(row["peak"], size)))
    titles = (
        "schedule",
        "step",
        "real",
        "error",
        "rank",
        "stages",
        "busy",
        "real ",
        "error ",
        "peak",
        " real",
        " error",
    )
    note = "peak: bytes above the start of a step, by torch's allocator; busy: seconds in the actions of a rank"
    inside = [f"{size(n)} in stage {stage}" for stage, n in enumerate(data["inside_kernels"]) if n]
    if inside:
        note += f"; peaks include what kernels take inside, measured of each stage alone: {in_words(inside)}"
    if data["model"].get("mesh"):
        note += "; what a collective has read counts from then on if its thread, and not the rank's, lets go of it last"
    written = [train.wrote_trace(found["trace"]) for found in data["schedules"] if found.get("trace")]
    return [facts(rows), "", table(titles, cells, titles[1:]), "", note, *written]


def _three(both: dict[str, float], shown: Any) -> tuple[str, str, str]:
    measured = both["measured"]
    return shown(both["predicted"]), shown(measured), f"{round(100 * both['error']):+d} %"
