"""``splitkit plan MODEL --from FILE``: reads the stages of another tool, and compares them with a plan of splitkit."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import splitkit as sk
from splitkit.cli import factories, placement, source
from splitkit.cli.common import check_costs, policy_of, prepare, prices, versions
from splitkit.cli.outcome import Outcome
from splitkit.cli.pages import plan_page, wrote
from splitkit.cli.part_flags import with_recompute
from splitkit.cli.source import next_command, source_record
from splitkit.errors import FileError, UsageError
from splitkit.exports.rounding import PlanPrice, pricing_of
from splitkit.graph.dataflow import analyze
from splitkit.pipeline.order import PipelineOrder
from splitkit.pipeline.purpose import microbatches_of
from splitkit.pipeline.schedules import pipeline_order
from splitkit.policies import Stages
from splitkit.units import duration, size
from splitkit.view.tables import table

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
    flow, stages = analyze(work.gm), len(found.parts)
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
        "command": "plan",
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
