"""``splitkit plan`` for devices: plans, simulates the step, and shows what each rank does and holds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import splitkit as sk
from splitkit.cli import factories, placement, source
from splitkit.cli.common import (
    CapturedModel,
    check_costs,
    check_drawn_schedule,
    policy_of,
    prepare,
    prices,
    versions,
    with_recompute,
)
from splitkit.cli.outcome import FOR_PERFETTO, Lines, Outcome, plan_page, seconds_text, wrote
from splitkit.cli.placement import Placement
from splitkit.cli.source import next_command, source_record
from splitkit.costs import Costs
from splitkit.errors import FileError, UsageError
from splitkit.exports.rounding import PlanPrice, pricing_of
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.order_messages import OrderedMessages
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.pipeline.purpose import microbatches_of
from splitkit.pipeline.run import RankRow, ScheduleRun, rows_of_parts
from splitkit.pipeline.schedules import pipeline_order
from splitkit.pipeline.stage_prices import run_order
from splitkit.pipeline.synthesize import order_to_csv
from splitkit.plans.parts import Claim
from splitkit.plans.record import Plan
from splitkit.policies import Stages
from splitkit.search.plan_figures import StagePricing
from splitkit.units import duration, size
from splitkit.view.data.report import rank_table
from splitkit.view.tables import facts, table


def plan_for_devices(args: Namespace) -> Outcome:
    """Run ``splitkit plan`` with ``--devices``, or with ``--stages`` and other options of a placement."""
    wanted_model, wanted = source.from_args(args.model, args), Placement.of(args)
    policy = wanted.policy()
    check_costs(args.costs)
    if args.view or args.trace:
        check_drawn_schedule(args, args.devices)
    work = prepare(wanted_model)
    with work.clock.step("plan", f"planning {wanted.devices or f'{wanted.stages} stages'}", policy):
        # without a schedule, training adds backward
        backward = args.training or (wanted.optimizer is not None and wanted.schedule is None)
        costs = prices(work, args.costs, backward, wanted.devices.devices[0] if wanted.devices else None)
        found = sk.plan(work.gm, policy, costs, on_cycle=args.on_cycle or "error")
        purpose: Any = "training" if wanted.optimizer else "inference"
        asked = replace(found.request, purpose=purpose, optimizer=wanted.optimizer)
        made = with_recompute(replace(found, request=asked), args, work.gm)
        costs = costs_of_plan(made, work.gm)
    with work.clock.step("simulate", "simulating the step"):
        ranks, run = _ranks(work, made, costs, wanted)
        ordered = _ordered(run) if args.order and run else None
    report = sk.report(work.gm, made, costs)
    data: dict[str, Any] = {
        "model": work.source.to_dict(),
        "note": made.note,
        "placement": wanted.to_dict(),
        "report": report.to_dict(),
        "ranks": [rank.to_dict(number) for number, rank in enumerate(ranks)],
        "step": {name: value for name, value in run.to_dict().items() if name != "ranks"} if run else None,
        "seconds": work.clock.seconds,
        "file": args.output,
        "next": _next(args, work, ranks),
        "trace": args.trace,
        "messages": None,
    }
    written: dict[str, Mapping[str, Any] | str] = {}
    if args.trace and run:
        written[args.trace] = run.to_chrome_trace()
    if ordered is not None:
        written[args.order] = order_to_csv(ordered.order)
        figures = {"seconds": ordered.seconds, "bound": ordered.bound, "gap": ordered.gap}
        data["messages"] = {"file": args.order, **figures}
    if args.output:
        written[args.output] = {**made.to_dict(), "model": source.source_record(work.source, args.output), **versions()}
    written_lines = [f"wrote {path}{f' {FOR_PERFETTO}' if path == args.trace else ''}" for path in written]
    if args.view:
        limits = {wanted.limit(rank) for rank in range(len(ranks))}
        memory = limits.pop() if len(limits) == 1 else None
        written[args.view] = page = plan_page(made, memory=memory, title=work.source.spec)
        written_lines.append(wrote(args.view, page))
    if data["next"]:
        written_lines.append(f"next: {data['next']}")
    summary = facts(_summary(wanted, made.claim, ranks, data))
    text: Lines = [report.table(), "", summary, "", rank_table(ranks), *written_lines]
    return Outcome(data, text, files=written)


def _next(args: Namespace, work: CapturedModel, ranks: Sequence[RankRow]) -> str | None:
    """Return the command that runs the plan, or trains it if it has a schedule."""
    if args.schedule is None:
        return next_command(work.source, args.output)
    schedule = args.order or args.schedule_text
    return next_command(work.source, args.output, sum(rank.replicas for rank in ranks), schedule)


def _ranks(
    work: CapturedModel, made: Plan, costs: Costs, wanted: Placement
) -> tuple[Sequence[RankRow], ScheduleRun | None]:
    """Return what each rank does and holds, and the simulated step if there is a schedule."""
    flow = sk.analyze(work.gm)
    pricing = StagePricing.of(flow, made, costs)
    stages = pricing.stages_with_cache(made)
    names = [device.name for device in wanted.devices.devices] if wanted.devices else []
    if wanted.schedule is None:
        parts = dict(zip(run_order(flow, made), stages, strict=True))
        names = names if wanted.stages is None else (names or [""] * len(parts))[: len(parts)]
        loads = list(pricing.figures(made).loads.values()) if wanted.links and wanted.objective != "latency" else None
        return list(rows_of_parts(names, [*map(wanted.limit, range(len(names)))], parts, loads)), None
    run = pricing.request.run(stages)
    return run.rows(names[: len(stages)], [*map(wanted.limit, range(run.ranks))]), run


def _ordered(run: ScheduleRun) -> OrderedMessages:
    """Order the messages of a simulated step."""
    transport = run.transport
    assert transport is not None, "of a simulated step"
    devices = [name for names in transport.devices for name in names]
    return sk.order_messages(run.stages, run.order, links=transport.links, devices=devices)


def _summary(wanted: Placement, claim: Claim | None, ranks: Sequence[RankRow], data: dict[str, Any]) -> dict[str, str]:
    rows, unit = wanted.facts(), next((rank.unit for rank in ranks if rank.unit != "s"), "s")
    if claim is not None:
        tokens = claim.objective == "tokens"
        value, bound = (
            (f"{int(number):,}" if tokens else duration(number, unit)) for number in (claim.value, claim.bound)
        )
        rows |= {
            claim.objective: f"{value}, limited by part {claim.limiting}",
            "bound": f"{bound}: {_proof(claim)}",
            "solver": claim.solver,
        }
    if step := data["step"]:
        rows["step"] = (
            f"{duration(step['seconds'], unit)}, {step['schedule']} of {step['microbatches']} microbatches, "
            f"bubble {step['bubble']:.1%}"
        )
    if messages := data["messages"]:
        proof = "no order of messages has a shorter one" if not messages["gap"] else f"gap {messages['gap']:.2%}"
        rows["in order"] = f"{duration(messages['seconds'], unit)} with one communicator for each rank; {proof}"
    peaks = [sum(rank.nbytes) for rank in ranks]
    fullest = max(range(len(ranks)), key=peaks.__getitem__)
    tightest = max(range(len(ranks)), key=lambda number: (ranks[number].used, peaks[number]))
    for name, number in {"peak": fullest, "tightest": tightest}.items():
        if name == "peak" or number != fullest:
            of = "" if (limit := ranks[number].limit) is None else f" of {size(limit)}"
            rows[name] = f"{size(peaks[number])} on rank {number}{of}"
    took = data["seconds"]
    rows["took"] = f"capture {seconds_text(took['capture'])}, plan {seconds_text(took['plan'])}"
    return rows


def _proof(claim: Claim) -> str:
    if claim.optimal:
        return "proven optimal" if claim.gap < 5e-5 else f"within {claim.gap:.2%} of optimal, which is proven"
    return f"gap {claim.gap:.2%}: no plan is better by more" if claim.gap >= 5e-5 else "gap below 0.01%"


# ``splitkit plan MODEL --from FILE``: reads the stages of another tool, and compares them with a plan of splitkit.


_TITLES = ("plan", "slowest stage", "step", "peak", "sent")
_ELSEWHERE = ("devices", "replicas", "objective", "tokens", "chunk", "trace", "order")


def plan_from_text(args: Namespace) -> Outcome:
    """Run ``splitkit plan`` with ``--from``."""
    placement.refuse_with(args, "--from", "Leave one of the two out.", _ELSEWHERE)
    factories.check_model_name(args.model, plans=False)
    check_costs(args.costs)
    placement.check_memory(Namespace(memory=args.memory, devices=None), least=False)
    text = _text(args.from_file)
    own = policy_of(args).build() if args.policy is not None else None
    work = prepare(source.from_args(args.model, args))
    costs = prices(work, args.costs, args.training)
    with work.clock.step("plan", "reading the stages"):
        found = with_recompute(sk.import_plan(work.gm, text, form=args.form, costs=costs), args, work.gm)
    flow, stages = sk.analyze(work.gm), len(found.parts)
    if args.stages is not None and args.stages != stages:
        reason = f"--stages {args.stages}, and {args.from_file} has {stages} stages"
        raise UsageError("SK601", reason, "Leave --stages out to compare plans with the same number of stages.")
    order = _order(args, stages)
    links = None if args.links == "none" else args.links
    policy = own or Stages(
        stages, schedule=args.schedule, microbatches=args.microbatches, memory=args.memory, links=links
    )
    with work.clock.step("ours", "planning as many stages", policy):
        ours = with_recompute(sk.plan(work.gm, policy, costs), args, work.gm)
    optimizer = None if args.optimizer == "none" else args.optimizer
    pricing = pricing_of(flow, found, costs, order, args.memory, links, optimizer)
    theirs_price, our_price = pricing.price(found), pricing.price(ours)
    ratio = theirs_price.load / our_price.load if our_price.load else 1.0
    report = sk.report(work.gm, found, costs)
    data: dict[str, Any] = {
        "model": work.source.to_dict(),
        "note": found.note,
        "theirs": asdict(theirs_price),
        "ours": asdict(our_price) | {"note": ours.note},
        "ratio": ratio,
        "report": report.to_dict(),
        "seconds": work.clock.seconds,
        "file": args.output,
        "next": next_command(work.source, args.output),
    }
    files: dict[str, Mapping[str, Any] | str] = {}
    written = []
    if args.output:
        files[args.output] = {**found.to_dict(), "model": source_record(work.source, args.output), **versions()}
        written += [f"wrote {args.output}", f"next: {data['next']}"]
    if args.view:
        files[args.view] = page = plan_page(found, costs=costs, title=work.source.spec)
        written.append(wrote(args.view, page))
    rows = [_row(args.from_file, theirs_price), _row("splitkit", our_price)]
    more = f"the slowest stage of {args.from_file} takes {ratio:.3f} times as long as that of splitkit's plan"
    return Outcome(data, [report.table(), "", table(_TITLES, rows, _TITLES[1:]), more, *written], files=files)


def _row(name: str, price: PlanPrice) -> tuple[str, ...]:
    step = duration(price.step, price.unit) if price.step else "-"
    return name, duration(price.load, price.unit), step, size(price.peak), size(price.traffic)


def _order(args: Namespace, stages: int) -> PipelineOrder | None:
    if args.schedule is None:
        if args.microbatches is not None:
            raise UsageError("SK601", "--microbatches needs --schedule", "Name a schedule: --schedule 1f1b.")
        return None
    return pipeline_order(args.schedule, stages, microbatches_of(args.microbatches, stages))


def _text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = f"cannot read {path!r}: {getattr(error, 'strerror', None) or error}"
        raise FileError("SK504", reason, "Name a text file that another tool reads.") from error
