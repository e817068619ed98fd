"""``splitkit plan --what fwd-bwd``: divides a training step into forward and backward."""

from __future__ import annotations

import re
import shlex
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import placement, source
from splitkit.cli.common import TRAINING, CapturedModel, check_costs, decoded, kind_of_costs, prepare_step, versions
from splitkit.cli.outcome import Lines, Outcome, drawn, seconds_text, wrote
from splitkit.cli.placement import MOST_BYTES
from splitkit.cli.source import Source, next_command, options_of_own_code, source_record
from splitkit.cli.syntax import policy_spec
from splitkit.errors import UsageError
from splitkit.pipeline.schedules import schedule_named
from splitkit.units import bounded, duration, read_percent, read_size, size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from rich.table import Table
    from torch.fx import Node

    from splitkit.costs import Costs
    from splitkit.engine.pair import Pair
    from splitkit.engine.staged_step import StagedStep
    from splitkit.memory.profile import MemoryProfile
    from splitkit.plans.policy import Policy
    from splitkit.training.flow import JointFlow


SHOWN = 10
"""The number of saved values in the table."""
OTHERS = tuple(name for name in placement.OPTIONS if name != "optimizer")
"""The options of placements that have no meaning for a training step without stages."""
IN_STAGES = ("schedule", "microbatches", "links")
"""The options among them that a training step in stages has."""
_SHARE = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")


def priced_step(args: Namespace, wanted: Source, file: dict[str, Any] | None = None) -> tuple[CapturedModel, Costs]:
    """Capture the model, and price the nodes of its joint graph, as the plan of a file does if there is one."""
    check_costs(args.costs)
    work = prepare_step(wanted)
    with work.clock.step("costs", "pricing the nodes"):
        if file is not None:
            from splitkit.pipeline.placed_prices import costs_of_plan

            return work, costs_of_plan(decoded(work.gm.graph, args.target, file), work.gm)
        inputs = (*work.joint.primals(*work.example.args, **work.example.kwargs), *work.joint.tangents())
        kind = args.costs or "roofline:a100"
        return work, kind_of_costs(work.gm, inputs, kind, mesh=work.source.mesh)


def plan_step(args: Namespace) -> Outcome:
    """Run ``splitkit plan MODEL --what fwd-bwd``."""
    from splitkit.engine.staged_step import StagedStep

    policy = _policy(args)
    work, costs = priced_step(args, source.from_args(args.model, args))
    with work.clock.step("plan", "planning"):
        pair = work.joint.split(policy, costs)
    if isinstance(pair, StagedStep):
        return stages_outcome(args, work.source, work.clock.seconds, costs, work.joint.flow, pair)
    with work.clock.step("simulate", "simulating the memory"):
        profile = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    assert pair.plan is not None
    data = _data(work, costs, pair, profile) | {"file": args.output, "next": next_command(work.source, args.output)}
    text = [*_text(data), *([f"wrote {args.output}", f"next: {data['next']}"] if args.output else [])]
    files: dict[str, Mapping[str, Any] | str] = {}
    if args.output:
        record = source.source_record(work.source, args.output)
        files[args.output] = {**pair.plan.to_dict(), "model": record, "what": TRAINING, **versions()}
    if args.view:
        files[args.view] = page = drawn(args.view, pair, costs=costs, title=work.source.spec)
        text.append(wrote(args.view, page))
    return Outcome(data, text, files=files)


def _policy(args: Namespace) -> Policy:
    if args.stages is not None:
        return _in_stages(args)
    if (args.policy is None) == (args.memory is None):
        raise UsageError(
            "SK601", f"--what {TRAINING} needs a policy", "Add --memory 2GiB, --stages N, or --policy EXPR."
        )
    if args.policy is not None:
        if args.optimizer is not None:
            remedy = "Give it to the policy: --policy \"Budget(card='24GiB', optimizer='adamw')\"."
            raise UsageError("SK601", "--optimizer cannot be combined with --policy", remedy)
        return policy_spec.parse(args.policy).build()
    if args.optimizer is not None:
        return _card(args)
    if args.memory == "least":
        return sk.policies.Budget("least")
    share = read_percent(args.memory)
    if share is None and _SHARE.fullmatch(args.memory) and float(args.memory) <= 1:
        share = float(args.memory)
    if share is None:
        _require_size(args.memory, "Write bytes, 2GiB, a share of what can be saved (50%), or least.")
    return sk.policies.Budget(args.memory if share is None else share)


def _in_stages(args: Namespace) -> Policy:
    """Return the policy of ``--stages``; backward is divided where the schedule divides it."""
    if args.optimizer == "none":
        reason = "--stages of a training step have an optimizer, --optimizer none is for inference"
        raise UsageError("SK601", reason, "Leave one of them out.")
    if args.memory is not None:
        _require_size(args.memory, "With --stages, --memory is the memory of each device: write bytes, or 24GiB.")
    schedule = schedule_named("1f1b" if args.schedule is None else args.schedule)
    links = None if args.links == "none" else args.links
    found = sk.policies.Pipeline(
        args.stages, schedule.word, args.microbatches, memory=args.memory, links=links, optimizer=args.optimizer
    )
    return sk.policies.SplitBackward(policy=found) if schedule.divided else found


