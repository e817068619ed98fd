"""``splitkit plan`` for devices: plan, simulate the step, and show what each rank does and holds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import source
from splitkit.cli.outcome import Outcome, facts, seconds, table
from splitkit.cli.placement import Placement
from splitkit.cli.work import Work, check_costs, prepare, prices, versions
from splitkit.costs import Costs, roofline
from splitkit.costs.links import links_of
from splitkit.pipeline.run import ScheduleRun
from splitkit.pipeline.stagecosts import StageCosts
from splitkit.pipeline.stageprices import StagePrices, run_order
from splitkit.plans.parts import Claim
from splitkit.plans.record import Plan
from splitkit.search.demand import Demand
from splitkit.units import duration, size

if TYPE_CHECKING:
    from rich.console import RenderableType

_KINDS = ("fixed", "saved", "messages", "temporaries")


@dataclass(frozen=True)
class Rank:
    """What one device does and holds.

    Attributes:
        device: what it is; empty where only a number of stages is given.
        stages: the parts that it runs.
        busy: seconds of work; of a step with a schedule, else of one sample.
        bubble: the part of the step in which it computes nothing; ``None`` without a schedule.
        in_flight: the most microbatches that it holds; ``None`` without a schedule.
        nbytes: at its peak: parameters with gradients and optimizer; saved for backward; messages; temporaries.
        limit: bytes that it has.
        unit: of ``busy``, where the prices are no time.
    """

    device: str
    stages: tuple[object, ...]
    busy: float
    bubble: float | None
    in_flight: int | None
    nbytes: tuple[int, int, int, int]
    limit: int | None
    unit: str = "s"

    @property
    def used(self) -> float:
        """The part of its memory that it uses; 0 without a limit."""
        return sum(self.nbytes) / self.limit if self.limit else 0.0

    def to_dict(self, number: int) -> dict[str, Any]:
        """As plain data."""
        memory = {"peak": sum(self.nbytes), **dict(zip(_KINDS, self.nbytes, strict=True)), "limit": self.limit}
        return {
            "rank": number,
            "device": self.device or None,
            "stages": list(self.stages),
            "busy": self.busy,
            "unit": self.unit,
            "bubble": self.bubble,
            "in_flight": self.in_flight,
            "memory": memory,
        }


def plan(args: Namespace) -> Outcome:
    """``splitkit plan`` with ``--devices``, or with ``--stages`` and a schedule, memory or links, which are checked."""
    wanted_model, wanted = source.from_args(args.model, args), Placement.of(args)
    policy = wanted.policy()
    check_costs(args.costs)
    work = prepare(wanted_model)
    with work.clock.step("plan", f"planning {wanted.devices or f'{wanted.stages} stages'}"):
        costs = _prices(work, args, wanted)
        made = sk.plan(work.gm, policy, costs, on_cycle=args.on_cycle or "error")
    with work.clock.step("simulate", "simulating the step"):
        ranks, run = _ranks(work, made, costs, wanted)
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
        "trace": args.trace,
    }
    written = _files(args, work, made, run)
    told = [_wrote(path, args.trace) for path in written]
    text = [report.table(), "", facts(_summary(wanted, made.claim, ranks, data)), "", _table(ranks), *told]
    return Outcome(data, text, files=written)


def _wrote(path: str, trace: str | None) -> str:
    return f"wrote {path}{' (for https://ui.perfetto.dev or chrome://tracing)' if path == trace else ''}"


def _prices(work: Work, args: Namespace, wanted: Placement) -> Costs:
    """``--costs``, or the roofline of the device, of the first one where they differ; a schedule adds backward."""
    backward = args.training or (wanted.optimizer is not None and wanted.schedule is None)
    return prices(work, args.costs, backward, wanted.devices.devices[0] if wanted.devices else None)


def _files(args: Namespace, work: Work, made: Plan, run: ScheduleRun | None) -> dict[str, dict[str, Any]]:
    """Path -> data of the files that are wanted."""
    wanted: dict[str, dict[str, Any]] = {}
    if args.trace and run:
        wanted[args.trace] = run.to_chrome_trace()
    if args.output:
        wanted[args.output] = {**made.to_dict(), "model": work.source.to_dict(), **versions()}
    return wanted


def _ranks(work: Work, made: Plan, costs: Costs, wanted: Placement) -> tuple[list[Rank], ScheduleRun | None]:
    """What each rank does, and the step if there is a schedule."""
    flow = sk.analyze(work.gm)
    keys = run_order(flow, made)
    if wanted.stages is None:
        assert wanted.devices is not None
        kinds = {device.name: device for device in wanted.devices.devices}
        by_kind = {
            name: StagePrices(flow, costs if len(kinds) == 1 else roofline(flow, kind), wanted.optimizer)
            for name, kind in kinds.items()
        }
        stages = {name: dict(zip(keys, known.of(made), strict=True)) for name, known in by_kind.items()}
        return list(_unscheduled(wanted, keys, stages)), None
    links = links_of(wanted.links)
    demand = Demand(None, flow, costs, wanted.schedule, wanted.microbatches, links=links, optimizer=wanted.optimizer)
    run = demand.run(demand.stage_prices.of(made))
    return [_simulated(run, rank, wanted) for rank in range(run.ranks)], run if wanted.schedule else None


def _simulated(run: ScheduleRun, rank: int, wanted: Placement) -> Rank:
    m = run.memory[rank]
    return Rank(
        device=wanted.devices.devices[rank].name if wanted.devices else "",
        stages=tuple(stage for stage, where in enumerate(run.order.rank_of) if where == rank),
        busy=run.busy[rank],
        bubble=run.bubbles[rank] if wanted.schedule else None,
        in_flight=run.in_flight[rank] if wanted.schedule else None,
        nbytes=(m.parameters + m.gradients + m.optimizer, m.saved, m.messages, m.temporaries),
        limit=wanted.limit(rank),
        unit=run.unit,
    )


def _unscheduled(wanted: Placement, keys: Sequence[Any], costs: dict[str, dict[Any, StageCosts]]) -> Iterator[Rank]:
    """Devices whose parts are numbered like them; a device may have several parts, or none."""
    assert wanted.devices is not None
    for number, device in enumerate(wanted.devices.devices):
        own = [key for key in keys if (key[0] if isinstance(key, tuple) else key) == number]
        parts = [costs[device.name][key] for key in own]
        fixed = sum(p.parameter_bytes + p.gradient_bytes + p.optimizer_bytes for p in parts)
        yield Rank(
            device=device.name,
            stages=tuple(" ".join(map(str, key)) if isinstance(key, tuple) else key for key in own),
            busy=sum(p.forward + p.backward for p in parts),
            bubble=None,
            in_flight=None,
            nbytes=(
                fixed, sum(p.saved_bytes for p in parts), 0, max((p.temporary_bytes for p in parts), default=0),
            ),
            limit=wanted.limit(number),
            unit=parts[0].unit if parts else "s",
        )  # fmt: skip


def _step(run: ScheduleRun) -> dict[str, Any]:
    """The step as a whole."""
    return {name: value for name, value in run.to_dict().items() if name != "ranks"}


def _summary(wanted: Placement, claim: Claim | None, ranks: Sequence[Rank], data: dict[str, Any]) -> dict[str, str]:
    rows, unit = wanted.facts(), next((rank.unit for rank in ranks if rank.unit != "s"), "s")
    if claim is not None:
        rows |= {
            claim.objective: f"{duration(claim.value, unit)}, limited by part {claim.limiting}",
            "bound": f"{duration(claim.bound, unit)}: {_proof(claim)}",
            "solver": claim.solver,
        }
    if step := data["step"]:
        rows["step"] = (
            f"{duration(step['seconds'], unit)}, {step['schedule']} of {step['microbatches']} microbatches, "
            f"bubble {step['bubble']:.1%}"
        )
    number, fullest = max(enumerate(ranks), key=lambda one: (one[1].used, sum(one[1].nbytes)))
    of = "" if fullest.limit is None else f" of {size(fullest.limit)}"
    rows["peak"] = f"{size(sum(fullest.nbytes))} on rank {number}{of}"
    took = data["seconds"]
    rows["took"] = f"capture {seconds(took['capture'])}, plan {seconds(took['plan'])}"
    return rows


def _proof(claim: Claim) -> str:
    if claim.optimal:
        return "proven optimal"
    return f"gap {claim.gap:.2%}, no plan is better by more" if claim.gap >= 5e-5 else "gap below 0.01%"


def _table(ranks: Sequence[Rank]) -> RenderableType:
    """One row a rank, without columns that are empty, or that say the same of all and so are in the summary."""
    rows = [_cells(number, rank) for number, rank in enumerate(ranks)]
    same = [title for title in ("device", "memory") if len({row[title] for row in rows}) == 1]
    titles = [title for title in rows[0] if title not in same and any(row[title] for row in rows)]
    return table(titles, ([row[title] for title in titles] for row in rows), [t for t in titles if t != "device"])


def _cells(number: int, rank: Rank) -> dict[str, str]:
    fixed, saved, messages, temporaries = rank.nbytes
    return {
        "rank": str(number),
        "device": rank.device,
        "stages": ",".join(map(str, rank.stages)) or "none",
        "busy": duration(rank.busy, rank.unit) if rank.busy else "0",
        "bubble": "" if rank.bubble is None else f"{rank.bubble:.1%}",
        "in flight": "" if rank.in_flight is None else str(rank.in_flight),
        "fixed": size(fixed),
        "saved": size(saved),
        "temporary": size(messages + temporaries),
        "peak": size(sum(rank.nbytes)),
        "memory": "no limit" if rank.limit is None else size(rank.limit),
    }
