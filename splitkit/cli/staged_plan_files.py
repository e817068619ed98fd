"""What a plan file of a training step in stages says without its graph, and which options it accepts."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from splitkit.errors import UsageError
from splitkit.training.stage_parts import stage_part

_ELSEWHERE = {"fsdp": "--fsdp", "dp": "--dp", "checkpoint": "--checkpoint", "trace": "--trace", "resume": "--resume"}


def stages_of_file(file: Mapping[str, Any]) -> int:
    """Return the number of stages of a plan of a training step; 0 if it is not in stages."""
    parts = file.get("parts")
    keys = [part.get("key") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    found = [part.stage for key in keys if isinstance(key, list) and (part := stage_part(tuple(key))) is not None]
    return max(found, default=-1) + 1


def require_options(args: Namespace) -> None:
    """Refuse options of `splitkit train` that plans of training steps do not have.

    Raises:
        UsageError: SK601.
    """
    for name, option in _ELSEWHERE.items():
        if getattr(args, name, None) not in (None, False):
            raise UsageError(
                "SK601",
                f"{option} cannot be combined with {args.target}, a plan of a training step",
                "Leave it out, or plan a forward graph: splitkit plan MODEL --stages N.",
            )
