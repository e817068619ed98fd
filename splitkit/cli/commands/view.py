"""``splitkit view``: writes an interactive page of a plan."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.checks import nbytes
from splitkit.cli import source
from splitkit.cli.commands import plan_training
from splitkit.cli.common import (
    TRAINING,
    CapturedModel,
    check_drawn_schedule,
    decoded,
    links_asked,
    plan_file,
    planned_by,
    read_plan,
    versions,
)
from splitkit.cli.outcome import Outcome
from splitkit.cli.outputs import write_outputs
from splitkit.cli.pages import drawn, wrote
from splitkit.cli.part_flags import with_recompute
from splitkit.cli.staged_plan_files import stages_of_file
from splitkit.errors import CaptureError, UsageError
from splitkit.files import suffix_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitkit.cli.commands.plan_training import CapturedStep
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
    if file is not None and (file.get("what") == TRAINING or stages_of_file(file)):
        return _halves(args, file, memory)
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


def _halves(args: Namespace, file: dict[str, Any], memory: int | None) -> Outcome:
    """Write the page of a plan of forward and backward, or of the stages of a training step."""
    if stages_of_file(file):
        return _stages(args, file, memory)
    of_stages = ("schedule", "microbatches", "measured", "beside", "optimizer", "costs", "training", "recompute")
    unfit = [name for name in of_stages if getattr(args, name) is not None]
    if unfit:
        reason = f"--{unfit[0]} is for plans in stages, and {args.target} divides a step into forward and backward"
        raise UsageError(
            "SK601", reason, f"Leave it out, or plan stages: splitkit plan MODEL --devices 4xh200 -o {args.target}"
        )
    work = plan_training.prepare_step(source.from_plan(args.target, file, args))
    with work.clock.step("view", "dividing the step"):
        graph = work.joint.graph_module.graph
        plan = decoded(graph, args.target, file)
        text = drawn(args.output, work.joint.split(plan), memory=memory, title=work.source.spec)
    return _outcome(args, work, text)


def _stages(args: Namespace, file: dict[str, Any], memory: int | None) -> Outcome:
    """Write the page of the stages of a training step, with a step of the schedule that it is planned for, or another.

    The plan's own prices are used if no others are given.
    """
    from splitkit.engine.staged_step import StagedStep
    from splitkit.pipeline.placed_prices import costs_of_plan
    from splitkit.prices import require_times

    for name in ("measured", "beside", "training", "recompute"):
        if getattr(args, name) is not None:
            reason = f"--{name} cannot be combined with {args.target}, a plan of a training step in stages"
            raise UsageError("SK601", reason, "Leave it out; such a page takes --costs, --schedule and --memory.")
    wanted = source.from_plan(args.target, file, args)
    work, given = plan_training.priced_step(args, wanted) if args.costs else (plan_training.prepare_step(wanted), None)
    optimizer: PlannedOptimizer = None if args.optimizer == "none" else args.optimizer or "planned"
    with work.clock.step("view", "dividing the step"):
        plan = decoded(work.joint.graph_module.graph, args.target, file)
        step = work.joint.split(plan)
        assert isinstance(step, StagedStep)
        costs = given or costs_of_plan(plan, work.joint.graph_module)
        run = None
        if args.schedule is not None:
            require_times(costs)
            run = _step(args, plan, step.stage_costs(costs, optimizer=optimizer), args.schedule)
        options: dict[str, Any] = {"costs": costs, "optimizer": optimizer, "memory": memory, "run": run}
        text = drawn(args.output, step, title=work.source.spec, **options)
    return _outcome(args, work, text)


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


def _outcome(args: Namespace, work: CapturedModel | CapturedStep, text: str) -> Outcome:
    data: dict[str, Any] = {
        "command": "view",
        "model": work.source.to_dict(),
        "file": str(args.output),
        "bytes": len(text.encode()),
        "seconds": work.clock.seconds,
    }
    return Outcome(data, [wrote(args.output, text)], files={args.output: text})
