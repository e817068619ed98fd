"""What flags of ``splitkit train`` change in the parts of a plan, and in their modules."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from splitkit.errors import UsageError

if TYPE_CHECKING:
    from splitkit.plans.record import Plan
    from splitkit.runtime.pipeline import Pipeline

BACKENDS = ("inductor", "aot_eager")


def asked(plan: Plan, args: Namespace) -> Plan:
    """The plan with as many replicas of each part as ``--dp`` says, and checkpointed with ``--recompute``."""
    how: dict[str, Any] = {}
    if args.dp is not None:
        how["replicas"] = args.dp
    if args.recompute:
        how["call"] = "checkpoint"
    return replace(plan, parts={key: replace(part, **how) for key, part in plan.parts.items()})


def require_compiler(args: Namespace) -> None:
    """Refuse ``--compile`` where Inductor could not compile, before the model is made.

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
    """Compile each part of this rank at its first microbatch, with the random numbers of eager mode."""
    options = {"options": {"fallback_random": True}} if backend == "inductor" else {}
    for part in pipe.modules if backend else ():
        part.compile(backend=backend, **options)
