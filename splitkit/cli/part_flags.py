"""Applies the flags of commands to the parts of a plan and to their modules."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

from splitkit.errors import UsageError

if TYPE_CHECKING:
    from torch import fx

    from splitkit.plans.record import Plan
    from splitkit.runtime.ranks.pipeline import Pipeline

BACKENDS = ("inductor", "aot_eager")


def with_part_flags(plan: Plan, args: Namespace) -> Plan:
    """Return the plan with the replicas of ``--dp``, and with checkpointed parts for ``--recompute``."""
    if args.dp is not None:
        plan = replace(plan, parts={key: replace(part, replicas=args.dp) for key, part in plan.parts.items()})
    return with_recompute(plan, args)


def with_recompute(plan: Plan, args: Namespace, gm: fx.GraphModule | None = None) -> Plan:
    """Return the plan, with checkpointed parts for ``--recompute``.

    Args:
        plan: the plan.
        args: the arguments of the command.
        gm: the graph; without it nothing is checked, as before a split, which checks itself.

    Raises:
        PlanError: SK207 for parts with effects, which cannot run again.
    """
    if not args.recompute:
        return plan
    from splitkit.graph.dataflow import analyze
    from splitkit.plans.record import check_checkpoints, checkpointed

    made = checkpointed(plan)
    if gm is not None:
        check_checkpoints(analyze(gm), made)
    return made


def require_compiler(args: Namespace) -> None:
    """Refuse ``--compile`` without a C++ compiler, before the model is made.

    Raises:
        UsageError: SK601.
    """
    compiler = os.environ.get("CXX", "g++")
    if args.compile == "inductor" and shutil.which(compiler) is None:
        raise UsageError(
            "SK601", f"--compile needs a C++ compiler, and {compiler} is not found", "Install it, set CXX, or use "
            "--compile=aot_eager.",
        )  # fmt: skip


def compile_parts(pipe: Pipeline, backend: str | None) -> None:
    """Let each part of this rank be compiled at its first microbatch, with the random numbers of eager mode."""
    options = {"options": {"fallback_random": True}} if backend == "inductor" else {}
    for part in pipe.modules if backend else ():
        part.compile(backend=backend, **options)
