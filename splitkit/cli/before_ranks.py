"""Refuses what no rank of ``splitkit train`` could run, before any rank is started: each would report it on its own."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitkit.cli import factories, source, stage_folders
from splitkit.cli.common import TRAINING, plan_file, policy_of, require_policy_option
from splitkit.cli.source import Source
from splitkit.cli.staged_plan_files import require_options, stages_of_file
from splitkit.errors import CaptureError, FileError, UsageError, near
from splitkit.testing.factory import functions_in, functions_listed


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
    if file is None:
        require_policy_option(args)
        policy_of(args)
        made = source.from_args(args.target, args)
        source.require_inputs(made, "train")
        _require_factory(made)
        if args.stages is not None:
            _require_order(args, [1] * args.stages)
        return
    if stages := stages_of_file(file):
        require_options(args)
        _require_factory(source.from_plan(args.target, file, args))
        _require_order(args, [1] * stages)
        return
    if file.get("what") == TRAINING:
        reason = f"{args.target} divides a training step into forward and backward, and has no stages"
        raise UsageError("SK601", reason, f"Run it with: splitkit run {args.target}; or plan with --stages N.")
    made = source.from_plan(args.target, file, args)
    source.require_inputs(made, "train")
    _require_factory(made)
    if isinstance(parts := file.get("parts"), list):
        counts = [p.get("replicas", 1) for p in parts if isinstance(p, dict)]
        _require_order(args, [n for n in counts if isinstance(n, int)])


def _require_folder(args: Namespace) -> None:
    from splitkit.runtime import open_stages

    held = open_stages(args.target, args.weights)
    files = [str(row["file"].text()) for row in held.manifest["stages"].items()]
    if missing := [file for file in files if not (Path(args.target) / file).is_file()]:
        reason = f"{args.target} has no {missing[0]}, which its manifest names"
        raise FileError("SK504", reason, "Copy the whole folder, or split again.", missing)
    if args.check:
        _require_factory(source.from_plan(args.target, held.manifest.value, args))
    _require_order(args, [part.replicas for part in held.plan.parts.values()])


def _require_order(args: Namespace, counts: Sequence[int]) -> None:
    """Refuse a schedule that does not allow these numbers of replicas of each stage, processes and microbatches."""
    from splitkit.pipeline.order_file import load_order
    from splitkit.runtime.ranks.order_runner import microbatches_or_usual, placed_order
    from splitkit.runtime.ranks.replicas import require_ranks, require_replicable

    counts = counts if args.dp is None else [args.dp] * len(counts)
    if not counts or min(counts) < 1:
        return
    schedule: Any = load_order(args.schedule) if args.schedule.endswith(".csv") else args.schedule
    microbatches = microbatches_or_usual(schedule, args.microbatches)
    require_ranks(counts, args.nproc)
    require_replicable((), counts, args.nproc, microbatches)
    placed_order(schedule, counts, microbatches, args.nproc)


def _require_factory(wanted: Source) -> None:
    """Refuse a factory that its file does not define, without running the file.

    Raises:
        CaptureError: SK403.
    """
    place, colon, name = wanted.spec.rpartition(":")
    path = Path(place)
    if not colon or path.suffix != ".py":
        return
    factories.check_model_name(wanted.spec, plans=False)
    try:
        tree = ast.parse(path.read_bytes(), str(path))
        names = functions_in(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise CaptureError("SK403", f"{place} cannot be read as Python: {error}", "Correct the file.") from error
    if _may_define(tree, name):
        return
    other = near(name, names)
    remedy = f"Did you mean {place}:{other[0]}? " if other else "Define a function of that name there; "
    raise CaptureError("SK403", f"the factory {name!r} in {place} does not exist", remedy + functions_listed(names))


def _may_define(tree: ast.Module, name: str) -> bool:
    """Return whether a module may have an attribute of this name: it is written somewhere, or made in ways unseen."""
    for node in ast.walk(tree):
        written = getattr(node, "id", None), getattr(node, "name", None), getattr(node, "asname", None)
        if name in written or (isinstance(node, ast.alias) and (node.name == "*" or node.name.split(".")[0] == name)):
            return True
        if getattr(node, "id", None) in ("globals", "exec", "setattr", "vars") or written[1] == "__getattr__":
            return True
    return False
