"""What older versions of torch cannot run, refused by name."""

from __future__ import annotations

import torch

from splitkit.errors import PipelineError
from splitkit.pipeline.order import PipelineOrder
from splitkit.runtime.stage import ChainStage

_SINCE = (2, 13)


def require_support(order: PipelineOrder, stages: tuple[ChainStage, ...]) -> None:
    """Refuse what the installed torch cannot run.

    Before 2.13 all that goes over a border must be a float with a gradient, stages that follow each other cannot share
    a rank, and zero-bubble schedules cannot detach what a stage gives.

    Raises:
        PipelineError: SK806, naming the value or the schedule.
    """
    if _is_recent():
        return
    zero_bubble = any(action.kind == "I" for row in order.ranks for action in row)
    if zero_bubble or any(a == b for a, b in zip(order.rank_of, order.rank_of[1:], strict=False)):
        raise _needs(f"{order.name} on {len(order.ranks)} ranks", "Use 1f1b or interleaved1f1b on 2 ranks or more, or")
    require_values(stages)


def require_values(stages: tuple[ChainStage, ...]) -> None:
    """Refuse values that the installed torch cannot send, as `require_support`."""
    for stage in () if _is_recent() else stages:
        if stage.dice.takes or stage.dice.gives:
            raise _needs("dropout in several stages", "Capture in eval mode, or")
        for value in (*stage.takes, *stage.gives):
            if not value.like.requires_grad and stage.trains:
                raise _needs(f"{value.name}, which goes over a border without a gradient,", "Cut elsewhere, or")


def _is_recent() -> bool:
    return tuple(map(int, torch.__version__.split(".")[:2])) >= _SINCE


def _needs(what: str, else_: str) -> PipelineError:
    return PipelineError(
        "SK806", f"{what} needs torch 2.13; this is {torch.__version__}", f"{else_} install torch 2.13."
    )
