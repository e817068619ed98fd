"""``splitkit sweep``: shows what training in less memory costs; or, with ``--stages``, compares pipelines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import placement, source
from splitkit.cli.commands import plan_training as trainplan
from splitkit.cli.common import TRAINING, read_plan
from splitkit.cli.outcome import Outcome, seconds_text
from splitkit.cli.pages import wrote
from splitkit.cli.source import Source
from splitkit.cli.syntax import device_list
from splitkit.errors import UsageError
from splitkit.plans.parts import PlanRequest, request_from_json
from splitkit.plans.plan_file import parts_in_data
from splitkit.prices import price_name
from splitkit.studies.frontier import Point
from splitkit.units import duration, read_size, size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPELINES = ("what", "microbatches", "schedules", "chunks", "devices", "memory", "links", "optimizer", "recompute")
"""The options that need ``--stages``."""
POINTS = 10
"""The default number of points."""


def run(args: Namespace) -> Outcome:
    """Run ``splitkit sweep``."""
    wanted, file = _model(args)
    _check(args)
    if args.stages is not None:
        from splitkit.cli.commands import sweep_pipelines as stages

        swept = stages.sweep_training_step if args.what == TRAINING else stages.run
        return swept(args, wanted, file)
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
        "command": "sweep",
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
        from splitkit.view.renderers import html

        files[args.view] = page = html(frontier, title=f"frontier of {work.source.spec}")
        written = [wrote(args.view, page)]
    shown: list[RenderableType] = [text, "", table(titles, _cells(rows, frontier, of, other), titles), *written]
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