def _card(args: Namespace) -> Policy:
    """Return a budget for all that training holds on a card."""
    _require_size(args.memory, "With --optimizer, --memory is the memory of the whole card: write bytes, or 24GiB.")
    optimizer = None if args.optimizer == "none" else args.optimizer
    return sk.policies.Budget(card=args.memory, optimizer=optimizer)


def _require_size(memory: str, remedy: str) -> None:
    if (found := read_size(memory)) is None or found > MOST_BYTES:
        raise UsageError("SK601", f"--memory {memory:.60} is not a size", remedy)


def _data(work: CapturedModel, costs: Costs, pair: Pair, profile: MemoryProfile) -> dict[str, Any]:
    from splitkit.graph.node_values import storage_bytes
    from splitkit.graph.storages import value_of
    from splitkit.prices import price_name

    assert pair.plan is not None
    flow = work.joint.flow
    twice = [n for n in flow.nodes if len(pair.plan.get(n, ())) > 1]
    forward = [n for n in flow.nodes if "forward" in pair.plan.get(n, ())]
    saved = [_value(one.name, one.nbytes, one.node) for one in profile.buffers if one.kind == "saved"]
    moved = [one.value for one in pair.plan.offloaded]
    saved += [_value(value.name, storage_bytes(value_of(value)), value) for value in moved]
    return {
        "what": TRAINING,
        "model": work.source.to_dict(),
        "note": pair.plan.note,
        "prices": price_name(costs),
        "unit": sk.costs.unit_of(costs),
        "forward": {"ops": len(forward), "seconds": _sum(costs, forward), "peak": profile.peak_of("forward")},
        "backward": {"ops": len(flow.nodes) - len(forward) + len(twice), "peak": profile.peak_of("backward")},
        "recomputed": {"ops": len(twice), "seconds": _sum(costs, twice)},
        "saved": {
            "nbytes": profile.saved + pair.host_bytes,
            "host": pair.host_bytes,
            "values": sorted(saved, key=lambda one: -int(one["nbytes"])),
        },
        "peak": profile.peak,
        "bounds": dict(profile.bounds),
        "unseen": sorted(profile.unseen),
        "seconds": work.clock.seconds,
    }


def _value(name: str, nbytes: int, node: Node | None) -> dict[str, Any]:
    """Return a saved value's name, module and op as data."""
    found = {"name": name, "nbytes": nbytes}
    if node is None:
        return found
    from splitkit.training.flow import SavedValue

    value = SavedValue.of(node, ())
    return found | {"module": value.module, "op": value.op, "label": value.label}


def _sum(costs: Costs, nodes: Iterable[Any]) -> float:
    return sum(costs.seconds(n) for n in nodes)


def _text(data: dict[str, Any]) -> Lines:
    forward, again, took = data["forward"], data["recomputed"], data["seconds"]
    share = again["seconds"] / forward["seconds"] if forward["seconds"] else 0.0
    time = duration(again["seconds"], data["unit"])
    host = f", {size(data['saved']['host'])} of it on the host" if data["saved"]["host"] else ""
    halves = f"forward {size(forward['peak'])}, backward {size(data['backward']['peak'])}"
    rows = {
        "plan": data["note"],
        "prices": data["prices"],
        "peak": f"{bounded(data['peak'], data['bounds'], data['unseen'])} ({halves})",
        "saved for backward": f"{size(data['saved']['nbytes'])} in {len(data['saved']['values'])} storages{host}",
        "recomputed": f"{again['ops']} of {forward['ops']} ops, {time} ({share:.1%})",
        "took": f"capture {seconds_text(took['capture'])}, plan {seconds_text(took['plan'])}",
    }
    largest = [(v.get("label", ""), v["name"], size(v["nbytes"])) for v in data["saved"]["values"][:SHOWN]]
    return [facts(rows), "", table(("largest values saved", "node", "bytes"), largest, ("bytes",))]


# Plan and run a training step in pipeline stages: ``splitkit plan --what fwd-bwd`` and ``splitkit run``.


