"""``splitkit sweep``: shows what training in less memory costs; or, with ``--stages``, compares pipelines."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import track

import splitkit as sk
from splitkit.cli import placement, source
from splitkit.cli.commands import plan_training as trainplan
from splitkit.cli.commands.plan_training import priced_step
from splitkit.cli.common import TRAINING, CapturedModel, check_costs, decoded, prepare, prepare_step, prices, read_plan
from splitkit.cli.outcome import Lines, Outcome, drawn, seconds_text, still_pages, wrote
from splitkit.cli.source import Source
from splitkit.cli.syntax import device_list
from splitkit.cli.syntax.device_list import DeviceList
from splitkit.costs import Costs, Fused, Roofline, unit_of
from splitkit.costs.recorded import costs_of
from splitkit.errors import UsageError
from splitkit.hardware.device_specs import devices as known_devices
from splitkit.plans.parts import PlanRequest, request_from_json
from splitkit.plans.plan_file import parts_in_data, policy_text
from splitkit.prices import as_given, price_name
from splitkit.studies.fit.fit import plan_command
from splitkit.studies.frontier import Point
from splitkit.studies.sweep import (
    MICROBATCHES,
    Sweep,
    Sweeper,
    TrainingSweeper,
    combinations,
    training_combinations,
)
from splitkit.units import duration, read_size, size
from splitkit.view.tables import facts, table

PIPELINES = ("what", "microbatches", "schedules", "chunks", "devices", "memory", "links", "optimizer", "recompute")
"""The options that need ``--stages``."""
POINTS = 10
"""The default number of points."""


def run(args: Namespace) -> Outcome:
    """Run ``splitkit sweep``."""
    wanted, file = _model(args)
    _check(args)
    if args.stages is not None:
        return sweep_stages(args, wanted, file)
    return _frontier(args, wanted, file)


def _model(args: Namespace) -> tuple[Source, dict[str, Any] | None]:
    """Return the model, and the plan of its file if the sweep is over plans of the same graph.

    A plan file also sets the number of stages unless ``--stages`` does.
    """
    if not args.target.endswith(".json"):
        return source.from_args(args.target, args), None
    data = read_plan(args.target)
    wanted = source.from_plan(args.target, data, args)
    if data.get("what") == TRAINING:
        args.what = args.what or (None if args.stages is None else TRAINING)
    elif args.stages is None:
        args.stages = (max(1, len(parts_in_data(data))),)
    same = (data.get("what") == TRAINING) == (args.what == TRAINING or args.stages is None)
    if same and args.stages is not None and args.devices is None:
        _as_planned(args, request_from_json(data.get("request")))
        checkpointed = all(part.call == "checkpoint" for part in parts_in_data(data).values())
        args.recompute = args.recompute or checkpointed or None
    return wanted, data if same and args.costs is None and args.devices is None else None


def _as_planned(args: Namespace, asked: PlanRequest) -> None:
    """Let a plan say what the command line does not.

    Raises:
        UsageError: SK601 if the plan is for devices of several kinds.
    """
    if args.costs is None and asked.kinds > 1:
        name = next(iter(asked.devices.values())).name
        reason = f"{args.target} is for devices that differ, and a sweep is for ranks of one kind"
        raise UsageError("SK601", reason, f"Name the kind: --devices {name}.")
    args.links = asked.links if args.links is None and isinstance(asked.links, str) else args.links
    args.memory = f"{asked.memory}B" if args.memory is None and isinstance(asked.memory, int) else args.memory
    args.optimizer = args.optimizer or asked.optimizer


def _check(args: Namespace) -> None:
    """Refuse options of one kind of sweep with the other, and bad values, before torch is imported."""
    _check_offload(args)
    if args.stages is None:
        for name in PIPELINES:
            if getattr(args, name) is not None:
                raise UsageError("SK601", f"--{name} needs --stages", "Add --stages 2,4,8 to sweep over pipelines.")
        return
    for name in ("points", "of"):
        if getattr(args, name) is not None:
            raise UsageError("SK601", f"--{name} cannot be combined with --stages", "Leave one of them out.")
    if args.what == TRAINING and args.recompute:
        remedy = "Leave it out: stages of a training step recompute what the memory requires."
        raise UsageError("SK601", f"--recompute cannot be combined with --what {TRAINING}", remedy)
    if args.what != TRAINING and args.chunks is not None:
        raise UsageError("SK601", "--chunks is for stages of a training step", f"Add --what {TRAINING}.")
    if args.devices is not None:
        device_list.read_device_list(args.devices)
    placement.check_memory(args, least=False)


def _check_offload(args: Namespace) -> None:
    if args.offload is None:
        if args.host is not None:
            raise UsageError("SK601", "--host needs --offload", "Name the link: --offload pcie5.")
        return
    if args.stages is None and args.of != "peak":
        raise UsageError("SK601", "--offload limits the peak", "Add --of peak.")
    if args.stages is not None and args.what != TRAINING:
        raise UsageError("SK601", "--offload is for stages of a training step", f"Add --what {TRAINING}.")
    if args.stages is not None and args.memory is None and args.devices is None:
        raise UsageError("SK601", "--offload needs a memory limit", "Add --memory 80GiB.")
    if args.host is not None and not read_size(args.host):
        raise UsageError("SK601", f"--host {args.host} is not a size", "Write --host 64GiB.")


def _frontier(args: Namespace, wanted: Source, file: dict[str, Any] | None) -> Outcome:
    """Compute the frontier of saved bytes, or of the peak, against recompute time."""
    work, costs = trainplan.priced_step(args, wanted, file)
    with work.clock.step("frontier", "finding the frontier"):
        count = args.points or POINTS
        room: dict[str, Any] = {"of": args.of or "saved", "offload": args.offload, "host": args.host}
        frontier = sk.Frontier(work.joint, costs, budgets=count, **room)
        points = list(_spread(frontier, count))
    with work.clock.step("simulate", "simulating the memory of each point"):
        rows = [point.to_dict(peak=True) for point in points]
    data: dict[str, Any] = {
        "model": work.source.to_dict(),
        "prices": price_name(costs),
        "step": frontier.step_seconds,
        "of": frontier.of,
        "offload": args.offload,
        "corners": len(frontier.points),
        "points": rows,
        "seconds": work.clock.seconds,
    }
    took = work.clock.seconds
    text = facts(
        {
            "prices": data["prices"],
            "a step without recompute": duration(frontier.step_seconds, frontier.unit),
            "took": f"capture {seconds_text(took['capture'])}, frontier {seconds_text(took['frontier'])}",
        }
    )
    of, other = ("peak", "saved") if frontier.of == "peak" else ("saved", "peak")
    titles: tuple[str, ...] = (of, "of all", "recompute", "of the step", other)
    if args.offload is not None:
        titles = (of, "of all", "recompute and waiting", "of the step", other, "on the host")
    files, written = {}, []
    if args.view:
        files[args.view] = page = drawn(args.view, frontier, title=f"frontier of {work.source.spec}")
        written = [wrote(args.view, page)]
    shown: Lines = [text, "", table(titles, _cells(rows, frontier, of, other), titles), *written]
    return Outcome(data, shown, files=files)


def _spread(frontier: sk.Frontier, count: int) -> Iterator[Point]:
    """Yield points at about even distances, from the most bytes to the least, each once."""
    least, most = frontier.taken(frontier.points[0]), frontier.taken(frontier.points[-1])
    seen: set[int] = set()
    for number in range(count):
        point = frontier.within(most - (most - least) * number // max(1, count - 1))
        if frontier.taken(point) not in seen:
            seen.add(frontier.taken(point))
            yield point


def _cells(rows: list[dict[str, Any]], frontier: sk.Frontier, of: str, other: str) -> Iterator[list[str]]:
    step, unit = frontier.step_seconds, frontier.unit
    most = max(row[of] for row in rows)
    for row in rows:
        share, again = row[of] / most if most else 1.0, row["seconds"] / step if step else 0.0
        cells = [size(row[of]), f"{share:.0%}", duration(row["seconds"], unit), f"{again:.1%}", size(row[other])]
        yield [*cells, size(row["host"])] if "host" in row else cells


# ``splitkit sweep --stages``: plans and simulates every combination of stages, microbatches and schedules.


def sweep_stages(args: Namespace, wanted: Source, file: dict[str, Any] | None = None) -> Outcome:
    """Run ``splitkit sweep --stages`` with checked arguments, by the prices of a plan's file if there is one.

    A forward graph takes these if they are times. Of a training step, each row is planned by ``Pipeline``.

    Raises:
        UsageError: SK601 for devices of several kinds.
        ScheduleError: SK330 for an unknown schedule.
        CostError: SK321 for an unknown device, SK322 for an unknown link.
    """
    devices, links, memory, why = ranks_of_sweep(args)
    numbers, trains = (args.stages, args.microbatches or MICROBATCHES, args.schedules), args.what == TRAINING
    each: list[Any] = [*(training_combinations(*numbers, args.chunks) if trains else combinations(*numbers))]
    check_costs(args.costs)
    work, costs = (_priced_step if trains else _priced_model)(args, wanted, file, devices)
    optimizer: Any = args.optimizer or "adam"
    sweeper: Sweeper | TrainingSweeper
    if trains:
        room = {"offload": args.offload, "host": args.host}
        sweeper = TrainingSweeper(work.joint, costs, memory, links, optimizer, **room)
    else:
        sweeper = Sweeper(work.gm, costs, memory, links, optimizer, bool(args.recompute))
    with work.clock.step("sweep", ""):
        console, hidden = Console(stderr=True), not sys.stderr.isatty()
        every = track(each, "planning and simulating", console=console, transient=True, disable=hidden)
        found = sweeper.sweep([sweeper.row(*one) for one in every])
    took, spec = work.clock.seconds, work.source.spec
    data: dict[str, Any] = {
        "model": work.source.to_dict(),
        "device": None if devices is None else devices.devices[0].name,
        "links": links,
        "optimizer": sweeper.optimizer,
    }
    if trains:
        word = _costs_word(args, devices) if file is None else _word_of(as_given(costs))
        data |= {"what": TRAINING, "offload": args.offload, "next": next_plan(work.source, word, found)}
    else:
        data |= {"recompute": sweeper.recompute}
    data |= {**found.to_dict(), "seconds": took}
    unit = next((row.run.unit for row in found.rows if row.run), "s")
    shown = {
        "prices": found.note or ("as measured" if unit == "s" else unit),
        "links": f"{links or 'none'}{why}",
        "memory": "no limit" if memory is None else f"{size(memory)} per rank",
        "took": f"capture {seconds_text(took['capture'])}, sweep {seconds_text(took['sweep'])}",
    }
    if not trains and sweeper.recompute:
        shown["recompute"] = "backward runs the parts again; the stages are those planned without"
    text: Lines = [facts(shown), "", found.table(), "", *found.refused, *advice(found)]
    text += [f"next: {data['next']}"] if data.get("next") else []
    files = {}
    if args.view:
        files[args.view] = page = still_pages(spec, {f"pipelines of {spec}": found})
        text.append(wrote(args.view, page))
    return Outcome(data, text, files=files)


def _priced_model(
    args: Namespace, wanted: Source, file: dict[str, Any] | None, devices: DeviceList | None
) -> tuple[CapturedModel, Costs]:
    work = prepare(wanted)
    with work.clock.step("costs", "pricing the nodes"):
        costs = prices(work, args.costs, None, "a100" if devices is None else devices.devices[0])
        if file is not None:
            own = costs_of(decoded(work.gm.graph, args.target, file).prices, work.gm)
            costs = own if unit_of(own) == "s" else costs
    return work, costs


def _priced_step(
    args: Namespace, wanted: Source, file: dict[str, Any] | None, devices: DeviceList | None
) -> tuple[CapturedModel, Costs]:
    if devices is None or args.costs is not None:
        return priced_step(args, wanted, file)
    work = prepare_step(wanted)
    return work, sk.costs.roofline(work.gm, devices.devices[0])


def ranks_of_sweep(args: Namespace) -> tuple[DeviceList | None, str | None, int | None, str]:
    """Return the kind of device of all ranks, their links, the memory of each, and why it is those links.

    Raises:
        UsageError: SK601 for devices of several kinds.
        CostError: SK321 for an unknown device, SK322 for an unknown link.
    """
    devices = None if args.devices is None else device_list.read_device_list(args.devices)
    # the count in a file of devices does not matter here
    several = devices is not None and len(devices.devices) > 1 and not device_list.is_file(args.devices)
    if devices is not None and (several or not devices.alike):
        raise UsageError(
            "SK601",
            f"--devices {args.devices} are {devices}, and --stages says how many devices there are",
            f"Name the kind alone: --devices {devices.devices[0].name}.",
        )
    memory = placement.memory_option(args, devices)
    assert not isinstance(memory, str | tuple)  # checked, and of one kind of device
    if memory is None and devices is not None:
        memory = devices.devices[0].memory
    links, why = placement.links_option(args.links, devices)
    return devices, links, memory, why


def advice(found: Sweep) -> Iterator[str]:
    """Yield the fastest and the smallest pipeline that fit, or what the smallest would need."""
    ran = [row for row in found.rows if row.run is not None]
    if found.pareto:
        fastest, smallest = found.pareto[0], min(found.pareto, key=lambda row: row.numbers[1])
        for what, row in {"fastest": fastest, "smallest": smallest}.items():
            each, peak, ranks = row.numbers
            yield (
                f"{what}: {row.schedule} of {row.stages} stages and {row.microbatches} microbatches on {ranks} "
                f"rank{'s' if ranks > 1 else ''}, "
                f"{duration(each, row.run.unit if row.run else 's')} per microbatch, peak {size(peak)}"
            )
    elif ran:
        least = min(ran, key=lambda row: row.numbers[1])
        yield (
            f"nothing fits: the lowest peak is {size(least.numbers[1])}, of {least.schedule} of {least.stages} stages "
            f"and {least.microbatches} microbatches; give more memory, more stages, or smaller microbatches"
        )
    elif needs := [row for row in found.rows if row.needs is not None]:
        least = min(needs, key=lambda row: row.needs or 0)
        yield (
            f"nothing fits: --memory {least.needs}B would do for {least.stages} stages under {least.schedule} with "
            f"{least.microbatches} microbatches"
        )
    else:
        yield "no schedule allows any of these numbers of stages and microbatches"


def _costs_word(args: Namespace, devices: DeviceList | None) -> str | None:
    """Return ``--costs`` as `splitkit plan` takes it; ``None`` for its default."""
    if args.costs is not None or devices is None:
        given: str | None = args.costs
        return given
    name = devices.devices[0].name
    return f"roofline:{args.devices}:{name}" if device_list.is_file(args.devices) else f"roofline:{name}"


def _word_of(costs: Any) -> str | None:
    """Return ``--costs`` for the prices of a plan's file; ``None`` if no word of the command line names them."""
    if not isinstance(costs, Roofline | Fused):
        return None
    return f"{type(costs).__name__.lower()}:{costs.device.name}" if costs.device in known_devices().values() else None


def next_plan(source: Source, costs: str | None, found: Sweep) -> str | None:
    """Return the command that plans the fastest row; ``None`` if no row fits."""
    policy = found.pareto[0].policy if found.pareto else None
    if policy is None:
        return None
    words = ["--seed", str(source.seed)] if source.seed else []
    words += ["--eval"] if source.mode == "eval" else []
    words += ["--loss", source.loss] if source.loss else []
    words += ["--costs", costs] if costs else []
    text = policy_text(policy)
    text = text if '"' in text else text.replace("'", '"')  # single quotes enclose the policy in a shell
    words += ["--what", TRAINING, "--policy", text]
    return plan_command(source.spec, source.sizes, words)
