"""``splitkit sweep --stages``: stages x microbatches x schedules, each planned and simulated, in one table."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from splitkit.cli import devicelist, placement
from splitkit.cli.outcome import Outcome, seconds
from splitkit.cli.pages import still_pages, wrote
from splitkit.cli.source import Source
from splitkit.cli.work import check_costs, prepare, prices
from splitkit.errors import UsageError
from splitkit.studies.sweep import MICROBATCHES, SCHEDULES, Sweep, Sweeper, combinations
from splitkit.units import duration, size
from splitkit.view.tables import facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.cli.devicelist import DeviceList

Item = TypeVar("Item")


def run(args: Namespace, wanted: Source) -> Outcome:
    """Sweep over pipelines of a model as the arguments say, which are checked.

    Raises:
        UsageError: SK601 for devices that differ.
        ScheduleError: SK330 for a schedule that is not known.
        CostError: SK321 for a device that is not known, SK322 for a link.
    """
    devices = _kind(args.devices)
    memory = placement.memory_of(args, devices)
    assert not isinstance(memory, str | tuple)  # checked, and of one kind of device
    if memory is None and devices is not None:
        memory = devices.devices[0].memory
    links, why = placement.links_of(args.links, devices)
    each = combinations(args.stages, args.microbatches or MICROBATCHES, args.schedules or SCHEDULES)
    check_costs(args.costs)
    work = prepare(wanted)
    with work.clock.step("costs", "pricing the nodes"):
        costs = prices(work, args.costs, None, "a100" if devices is None else devices.devices[0])
    sweeper = Sweeper(work.gm, costs, memory, links, args.optimizer or "adam")
    with work.clock.step("sweep", ""):
        found = sweeper.sweep([sweeper.row(*one) for one in _tracked(each, "planning and simulating")])
    data = {
        "command": "sweep",
        "model": work.source.to_dict(),
        "device": None if devices is None else devices.devices[0].name,
        "links": links,
        "optimizer": sweeper.optimizer,
        **found.to_dict(),
        "seconds": work.clock.seconds,
    }
    unit = next((row.run.unit for row in found.rows if row.run), "s")
    rows = {
        "prices": found.note or ("as measured" if unit == "s" else unit),
        "links": f"{links or 'none'}{why}",
        "memory": "no limit" if memory is None else f"{size(memory)} a rank",
        "took": f"capture {seconds(work.clock.seconds['capture'])}, sweep {seconds(work.clock.seconds['sweep'])}",
    }
    text: list[RenderableType] = [facts(rows), "", found.table(), "", *found.refused, *_advice(found)]
    files = {}
    if args.view:
        files[args.view] = page = still_pages(work.source.spec, {f"pipelines of {work.source.spec}": found})
        text.append(wrote(args.view, page))
    return Outcome(data, text, files=files)


def _kind(text: str | None) -> DeviceList | None:
    """The one kind of device that all ranks are; how many a file says there are is no matter."""
    if text is None:
        return None
    found = devicelist.read(text)
    if not found.alike or (len(found.devices) > 1 and not devicelist.is_file(text)):
        raise UsageError(
            "SK601",
            f"--devices {text} are {found}, and --stages says how many devices there are",
            f"Name the kind alone: --devices {found.devices[0].name}.",
        )
    return found


def _tracked(items: Sequence[Item], what: str) -> Iterator[Item]:
    """Items with a bar of progress on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(items, what, console=Console(stderr=True), transient=True)


def _advice(found: Sweep) -> Iterator[str]:
    """The fastest and the smallest that fit, or what the smallest would need."""
    ran = [row for row in found.rows if row.run is not None]
    if found.pareto:
        fastest, smallest = found.pareto[0], min(found.pareto, key=lambda row: row.numbers[1])
        for what, row in {"fastest": fastest, "smallest": smallest}.items():
            each, peak, ranks = row.numbers
            yield (
                f"{what}: {row.schedule} of {row.stages} stages and {row.microbatches} microbatches on {ranks} "
                f"rank{'s' if ranks > 1 else ''}, "
                f"{duration(each, row.run.unit if row.run else 's')} a microbatch, peak {size(peak)}"
            )
    elif ran:
        least = min(ran, key=lambda row: row.numbers[1])
        yield (
            f"nothing fits: the lowest peak is {size(least.numbers[1])}, of {least.schedule} of {least.stages} stages "
            f"and {least.microbatches} microbatches; give more memory, more stages, or smaller microbatches"
        )
    else:
        yield "no schedule takes any of these numbers of stages and microbatches"
