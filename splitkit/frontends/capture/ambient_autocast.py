"""Record the autocast that is active around a capture as a block of the model.

Capture itself runs with autocast off, so the model enters the caller's autocast in its ``forward``::

    with torch.autocast("cpu", torch.bfloat16):         enter autocast; nodes of the model; exit autocast
        gm = splitkit.capture(model, x)                 the graph computes in bfloat16 wherever it is called
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn

from splitkit.errors import CaptureError
from splitkit.graph.kept_casts import has_autocast, kept_casts
from splitkit.graph.ops import Memo, effects_of
from splitkit.graph.scope import scopes


@contextmanager
def autocast_recorded(model: nn.Module) -> Iterator[None]:
    """Let ``model.forward`` enter the autocast of the caller, until the end of the block."""
    active = [device for device in _devices() if torch.is_autocast_enabled(device)]
    if not active:
        yield
        return
    modes = [(device, torch.get_autocast_dtype(device)) for device in active]
    cached, forward = torch.is_autocast_cache_enabled(), model.forward
    bound = getattr(forward, "__self__", None) is model
    body: Callable[..., Any] = getattr(forward, "__func__", forward) if bound else forward

    @functools.wraps(body)
    def within(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for device, dtype in modes:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=cached))
            return body(*args, **kwargs)

    # A deep copy of a bound method is bound to the copy of the model.
    with patch.object(model, "forward", MethodType(within, model) if bound else within):
        yield


def refuse_autocast(why: str, remedy: str) -> None:
    """Raise SK401 if an autocast is active: what is made here would not contain it."""
    if any(map(torch.is_autocast_enabled, _devices())):
        raise CaptureError("SK401", f"autocast is active around capture, and {why}", remedy)


def refuse_kept_casts(gm: fx.GraphModule) -> None:
    """Raise SK401 if a graph writes a weight between two uses inside an autocast, where torch's tracers lose the cache.

    Eager autocast keeps the cast of the old weight (`splitkit.graph.kept_casts`); what torch traces casts at each use.
    """
    if not has_autocast(gm.graph):
        return
    memo = Memo()
    effects = {node: effects_of(node, gm, memo) for node in scopes(gm.graph)[0]}
    for cast in kept_casts(effects, gm.graph, gm, without_cache=True):
        raise CaptureError(
            "SK401",
            f"the model writes a weight inside an autocast: {cast.write.name} may write what {cast.reads[0].name} has "
            f"cast before. Eager autocast keeps the old cast for {cast.reads[-1].name}, and a traced graph casts anew",
            "Leave the autocast before the weight is written, and enter it again.",
            [*cast.reads, cast.write],
        )


def _devices() -> set[str]:
    """Return the types of devices whose autocast a caller may have entered."""
    own = torch.accelerator.current_accelerator()
    return {"cpu", "cuda"} | ({own.type} if own is not None else set())
