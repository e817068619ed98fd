"""The ops that move a saved value to the host and back, beside the computation.

``to_host`` and ``to_device`` start a copy on the stream of their direction, and ``arrived`` lets the computation wait
for it::

    forward     x = ...    host = to_host(x)    ...    saved = arrived(host, x)       x is free from here on
    backward    copy = to_device(saved)         ...    x = arrived(copy, saved)       x is read from here on

``arrived`` takes the source of the copy too, so that its memory is not freed before. On the CPU copies are complete at
once. Torch's ops ``ao::offload`` and ``ao::wait_tensor`` do the same in private.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from splitkit._torch import FakeTensor

_PINNED = ("cuda", "xpu")  # devices that copy from and to page-locked memory beside their work
_DONE = "splitkit_copy_done"
"""The attribute of a copy that holds the event of its end. It lives as long as the copy."""


@cache
def _copy_stream(device: torch.device, back: bool) -> torch.Stream | None:
    """Return the stream of one direction; ``None`` for the CPU, and for devices that have one stream."""
    if device.type == "cpu":
        return None
    make: Any = torch.Stream
    try:
        found: torch.Stream = make(device=device)
    except RuntimeError:
        return None
    return found


def _copied(made: Tensor, source: Tensor, device: torch.device, back: bool) -> Tensor:
    """Copy ``source`` into ``made``, after what the device has been asked to do so far."""
    stream = _copy_stream(device, back)
    if stream is None:
        return made.copy_(source)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        # without page-locked memory, what the host holds could be written or freed before the copy ends
        made.copy_(source, non_blocking=device.type in _PINNED)
    setattr(made, _DONE, stream.record_event())
    return made


def _like(x: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device, pin_memory=pinned)


def _to_host(x: Tensor) -> Tensor:
    return _copied(_like(x, torch.device("cpu"), x.device.type in _PINNED), x, x.device, back=False)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    return _copied(_like(x, device), x, device, back=True)


def _arrived(copy: Tensor, source: Tensor) -> Tensor:
    done = getattr(copy, _DONE, None)
    if done is not None:
        device = source.device if copy.device.type == "cpu" else copy.device
        torch.accelerator.current_stream(device).wait_event(done)
    return copy


_LIBRARY = torch.library.Library("splitkit", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _kernel in (
    ("to_host(Tensor x) -> Tensor", _to_host),
    ("to_device(Tensor x, Device device) -> Tensor", _to_device),
    ("arrived(Tensor(a) copy, Tensor source) -> Tensor(a)", _arrived),
):
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(_schema.partition("(")[0], _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("splitkit::to_host", lambda x: _like(x, torch.device("cpu")), lib=_LIBRARY)
torch.library.register_fake("splitkit::to_device", lambda x, device: _like(x, device), lib=_LIBRARY)
torch.library.register_fake("splitkit::arrived", lambda copy, source: copy, lib=_LIBRARY)

TO_HOST: Any = torch.ops.splitkit.to_host.default
TO_DEVICE: Any = torch.ops.splitkit.to_device.default
ARRIVED: Any = torch.ops.splitkit.arrived.default


def host_value(value: Tensor) -> Tensor:
    """Return the value of a copy on the host, for ``meta["val"]``; on the meta device it stays there."""
    if isinstance(value, FakeTensor):
        with value.fake_mode:
            return _like(value, torch.device("cpu"))
    return _like(value, value.device if value.device.type == "meta" else torch.device("cpu"))
