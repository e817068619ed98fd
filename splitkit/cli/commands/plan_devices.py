"""``splitkit plan`` for devices: plans, simulates the step, and shows what each rank does and holds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import source
from splitkit.cli.common import CapturedModel, check_costs, check_drawn_schedule, prepare, prices, versions
from splitkit.cli.outcome import Outcome, seconds_text
from splitkit.cli.outputs import FOR_PERFETTO
from splitkit.cli.pages import plan_page, wrote
from splitkit.cli.part_flags import with_recompute
from splitkit.cli.placement import Placement
from splitkit.cli.source import next_command
from splitkit.costs import Costs
from splitkit.errors import ScheduleError
from splitkit.pipeline.order_messages import OrderedMessages
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.pipeline.run import RankRow, ScheduleRun, rows_of_parts
from splitkit.pipeline.stage_prices import run_order
from splitkit.pipeline.synthesize import order_to_csv
from splitkit.plans.parts import Claim
from splitkit.plans.record import Plan
from splitkit.search.plan_figures import StagePricing
from splitkit.units import duration, size
from splitkit.view.data.report import rank_table
from splitkit.view.tables import facts

if TYPE_CHECKING:
    from rich.console import RenderableType


def plan_for_devices(args: Namespace) -> Outcome:
    """Run ``splitkit plan`` with ``--devices``, or with ``--stages`` and other options of a placement."""
    wanted_model, wanted = source.from_args(args.model, args), Placement.of(args)
    policy = wanted.policy()
    check_costs(args.costs)
    if args.view or args.trace:
        check_drawn_schedule(args, args.devices)
    work = prepare(wanted_model)
    with work.clock.step("plan", f"planning {wanted.devices or f'{wanted.stages} stages'}", policy):
        costs = _prices(work, args, wanted)
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
        "command": "plan",
        "model": work.source.to_dict(),
        "note": made.note,
        "placement": wanted.to_dict(),
        "report": report.to_dict(),
        "ranks": [rank.to_dict(number) for number, rank in enumerate(ranks)],
        "step": _step(run) if run else None,
        "seconds": work.clock.seconds,
        "file": args.output,
        "next": _next(args, work, ranks),
        "trace": args.trace,
        "messages": _messages(ordered, args.order),
    }
    written = _files(args, work, made, run, ordered)
    written_lines = [f"wrote {path}{f' {FOR_PERFETTO}' if path == args.trace else ''}" for path in written]
    if args.view:
        limits = {wanted.limit(rank) for rank in range(len(ranks))}
        memory = limits.pop() if len(limits) == 1 else None
        written[args.view] = page = plan_page(made, memory=memory, title=work.source.spec)
        written_lines.append(wrote(args.view, page))
    if data["next"]:
        written_lines.append(f"next: {data['next']}")
    summary = facts(_summary(wanted, made.claim, ranks, data))
    text: list[RenderableType] = [report.table(), "", summary, "", rank_table(ranks), *written_lines]
    return Outcome(data, text, files=written)


def _next(args: Namespace, work: CapturedModel, ranks: Sequence[RankRow]) -> str | None:
    """Return the command that runs the plan, or trains it if it has a schedule; none if ranks refuse its replicas."""
    if args.schedule is None:
        return next_command(work.source, args.output)
    if len({rank.replicas for rank in ranks}) > 1:
        return None
    schedule = args.order or args.schedule_text
    return next_command(work.source, args.output, sum(rank.replicas for rank in ranks), schedule)


def _prices(work: CapturedModel, args: Namespace, wanted: Placement) -> Costs:
    """Return the prices of ``--costs``, or the first device's roofline; without a schedule, training adds backward."""
    backward = args.training or (wanted.optimizer is not None and wanted.schedule is None)
    return prices(work, args.costs, backward, wanted.devices.devices[0] if wanted.devices else None)


def _files(
    args: Namespace, work: CapturedModel, made: Plan, run: ScheduleRun | None, ordered: OrderedMessages | None
) -> dict[str, Mapping[str, Any] | str]:
    """Return path -> data of the files to write."""
    wanted: dict[str, Mapping[str, Any] | str] = {}
    if args.trace and run:
        wanted[args.trace] = run.to_chrome_trace()
    if ordered is not None:
        wanted[args.order] = order_to_csv(ordered.order)
    if args.output:
        wanted[args.output] = {**made.to_dict(), "model": source.source_record(work.source, args.output), **versions()}
    return wanted


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
    """Order the messages of a simulated step.

    Raises:
        ScheduleError: SK330 if stages have different numbers of replicas.
    """
    if len(set(run.replicas)) > 1:
        text = f"--order for stages with {', '.join(map(str, run.replicas))} replicas"
        raise ScheduleError("SK330", text, "Give all stages the same number of replicas, or leave --order out.")
    transport = run.transport
    assert transport is not None, "of a simulated step"
    devices = [name for names in transport.devices for name in names]
    return sk.order_messages(run.stages, run.order, links=transport.links, devices=devices)


def _messages(ordered: OrderedMessages | None, file: str | None) -> dict[str, Any] | None:
    """Return the step with its messages in order as data."""
    if ordered is None:
        return None
    return {"file": file, "seconds": ordered.seconds, "bound": ordered.bound, "gap": ordered.gap}


def _step(run: ScheduleRun) -> dict[str, Any]:
    """Return the step as data, without its ranks."""
    return {name: value for name, value in run.to_dict().items() if name != "ranks"}


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
