"""What a plan file of a training step in stages says without its graph, and which option it does not accept."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from splitkit.errors import UsageError
from splitkit.training.stage_parts import stage_part


def stages_of_file(file: Mapping[str, Any]) -> int:
    """Return the number of stages of a plan of a training step; 0 if it is not in stages."""
    parts = file.get("parts")
    keys = [part.get("key") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    found = [part.stage for key in keys if isinstance(key, list) and (part := stage_part(tuple(key))) is not None]
    return max(found, default=-1) + 1


def require_own_recompute(args: Namespace) -> None:
    """Refuse ``--recompute`` for a plan of a training step.

    Raises:
        UsageError: SK601.
    """
    if args.recompute:
        raise UsageError(
            "SK601",
            f"--recompute cannot be combined with {args.target}, a plan of a training step, which says what is "
            "recomputed",
            "Leave it out; for less memory, plan with a limit: --policy \"Pipeline(2, memory='1GiB')\".",
        )
