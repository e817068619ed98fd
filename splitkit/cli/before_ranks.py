"""Refuses what no rank of ``splitkit train`` could run, before any rank is started: each would report it on its own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitkit.cli import source, stage_folders
from splitkit.cli.common import TRAINING, plan_file, policy_of, require_policy_option
from splitkit.cli.factories import require_factory
from splitkit.cli.mesh import ranks_of_mesh
from splitkit.cli.staged_plan_files import require_own_recompute, stages_of_file
from splitkit.errors import FileError, UsageError


def require_target(args: Namespace) -> None:
    """Refuse a target that no rank could run.

    Raises:
        UsageError: SK601 for a missing ``--model`` or policy, or a plan of something else than stages.
        CaptureError: SK403 for a factory that does not exist.
        FileError: SK50x for a plan or a folder of stages that cannot be read, or is damaged.
        ScheduleError: SK330 for a schedule that does not allow these numbers of stages and processes.
    """
    if stage_folders.is_folder(args.target):
        _require_folder(args)
        return
    file = plan_file(args)
    stages = 0 if file is None else stages_of_file(file)
    if file is not None and file.get("what") == TRAINING and not stages:
        reason = f"{args.target} divides a training step into forward and backward, and has no stages"
        raise UsageError("SK601", reason, f"Run it with: splitkit run {args.target}; or plan with --stages N.")
    if stages:
        require_own_recompute(args)
    made = require_model(args, file, "train")
    ranks = ranks_of_stages(made, args.nproc)
    if stages := stages or (args.stages if file is None else 0):
        _require_order(args, [1] * stages, ranks)
    if file is None or stages:
        return
    if isinstance(parts := file.get("parts"), list):
        counts = [p.get("replicas", 1) for p in parts if isinstance(p, dict)]
        _require_order(args, [n for n in counts if isinstance(n, int)])


def ranks_of_stages(made: source.Source, started: int) -> int:
    """Return how many of the ranks have different stages, or replicas of them.

    Raises:
        UsageError: SK601 if the ranks that share each stage of a mesh do not divide them.
    """
    share = ranks_of_mesh(made.mesh)
    if started % share:
        reason = f"{started} ranks cannot have stages of {share} ranks each ({made.mesh})"
        raise UsageError("SK601", reason, f"Start a multiple of {share} ranks.")
    return started // share


def require_model(args: Namespace, file: dict[str, Any] | None, command: str) -> source.Source:
    """Refuse a model, a loss or a policy that no rank could make; return what the model is made of.

    Args:
        args: the options of the command.
        file: the data of the plan file, ``None`` for a model and a policy.
        command: the name of the command.

    Raises:
        UsageError: SK601 for a missing ``--model`` or policy, or a loss that is not known.
        CaptureError: SK403 for a factory or a loss that does not exist.
    """
    if file is None:
        require_policy_option(args)
        policy_of(args)
    made = source.from_args(args.target, args) if file is None else source.from_plan(args.target, file, args)
    source.require_inputs(made, command)
    require_factory(made.spec)
    return made


def _require_folder(args: Namespace) -> None:
    from splitkit.runtime import open_stages

    held = open_stages(args.target, args.weights)
    files = [str(row["file"].text()) for row in held.manifest["stages"].items()]
    if missing := [file for file in files if not (Path(args.target) / file).is_file()]:
        reason = f"{args.target} has no {missing[0]}, which its manifest names"
        raise FileError("SK504", reason, "Copy the whole folder, or split again.", missing)
    if args.check:
        require_factory(source.from_plan(args.target, held.manifest.value, args).spec)
    _require_order(args, [held.plan.parts[key].replicas for key in held.names])


def _require_order(args: Namespace, counts: Sequence[int], ranks: int | None = None) -> None:
    """Refuse a schedule that does not allow these numbers of replicas of each stage, processes and microbatches."""
    from splitkit.pipeline.synthesize import load_order
    from splitkit.runtime.ranks.order_runner import microbatches_or_usual, placed_order
    from splitkit.runtime.ranks.replicas import require_replicable

    counts = counts if args.dp is None else [args.dp] * len(counts)
    if not counts or min(counts) < 1:
        return
    ranks = args.nproc if ranks is None else ranks
    schedule: Any = load_order(args.schedule) if args.schedule.endswith(".csv") else args.schedule
    microbatches = microbatches_or_usual(schedule, args.microbatches)
    require_replicable((), counts, ranks, microbatches)
    placed_order(schedule, counts[0], len(counts), microbatches, ranks)
