"""``splitkit view``: writes an interactive page of a plan."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.checks import nbytes
from splitkit.cli import source
from splitkit.cli.commands import plan_training
from splitkit.cli.common import (
    CapturedModel,
    check_drawn_schedule,
    decoded,
    is_step,
    links_asked,
    plan_file,
    planned_by,
    prepare_step,
    read_plan,
    stages_of_file,
    versions,
    with_recompute,
)
from splitkit.cli.outcome import Outcome, drawn, write_outputs, wrote
from splitkit.errors import CaptureError, UsageError
from splitkit.files import suffix_of

if TYPE_CHECKING:
    from splitkit.pipeline.order import PipelineOrder
    from splitkit.pipeline.run import ScheduleRun
    from splitkit.pipeline.stage_costs import StageCosts
    from splitkit.plans.parts import PlannedOptimizer
    from splitkit.plans.record import Plan


def run(args: Namespace) -> Outcome:
    """Run ``splitkit view``."""
    from splitkit.pipeline.trace import MeasuredStep
    from splitkit.prices import require_times

    optimizer: PlannedOptimizer = None if args.optimizer == "none" else args.optimizer or "planned"
    memory = nbytes("view", "memory", args.memory) if args.memory else None
    file = plan_file(args, takes=("costs", "training"))
    if file is not None and is_step(file):
        return _training_step(args, file, memory)
    if args.training is None and optimizer and not args.target.endswith(".json"):
        args.training = True  # plan by forward and backward, as the page draws both
    if file is None:
        check_drawn_schedule(args)
    # bad files are refused before the model is made
    others = {path: read_plan(path) for path in args.beside or ()}
    measured = None if args.measured is None else MeasuredStep.load(args.measured)
    schedule = measured.order if measured and args.schedule is None else args.schedule
    try:
        work, plan, costs = planned_by(args, file)
        plan = with_recompute(plan, args, work.gm)
    except CaptureError as error:
        raise _draw_reached(args, error) from error
    beside = [decoded(work.gm.graph, path, other) for path, other in others.items()]
    with work.clock.step("view", "pricing the rows"):
        step = None
        if schedule is not None:
            require_times(costs)
            stages = sk.stage_costs(sk.analyze(work.gm), plan, costs, optimizer=optimizer)
            step = _step(args, plan, stages, schedule)
        title = work.source.spec
        fields = {"model": source.source_record(work.source, args.output), **versions()}
        options = {"costs": costs, "optimizer": optimizer, "memory": memory, "run": step, "measured": measured}
        text = drawn(args.output, plan, fields=fields, title=title, beside=beside or None, **options)
    return _outcome(args, work, text)


def _training_step(args: Namespace, file: dict[str, Any], memory: int | None) -> Outcome:
    """Write the page of a plan of forward and backward, or of the stages of a training step.

    Stages have a step of the schedule that the plan was made for, or another, and the plan's own prices if no others
    are given.
    """
    from splitkit.engine.staged_step import StagedStep
    from splitkit.pipeline.placed_prices import costs_of_plan
    from splitkit.prices import require_times

    _require_options_of(args, stages_of_file(file) > 0)
    wanted = source.from_plan(args.target, file, args)
    work, given = plan_training.priced_step(args, wanted) if args.costs else (prepare_step(wanted), None)
    optimizer: PlannedOptimizer = None if args.optimizer == "none" else args.optimizer or "planned"
    options: dict[str, Any] = {"memory": memory, "title": work.source.spec}
    with work.clock.step("view", "dividing the step"):
        plan = decoded(work.gm.graph, args.target, file)
        step = work.joint.split(plan)
        if isinstance(step, StagedStep):
            costs = given or costs_of_plan(plan, work.gm)
            options |= {"costs": costs, "optimizer": optimizer}
            if args.schedule is not None:
                require_times(costs)
                options["run"] = _step(args, plan, step.stage_costs(costs, optimizer=optimizer), args.schedule)
        text = drawn(args.output, step, **options)
    return _outcome(args, work, text)


def _require_options_of(args: Namespace, in_stages: bool) -> None:
    """Refuse options that a page of a training step does not take, before the model is made."""
    of_stages = () if in_stages else ("schedule", "microbatches", "optimizer", "costs")
    for name in (*of_stages, "measured", "beside", "training", "recompute"):
        if getattr(args, name) is not None and in_stages:
            reason = f"--{name} cannot be combined with {args.target}, a plan of a training step in stages"
            raise UsageError("SK601", reason, "Leave it out; such a page takes --costs, --schedule and --memory.")
        if getattr(args, name) is not None:
            reason = f"--{name} is for plans in stages, and {args.target} divides a step into forward and backward"
            raise UsageError(
                "SK601", reason, f"Leave it out, or plan stages: splitkit plan MODEL --devices 4xh200 -o {args.target}"
            )


def _step(args: Namespace, plan: Plan, stages: Sequence[StageCosts], schedule: str | PipelineOrder) -> ScheduleRun:
    """Simulate a step; what the command line does not say is as the plan was made for."""
    from splitkit.pipeline.purpose import planned_order

    if isinstance(schedule, str):
        schedule, count = planned_order(plan.request, schedule, args.microbatches, len(stages)), None
    else:
        count = args.microbatches
    return sk.simulate_schedule(stages, schedule, count, links=links_asked(args, plan))


def _draw_reached(args: Namespace, error: CaptureError) -> CaptureError:
    """Write the page of what a capture reached before it failed; return the error with the page in its remedy."""
    if error.reached is None or suffix_of(args.output) == ".svg":
        return error
    from splitkit.view.renderers import capture_failure_html

    write_outputs({args.output: capture_failure_html(error, args.target)})
    return CaptureError(error.code, error.reason, f"{args.output} shows what was reached. {error.remedy}", error.nodes)


def _outcome(args: Namespace, work: CapturedModel, text: str) -> Outcome:
    data: dict[str, Any] = {
        "model": work.source.to_dict(),
        "file": str(args.output),
        "bytes": len(text.encode()),
        "seconds": work.clock.seconds,
    }
    return Outcome(data, [wrote(args.output, text)], files={args.output: text})