def stages_outcome(
    args: Namespace, made: Source, took: Mapping[str, float], costs: Costs, flow: JointFlow, step: StagedStep
) -> Outcome:
    """Return what ``splitkit plan`` says of a plan in stages."""
    from splitkit.prices import price_name

    train, view = _train_command(made, args.output, step), _view_command(made, args.output)
    data: dict[str, Any] = {
        "what": TRAINING,
        "model": made.to_dict(),
        "note": step.plan.note,
        "prices": price_name(costs),
        "unit": sk.costs.unit_of(costs),
        "stages": stage_rows(flow, step, costs),
        "seconds": dict(took),
        "file": args.output,
        "next": train or next_command(made, args.output),
        "view": view,
    }
    text: Lines = [
        facts(
            {
                "plan": data["note"].replace("; ", ";\n"),
                **({} if made.mesh is None else {"mesh": f"a rank's share; {made.mesh} ranks for each stage"}),
                "prices": data["prices"],
                "took": seconds_text(data["seconds"]["plan"]),
            }
        ),
        "",
        stage_table(data["stages"], data["unit"]),
        *([f"wrote {args.output}"] if args.output else []),
        *(_next_lines(train, next_command(made, args.output), view)),
    ]
    files: dict[str, Mapping[str, Any] | str] = {}
    if args.view:
        files[args.view] = page = drawn(args.view, step, costs=costs, title=made.spec)
        text.append(wrote(args.view, page))
    if args.output:
        record = source_record(made, args.output)
        files[args.output] = {**step.plan.to_dict(), "model": record, "what": TRAINING, **versions()}
    return Outcome(data, text, files=files)


def _next_lines(train: str | None, run: str | None, view: str | None) -> list[str]:
    """Return what can be done with the plan file; nothing without a file."""
    found = {"next": train, "next, in one process" if train else "next": run, "picture": view}
    return [f"{what}: {words}" for what, words in found.items() if words]


def _train_command(made: Source, file: str | None, step: StagedStep) -> str | None:
    """Return the command that trains with the plan on the ranks of its schedule, as the plan was made for.

    A plan that was made for no schedule trains under 1F1B, or under ZBV if its backward is divided and ZBV takes its
    stages. There is no command for one stage.
    """
    from splitkit.pipeline.purpose import ranks_of

    count, asked = len(step.stages), step.plan.request
    if count < 2:
        return None
    schedule, microbatches = asked.schedule, asked.microbatches or 2 * count
    if schedule is None:
        divided = all(stage.weight is not None for stage in step.stages)
        schedule = "zbv" if divided and count % 2 == 0 else "1f1b"
    ranks = max(ranks_of(schedule, microbatches, count)) + 1
    return next_command(made, file, ranks, schedule, microbatches)


def _view_command(made: Source, file: str | None) -> str | None:
    """Return the command that draws the plan."""
    if file is None or file.startswith("/dev/"):
        return None
    words = ["splitkit", "view", file, *options_of_own_code(made)]
    return shlex.join([*words, "-o", "page.html"])


def stage_rows(flow: JointFlow, step: StagedStep, costs: Costs) -> list[dict[str, Any]]:
    """Return a row for each stage: seconds of its graphs, what it computes again, and what it saves and sends."""
    rows = []
    again = _again(flow, step, costs)
    for number, stage in enumerate(step.stages):
        seconds = {
            half: _sum(costs, (n for n in step.plan.members((half, number)) if n.op not in ("placeholder", "get_attr")))
            for half in ("forward", "backward", "input", "weight")
        }
        row: dict[str, Any] = {
            "stage": number,
            "forward": seconds["forward"],
            "backward": seconds["backward"] + seconds["input"],
            "weight": seconds["weight"] if stage.weight is not None else None,
            "recomputed": len(again[number]),
            "recompute": sum(again[number]),
            "saved": stage.saved_bytes + stage.host_bytes,
            "host": stage.host_bytes,
            "waiting": stage.waiting_bytes if stage.weight is not None else None,
            "sent": stage.sent_bytes,
            "gradients_sent": stage.gradients_sent_bytes,
        }
        rows.append(row)
    return rows


def _again(flow: JointFlow, step: StagedStep, costs: Costs) -> list[list[float]]:
    """Return for each stage the seconds of each op that its backward computes again."""
    from splitkit.training.stage_plan import computed_again

    found: list[list[float]] = [[] for _ in step.stages]
    for node in flow.nodes:
        for part in computed_again(flow, step.plan, node):
            if part.half != "weight":
                found[part.stage].append(costs.seconds(node))
    return found


def stage_table(rows: list[dict[str, Any]], unit: str) -> Table:
    """Return the table of `stage_rows`."""
    split = any(row["weight"] is not None for row in rows)
    columns = {
        "stage": [str(row["stage"]) for row in rows],
        "forward": [duration(row["forward"], unit) for row in rows],
        "input" if split else "backward": [duration(row["backward"], unit) for row in rows],
        **({"weight": [duration(row["weight"] or 0.0, unit) for row in rows]} if split else {}),
        "recomputed": [
            f"{row['recomputed']} ops, {duration(row['recompute'], unit)}" if row["recomputed"] else "-" for row in rows
        ],
        "saved": [size(row["saved"]) for row in rows],
        **({"on the host": [size(row["host"]) for row in rows]} if any(row["host"] for row in rows) else {}),
        **({"waits for weight": [size(row["waiting"] or 0) for row in rows]} if split else {}),
        "sent": [size(row["sent"]) for row in rows],
        "gradients sent": [size(row["gradients_sent"]) for row in rows],
    }
    return table(tuple(columns), list(zip(*columns.values(), strict=True)), tuple(columns)[1:])
