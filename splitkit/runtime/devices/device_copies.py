"""Copies values between devices, on CUDA concurrently with computation; gradients are copied back.

On CUDA a plain ``x.to("cuda:1")`` waits for all work queued on both devices. Here each pair of devices has a stream of
its own on either side, as in torchgpipe's ``copy.py``::

    cuda:0  part 0 ──┬── part 1 ─────────            the copy waits for the kernel that makes x, not for part 1;
    side             └─ copy of x ─┐
    cuda:1  part 2 ────────────────┴── part 3        part 3 waits for the copy, part 2 does not
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from splitkit._torch import FakeTensor, pytree
from splitkit.errors import PipelineError


class PendingCopy(NamedTuple):
    """A value that is being copied.

    Attributes:
        value: the value on the target device; it may be read once the copies are done.
        ready: an event recorded after the copies; ``None`` if they are done.
    """

    value: Any
    ready: torch.cuda.Event | None


class CopyStreams:
    """The CUDA streams of copies: for each pair of devices, one on either side."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, torch.device, torch.device], torch.cuda.Stream] = {}

    def at(self, device: torch.device, source: torch.device, target: torch.device) -> torch.cuda.Stream:
        """Return the stream on ``device`` for copies from ``source`` to ``target``."""
        key = (device, source, target)
        if key not in self._streams:
            made: Any = torch.cuda.Stream
            self._streams[key] = made(device)
        return self._streams[key]

    def __deepcopy__(self, memo: Mapping[int, Any]) -> CopyStreams:
        """Return a copy with streams of its own."""
        return CopyStreams()

    def __reduce__(self) -> tuple[type[CopyStreams], tuple[()]]:
        """Pickle without the streams, which belong to this process."""
        return CopyStreams, ()


class Send(nn.Module):
    """Starts to copy the tensors of a value to a device, and returns a `PendingCopy`.

    Attributes:
        source: the device that computes the value; ``None`` for an input, which may be on the target already.
        target: the device to copy to.
    """

    def __init__(self, source: torch.device | None, target: torch.device, streams: CopyStreams) -> None:
        super().__init__()
        self.source, self.target, self._copy_streams = source, target, streams

    def forward(self, value: Any) -> PendingCopy:
        """Copy every tensor; a value that is a ``torch.device`` becomes the target."""
        if isinstance(value, torch.Tensor):
            moved = self._moved(value)
        else:
            moved = pytree.tree_map_only(torch.Tensor, self._moved, value)
            moved = pytree.tree_map_only(torch.device, lambda _: self.target, moved)
        side = _device_of(value)
        if self.target.type != "cuda" or side in (None, self.target) or not torch.cuda.is_available():
            return PendingCopy(moved, None)
        return PendingCopy(moved, self._copy_streams.at(self.target, side, self.target).record_event())

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.source is None and same_device(tensor.device, self.target):
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            made: torch.Tensor = _CopyFunction.apply(tensor, self.target, self._copy_streams)  # type: ignore[no-untyped-call]
            return made
        return copy_to_device(tensor, self.target, self._copy_streams)


class Receive(nn.Module):
    """Makes computation on a device wait for a value that is being copied to it."""

    def forward(self, sent: PendingCopy) -> Any:
        """Return the value, which may now be read."""
        if sent.ready is not None:
            for tensor in pytree.tree_leaves(sent.value):
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    stream = torch.cuda.current_stream(tensor.device)
                    stream.wait_event(sent.ready)
                    tensor.record_stream(stream)
        return sent.value


class RequireDevice(nn.Module):
    """Refuses an input that the graph writes on another device: the write would go to a copy."""

    def __init__(self, name: str, target: torch.device) -> None:
        super().__init__()
        self.name, self.target = name, target

    def forward(self, value: Any) -> Any:
        """Return the input itself as a `PendingCopy`."""
        if isinstance(value, torch.Tensor) and not same_device(value.device, self.target):
            raise PipelineError(
                "SK808",
                f"the input {self.name} is on {value.device}, and {self.target} writes it",
                f"Give it on {self.target}.",
                [self.name],
            )
        return PendingCopy(value, None)


class _CopyFunction(torch.autograd.Function):
    """A copy on another device; its gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.device, streams: CopyStreams) -> torch.Tensor:
        """Start the copy and return it; it may not be complete yet."""
        ctx.source, ctx.streams = x.device, streams
        # Backward runs in another thread, with other current streams. The stream of forward will read the gradient.
        ctx.stream = torch.cuda.current_stream(x.device) if _has_streams(x) else None
        return copy_to_device(x, target, streams)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        """Start to copy the gradient back to the source."""
        (grad,) = grads
        if torch.is_grad_enabled() and grad.requires_grad:  # double backward
            moved = _CopyFunction.apply(grad, ctx.source, ctx.streams)  # type: ignore[no-untyped-call]
        else:
            moved = copy_to_device(grad, ctx.source, ctx.streams)
        if ctx.stream is not None:
            ctx.stream.wait_stream(ctx.streams.at(ctx.source, grad.device, ctx.source))
            moved.record_stream(ctx.stream)
        return moved, None, None


def copy_to_device(x: torch.Tensor, target: torch.device, streams: CopyStreams) -> torch.Tensor:
    """Start to copy a tensor to a device, on the streams of the pair of devices.

    An expanded tensor is copied once and expanded on the target. The copy keeps the order of strides, but no gaps
    between elements.
    """
    cuda = [d for d in dict.fromkeys((x.device, target)) if d.type == "cuda"]
    if not cuda or isinstance(x, FakeTensor) or not torch.cuda.is_available():
        return _copied(x, target, False)
    with ExitStack() as stack:
        for device in cuda:
            side = streams.at(device, x.device, target)
            if device == x.device:
                side.wait_stream(torch.cuda.current_stream(device))
                x.record_stream(side)
            stack.enter_context(torch.cuda.stream(side))
        return _copied(x, target, target.type == "cuda")  # the CPU waits for no event, so copies to it must block


def _copied(x: torch.Tensor, target: torch.device, under_way: bool) -> torch.Tensor:
    if x.layout is not torch.strided or type(x) is not torch.Tensor or x.is_quantized:
        return x.to(target, copy=True, non_blocking=under_way)
    dense = x
    for dim in range(x.dim()):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            dense = dense.narrow(dim, 0, 1)
    made = dense.to(target, copy=True, non_blocking=under_way)
    return made if dense is x else made.expand(x.shape)


def same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two names mean the same device; there is only one CPU."""
    return a.type == b.type and (a.type == "cpu" or (a.index or 0) == (b.index or 0))


def _has_streams(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_available() and not isinstance(x, FakeTensor)


def _device_of(value: Any) -> torch.device | None:
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor)]
    return tensors[0].device if tensors else None
