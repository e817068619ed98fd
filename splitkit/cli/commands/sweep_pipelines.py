"""``splitkit sweep --stages``: plans and simulates every combination of stages, microbatches and schedules."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import splitkit as sk
from splitkit.cli import placement
from splitkit.cli.commands.plan_training import priced_step
from splitkit.cli.common import TRAINING, check_costs, decoded, prepare, prepare_step, prices
from splitkit.cli.outcome import Outcome, seconds_text
from splitkit.cli.pages import still_pages, wrote
from splitkit.cli.source import Source
from splitkit.cli.syntax import device_list
from splitkit.costs import Fused, Roofline, unit_of
from splitkit.costs.recorded import costs_of
from splitkit.errors import UsageError
from splitkit.hardware.device_specs import devices as known_devices
from splitkit.plans.plan_file import policy_text
from splitkit.prices import as_given
from splitkit.studies.fit.fit_result import plan_command
from splitkit.studies.sweep import (
    MICROBATCHES,
    Sweep,
    Sweeper,
    TrainingSweeper,
    combinations,
    training_combinations,
)
from splitkit.units import duration, size
from splitkit.view.tables import facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.cli.common import CapturedModel
    from splitkit.cli.syntax.device_list import DeviceList

Item = TypeVar("Item")


def run(args: Namespace, wanted: Source, file: dict[str, Any] | None = None) -> Outcome:
    """Run ``splitkit sweep --stages`` with checked arguments, by the prices of a plan's file if they are times.

    Raises:
        UsageError: SK601 for devices of several kinds.
        ScheduleError: SK330 for an unknown schedule.
        CostError: SK321 for an unknown device, SK322 for an unknown link.
    """
    devices, links, memory, _ = ranks = ranks_of_sweep(args)
    each = combinations(args.stages, args.microbatches or MICROBATCHES, args.schedules)
    check_costs(args.costs)
    work = prepare(wanted)
    with work.clock.step("costs", "pricing the nodes"):
        costs = prices(work, args.costs, None, "a100" if devices is None else devices.devices[0])
        if file is not None:
            own = costs_of(decoded(work.gm.graph, args.target, file).prices, work.gm)
            costs = own if unit_of(own) == "s" else costs
    sweeper = Sweeper(work.gm, costs, memory, links, args.optimizer or "adam", bool(args.recompute))
    with work.clock.step("sweep", ""):
        found = sweeper.sweep([sweeper.row(*one) for one in tracked(each, "planning and simulating")])
    again = {"recompute": "backward runs the parts again; the stages are those planned without"}
    more = {"optimizer": sweeper.optimizer, "recompute": sweeper.recompute}
    return sweep_outcome(args, work, ranks, found, more, again if sweeper.recompute else {})


def sweep_training_step(args: Namespace, wanted: Source, file: dict[str, Any] | None = None) -> Outcome:
    """Run ``splitkit sweep --stages --what fwd-bwd`` with checked arguments: each row is planned by ``Pipeline``.

    A plan's file gives the prices if there is one.

    Raises:
        UsageError: SK601 for devices of several kinds.
        ScheduleError: SK330 for an unknown schedule.
        CostError: SK321 for an unknown device, SK322 for an unknown link.
    """
    devices, links, memory, _ = ranks = ranks_of_sweep(args)
    each = training_combinations(args.stages, args.microbatches or MICROBATCHES, args.schedules, args.chunks)
    if devices is None or args.costs is not None:
        work, costs = priced_step(args, wanted, file)
    else:
        work = prepare_step(wanted)
        costs = sk.costs.roofline(work.gm, devices.devices[0])
    room: dict[str, Any] = {"memory": memory, "links": links, "offload": args.offload, "host": args.host}
    sweeper = TrainingSweeper(work.joint, costs, **room, optimizer=args.optimizer or "adam")
    with work.clock.step("sweep", ""):
        found = sweeper.sweep([sweeper.row(*one) for one in tracked(each, "planning and simulating")])
    word = _costs_word(args, devices) if file is None else _word_of(as_given(costs))
    following = next_plan(work.source, word, found)
    more = {"what": TRAINING, "optimizer": sweeper.optimizer, "offload": args.offload, "next": following}
    return sweep_outcome(args, work, ranks, found, more, {})


def sweep_outcome(
    args: Namespace,
    work: CapturedModel,
    ranks: tuple[DeviceList | None, str | None, int | None, str],
    found: Sweep,
    more: Mapping[str, Any],
    rows: Mapping[str, str],
) -> Outcome:
    """Return what a sweep over pipelines says.

    Args:
        args: the arguments.
        work: the captured model.
        ranks: what `ranks_of_sweep` says of the ranks.
        found: the sweep.
        more: what else is in the data; ``next`` is printed, too.
        rows: what else is above the table.
    """
    devices, links, memory, why = ranks
    took, spec = work.clock.seconds, work.source.spec
    data = {
        "command": "sweep",
        "model": work.source.to_dict(),
        "device": None if devices is None else devices.devices[0].name,
        "links": links,
        **more,
        **found.to_dict(),
        "seconds": took,
    }
    unit = next((row.run.unit for row in found.rows if row.run), "s")
    shown = {
        "prices": found.note or ("as measured" if unit == "s" else unit),
        "links": f"{links or 'none'}{why}",
        "memory": "no limit" if memory is None else f"{size(memory)} per rank",
        "took": f"capture {seconds_text(took['capture'])}, sweep {seconds_text(took['sweep'])}",
        **rows,
    }
    text: list[RenderableType] = [facts(shown), "", found.table(), "", *found.refused, *advice(found)]
    text += [f"next: {data['next']}"] if data.get("next") else []
    files = {}
    if args.view:
        files[args.view] = page = still_pages(spec, {f"pipelines of {spec}": found})
        text.append(wrote(args.view, page))
    return Outcome(data, text, files=files)


def ranks_of_sweep(args: Namespace) -> tuple[DeviceList | None, str | None, int | None, str]:
    """Return the kind of device of all ranks, their links, the memory of each, and why it is those links.

    Raises:
        UsageError: SK601 for devices of several kinds.
        CostError: SK321 for an unknown device, SK322 for an unknown link.
    """
    devices = kind_of_device(args.devices)
    memory = placement.memory_option(args, devices)
    assert not isinstance(memory, str | tuple)  # checked, and of one kind of device
    if memory is None and devices is not None:
        memory = devices.devices[0].memory
    links, why = placement.links_option(args.links, devices)
    return devices, links, memory, why


def kind_of_device(text: str | None) -> DeviceList | None:
    """Return the one kind of device of all ranks; the count in a file of devices does not matter here."""
    if text is None:
        return None
    found = device_list.read_device_list(text)
    if not found.alike or (len(found.devices) > 1 and not device_list.is_file(text)):
        raise UsageError(
            "SK601",
            f"--devices {text} are {found}, and --stages says how many devices there are",
            f"Name the kind alone: --devices {found.devices[0].name}.",
        )
    return found


def tracked(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Yield items, with a progress bar on standard error if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, what, console=Console(stderr=True), transient=True)


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
    words += ["--what", TRAINING, "--policy", _in_shell(policy_text(policy))]
    return plan_command(source.spec, source.sizes, words)


def _in_shell(text: str) -> str:
    """Return a policy with its texts in double quotes: single ones enclose the policy in a shell."""
    return text if '"' in text else text.replace("'", '"')
