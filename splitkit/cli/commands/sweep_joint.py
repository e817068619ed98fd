"""``splitkit sweep --stages --what fwd-bwd``: pipelines of a training step, each planned by ``Pipeline``."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli.commands.plan_training import prepare_step, priced_step
from splitkit.cli.commands.sweep_pipelines import ranks_of_sweep, sweep_outcome, tracked
from splitkit.cli.common import TRAINING
from splitkit.cli.outcome import Outcome
from splitkit.cli.source import Source
from splitkit.cli.syntax import device_list
from splitkit.costs import Fused, Roofline
from splitkit.hardware.device_specs import devices as known_devices
from splitkit.plans.plan_file import policy_text
from splitkit.prices import as_given
from splitkit.studies.fit.fit_result import plan_command
from splitkit.studies.sweep import MICROBATCHES, Sweep, TrainingSweeper, training_combinations

if TYPE_CHECKING:
    from splitkit.cli.syntax.device_list import DeviceList


def run(args: Namespace, wanted: Source, file: dict[str, Any] | None = None) -> Outcome:
    """Run the command with checked arguments, by the prices of a plan's file if there is one.

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
        costs = sk.costs.roofline(work.joint.graph_module, devices.devices[0])
    room: dict[str, Any] = {"memory": memory, "links": links, "offload": args.offload, "host": args.host}
    sweeper = TrainingSweeper(work.joint, costs, **room, optimizer=args.optimizer or "adam")
    with work.clock.step("sweep", ""):
        found = sweeper.sweep([sweeper.row(*one) for one in tracked(each, "planning and simulating")])
    word = _costs_word(args, devices) if file is None else _word_of(as_given(costs))
    following = next_plan(work.source, word, found)
    more = {"what": TRAINING, "optimizer": sweeper.optimizer, "offload": args.offload, "next": following}
    return sweep_outcome(args, work, ranks, found, more, {})


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
