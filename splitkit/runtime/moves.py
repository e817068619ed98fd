"""Copies of values between devices: beside the computation on CUDA, and with gradients that take the way back.

On CUDA a plain ``x.to("cuda:1")`` waits for all that the other device has been asked to do. Here each pair of devices
has a stream of its own on either side (as in torchgpipe's ``copy.py``)::

    cuda:0  part 0 ──┬── part 1 ─────────            the copy waits for what makes x, not for part 1,
    side             └─ copy of x ─┐
    cuda:1  part 2 ────────────────┴── part 3        and part 3 waits for the copy, part 2 does not
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from splitkit._torch import FakeTensor, pytree
from splitkit.errors import PipelineError


class Sent(NamedTuple):
    """A value on its way.

    Attributes:
        value: on the device that it goes to; to be read once it is there.
        ready: recorded behind the copies; ``None`` where they are done.
    """

    value: Any
    ready: torch.cuda.Event | None


class Lanes:
    """The streams of copies: for each pair of devices, one on either side."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, torch.device, torch.device], torch.cuda.Stream] = {}

    def at(self, device: torch.device, source: torch.device, target: torch.device) -> torch.cuda.Stream:
        """The stream on ``device`` for what goes from ``source`` to ``target``."""
        key = (device, source, target)
        if key not in self._streams:
            made: Any = torch.cuda.Stream
            self._streams[key] = made(device)
        return self._streams[key]

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Lanes:
        """Streams of its own."""
        return Lanes()

    def __reduce__(self) -> tuple[type[Lanes], tuple[()]]:
        """Streams stay in their process."""
        return Lanes, ()


class Send(nn.Module):
    """Begins to copy the tensors of a value to a device; gives `Sent`.

    Attributes:
        source: where the value is made; ``None`` for what the caller gives, which may be there already.
        target: where it goes.
    """

    def __init__(self, source: torch.device | None, target: torch.device, lanes: Lanes) -> None:
        super().__init__()
        self.source, self.target, self._lanes = source, target, lanes

    def forward(self, value: Any) -> Sent:
        """Every tensor is copied; a device in the place of a value becomes the target."""
        if isinstance(value, torch.Tensor):
            moved = self._moved(value)
        else:
            moved = pytree.tree_map_only(torch.Tensor, self._moved, value)
            moved = pytree.tree_map_only(torch.device, lambda _: self.target, moved)
        side = _device_of(value)
        if self.target.type != "cuda" or side in (None, self.target) or not torch.cuda.is_available():
            return Sent(moved, None)
        return Sent(moved, self._lanes.at(self.target, side, self.target).record_event())

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.source is None and same_device(tensor.device, self.target):
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            made: torch.Tensor = _Move.apply(tensor, self.target, self._lanes)  # type: ignore[no-untyped-call]
            return made
        return carried(tensor, self.target, self._lanes)


class Take(nn.Module):
    """Lets the computation on a device wait for a value that was sent to it."""

    def forward(self, sent: Sent) -> Any:
        """The value, which may now be read."""
        if sent.ready is not None:
            for tensor in pytree.tree_leaves(sent.value):
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    stream = torch.cuda.current_stream(tensor.device)
                    stream.wait_event(sent.ready)
                    tensor.record_stream(stream)
        return sent.value


class There(nn.Module):
    """Refuses an input that the graph writes and that is not where it is written: a copy would be written instead."""

    def __init__(self, name: str, target: torch.device) -> None:
        super().__init__()
        self.name, self.target = name, target

    def forward(self, value: Any) -> Any:
        """The input as it is, as `Sent`."""
        if isinstance(value, torch.Tensor) and not same_device(value.device, self.target):
            raise PipelineError(
                "SK808",
                f"the input {self.name} is on {value.device}, and {self.target} writes it",
                f"Give it on {self.target}.",
                [self.name],
            )
        return Sent(value, None)


class _Move(torch.autograd.Function):
    """A copy on another device; its gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.device, lanes: Lanes) -> torch.Tensor:
        """The copy, which may be still under way."""
        ctx.source, ctx.lanes = x.device, lanes
        # Backward runs in a thread of its own, with streams of its own: that of forward is what reads the gradient.
        ctx.stream = torch.cuda.current_stream(x.device) if _has_streams(x) else None
        return carried(x, target, lanes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        """The gradient, where the value came from."""
        (grad,) = grads
        if torch.is_grad_enabled() and grad.requires_grad:  # for a gradient of the gradient
            moved = _Move.apply(grad, ctx.source, ctx.lanes)  # type: ignore[no-untyped-call]
        else:
            moved = carried(grad, ctx.source, ctx.lanes)
        if ctx.stream is not None:
            ctx.stream.wait_stream(ctx.lanes.at(ctx.source, grad.device, ctx.source))
            moved.record_stream(ctx.stream)
        return moved, None, None


def carried(x: torch.Tensor, target: torch.device, lanes: Lanes) -> torch.Tensor:
    """A copy of a tensor on a device, under way on the streams of the pair.

    What is expanded is copied once and expanded there. The order of strides is kept, gaps between elements are not.
    """
    cuda = [d for d in dict.fromkeys((x.device, target)) if d.type == "cuda"]
    if not cuda or isinstance(x, FakeTensor) or not torch.cuda.is_available():
        return _copied(x, target, False)
    with ExitStack() as stack:
        for device in cuda:
            side = lanes.at(device, x.device, target)
            if device == x.device:
                side.wait_stream(torch.cuda.current_stream(device))
                x.record_stream(side)
            stack.enter_context(torch.cuda.stream(side))
        return _copied(x, target, target.type == "cuda")  # nobody waits on the CPU for what is under way to it


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
    """Whether two names mean one device; there is one CPU."""
    return a.type == b.type and (a.type == "cpu" or (a.index or 0) == (b.index or 0))


def _has_streams(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_available() and not isinstance(x, FakeTensor)


def _device_of(value: Any) -> torch.device | None:
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and not isinstance(t, FakeTensor)]
    return tensors[0].device if tensors else None
