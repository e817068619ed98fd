"""Devices, their streams and their random numbers, by torch's interfaces that do not name a vendor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from splitkit._torch import FakeTensor, attributes_of, pytree
from splitkit.errors import PipelineError
from splitkit.graph.storages import overlapping, storage_key


def accelerator_type() -> str:
    """Return the type of this machine's accelerator, such as ``cuda``; empty if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def with_index(device: torch.device | str) -> torch.device:
    """Return the device with an index: ``cuda`` means the current CUDA device, ``cpu`` is ``cpu:0``."""
    found = torch.device(device)
    index: Any = found.index
    if index is None and found.type != "meta":
        here = found.type == accelerator_type()
        return torch.device(found.type, torch.accelerator.current_device_index() if here else 0)
    return found


def same_device(a: torch.device, b: torch.device) -> bool:
    """Whether two names mean the same device; there is only one CPU."""
    return a.type == b.type and (a.type == "cpu" or with_index(a) == with_index(b))


def has_streams(device: torch.device) -> bool:
    """Whether work on the device is queued on streams of which one can make more."""
    return device.type == accelerator_type() and _makes_streams(device.type)


@cache
def _makes_streams(kind: str) -> bool:
    try:
        torch.Stream(device=torch.device(kind))
    except RuntimeError:  # such as mps, which has one stream
        return False
    return True


def stream_of(device: torch.device) -> torch.Stream:
    """Return the stream that is current on the device in this thread."""
    return torch.accelerator.current_stream(device)


def devices_with_streams(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Return the devices of tensors, each once, whose work is queued on streams."""
    devices = dict.fromkeys(t.device for t in tensors if not isinstance(t, FakeTensor))
    return [device for device in devices if has_streams(device)]


def current(device: torch.device) -> AbstractContextManager[None]:
    """Make an accelerator's device the current one in a ``with`` block: custom kernels launch on that."""
    if device.type == "cpu" or device.type != accelerator_type():
        return nullcontext()
    found: AbstractContextManager[None] = torch.accelerator.device_index(with_index(device).index)
    return found


class DeviceRng:
    """The random numbers of one device.

    The state of most generators is on the host, so reading and setting it does not wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type in ("cpu", "meta") else torch.get_device_module(device)

    def state(self) -> torch.Tensor:
        """Return the state of the device's generator, a byte tensor on the CPU."""
        found: torch.Tensor = torch.get_rng_state() if self._module is None else self._module.get_rng_state(*self._at)
        return found

    def set_state(self, state: torch.Tensor) -> None:
        """Set the state of the device's generator."""
        if self._module is None:
            torch.set_rng_state(state.cpu())
        else:
            self._module.set_rng_state(state.cpu(), *self._at)

    def seed(self, seed: int) -> None:
        """Seed the device's generator."""
        if self._module is None:
            torch.default_generator.manual_seed(seed)
            return
        with current(self._device):
            self._module.manual_seed(seed)

    @property
    def _at(self) -> tuple[torch.device, ...]:
        return () if self._device.type == "mps" else (self._device,)  # mps has one device


# Moves tensors of a model to their devices in place, so that every holder of a shared tensor sees the move.


def move_tensors(root: nn.Module, held: nn.Module, homes: Mapping[int, torch.device]) -> None:
    """Move tensors to their devices, with their gradients.

    Args:
        root: the module whose tensors are moved.
        held: a module with top-level tables of its own, whose children are those of ``root``.
        homes: id of a tensor -> its device; other tensors stay where they are.

    Raises:
        PipelineError: SK807 for a tensor without data, SK808 for tensors that share memory and have different devices.
            Nothing is moved then.
    """
    tables = [t for m in (root, held) for t in tables_of(m)]
    found = {id(t): t for table in tables for t in table.values() if isinstance(t, torch.Tensor) and id(t) in homes}
    memory: dict[Any, list[torch.Tensor]] = {}
    for tensor in found.values():
        memory.setdefault(storage_key(tensor), []).append(tensor)
    groups = [group for sharing in memory.values() for group in overlapping(sharing)]
    for group in groups:
        _require_one(group, homes, tables)
        _require_data(group, homes, tables)
    for group in groups:
        device = homes[id(group[0])]
        new = group if same_device(group[0].device, device) else _moved(group, device)
        replace_tensors(tables, {id(t): moved for t, moved in zip(group, new, strict=True) if moved is not t})


def tables_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return all dictionaries that may hold tensors in a module and its submodules."""
    found: list[dict[str, Any]] = []
    for inner in module.modules():
        held = attributes_of(inner)
        found += [held.parameters, held.buffers, vars(inner)]
    return list({id(table): table for table in found}.values())


def _names(group: list[torch.Tensor], tables: list[dict[str, Any]]) -> list[str]:
    found = (name for t in group for table in tables for name, value in table.items() if value is t)
    return list(dict.fromkeys(found))


def _require_data(group: list[torch.Tensor], homes: Mapping[int, torch.device], tables: list[dict[str, Any]]) -> None:
    for tensor in group:
        if tensor.is_meta and homes[id(tensor)].type != "meta":
            names = _names([tensor], tables)
            raise PipelineError(
                "SK807",
                f"{names[0]} is on meta and has no data to move",
                "Load the weights: splitkit.load(split, folder, devices).",
                names,
            )


def _require_one(group: list[torch.Tensor], homes: Mapping[int, torch.device], tables: list[dict[str, Any]]) -> None:
    devices = {homes[id(t)] for t in group}
    if len(devices) > 1:
        names = _names(group, tables)
        raise PipelineError(
            "SK808",
            f"{' and '.join(names)} share memory, but are read on different devices: {', '.join(map(str, devices))}",
            "Give the parts that read them one device, or clone one of them before the capture.",
            names,
        )


def _moved(group: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    with torch.no_grad():
        if len(group) == 1:
            return [_put(group[0], group[0].detach().to(device))]
        storage = torch.empty(0, dtype=torch.uint8, device=group[0].device).set_(group[0].untyped_storage()).to(device)
        return [
            _put(
                tensor,
                torch.empty(0, dtype=tensor.dtype, device=device).set_(
                    storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
                ),
            )
            for tensor in group
        ]


def _put(tensor: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Give a tensor new memory; return a new tensor where torch cannot do that (fake tensors, some backends)."""
    grad = None if tensor.grad is None else tensor.grad.to(new.device)
    made = tensor
    if isinstance(tensor, FakeTensor) or isinstance(new, FakeTensor) or not _set_data(tensor, new):
        made = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
    if grad is not None:
        made.grad = grad
    return made


def _set_data(tensor: torch.Tensor, new: torch.Tensor) -> bool:
    grad, tensor.grad = tensor.grad, None
    try:
        tensor.data = new
    except RuntimeError:  # ``data`` refuses another tensor type, as on XLA
        tensor.grad = grad
        return False
    return True


def replace_tensors(tables: Iterable[dict[str, Any]], new: Mapping[int, torch.Tensor]) -> None:
    """Put other tensors in the place of some, wherever a dictionary has them.

    Args:
        tables: from `tables_of`.
        new: id of a tensor -> the other one.
    """
    for table in tables:
        table.update({name: new[id(value)] for name, value in table.items() if id(value) in new})


# Copies values between devices, concurrently with computation where devices have streams; gradients are copied back.
#
# A plain ``x.to("cuda:1")`` waits for all work queued on both devices. Here each pair of devices has a stream of its
# own on either side, as in torchgpipe's ``copy.py``::
#
#     cuda:0  part 0 ──┬── part 1 ─────────            the copy waits for the kernel that makes x, not for part 1;
#     side             └─ copy of x ─┐
#     cuda:1  part 2 ────────────────┴── part 3        part 3 waits for the copy, part 2 does not
#
# Whatever is written again must wait for the copies that read it. A value that the graph writes waits at once. What the
# caller may write after the call (inputs, parameters, outputs) waits at the end of the call; other values are never
# written. A gradient waits at once too, since autograd may add to its memory.
#
# The CPU has no streams: a copy from or to it ends before the call that makes it returns.


class PendingCopy(NamedTuple):
    """A value that is being copied.

    Attributes:
        value: the value on the target device; it may be read once the copies are done.
        ready: events recorded on the target after the copies; empty if they are done.
        read: for each device that is being copied from: the device, and an event recorded there after the copies.
    """

    value: Any
    ready: tuple[torch.Event, ...] = ()
    read: tuple[tuple[torch.device, torch.Event], ...] = ()


class CopyStreams:
    """The streams of copies: for each pair of devices, one on either side."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, torch.device, torch.device], torch.Stream] = {}

    def at(self, device: torch.device, source: torch.device, target: torch.device) -> torch.Stream:
        """Return the stream on ``device`` for copies from ``source`` to ``target``."""
        key = (device, source, target)
        if key not in self._streams:
            self._streams[key] = torch.Stream(device=device)
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
        written: whether the graph writes the value, so that its device must wait for the copy.
    """

    def __init__(
        self, source: torch.device | None, target: torch.device, streams: CopyStreams, written: bool = False
    ) -> None:
        super().__init__()
        self.source, self.target, self.written, self._copy_streams = source, target, written, streams

    def forward(self, value: Any) -> PendingCopy:
        """Copy every tensor; a value that is a ``torch.device`` becomes the target."""
        if isinstance(value, torch.Tensor):
            moved = self._moved(value)
        else:
            moved = pytree.tree_map_only(torch.Tensor, self._moved, value)
            moved = pytree.tree_map_only(torch.device, lambda _: self.target, moved)
        kept = set(map(id, pytree.tree_leaves(moved)))
        copied = [t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and id(t) not in kept]
        sources = dict.fromkeys(t.device for t in copied if not isinstance(t, FakeTensor))
        at, target = self._copy_streams.at, self.target
        ready = tuple(at(target, d, target).record_event() for d in sources if has_streams(target))
        read = tuple((d, at(d, d, target).record_event()) for d in devices_with_streams(copied))
        sent = PendingCopy(moved, ready, read)
        if self.written:
            wait_until_read([sent])
        return sent

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
        tensors = [t for t in pytree.tree_leaves(sent.value) if isinstance(t, torch.Tensor)] if sent.ready else []
        for device in devices_with_streams(tensors):
            for event in sent.ready:
                stream_of(device).wait_event(event)
        for tensor in filter(_has_streams, tensors):
            tensor.record_stream(stream_of(tensor.device))
        return sent.value


class Release(nn.Module):
    """Lets the caller write again, once this module has run, what was copied in the call."""

    def forward(self, *sent: PendingCopy) -> None:
        """Make what the caller queues from now on wait for the copies."""
        wait_until_read(sent)


def wait_until_read(sent: Iterable[PendingCopy]) -> None:
    """Make the current stream of each device that is being copied from wait for the copies."""
    for copied in sent:
        for device, event in copied.read:
            stream_of(device).wait_event(event)


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
        return PendingCopy(value)


class _CopyFunction(torch.autograd.Function):
    """A copy on another device; its gradient is copied back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, target: torch.device, streams: CopyStreams) -> torch.Tensor:
        """Start the copy and return it; it may not be complete yet."""
        ctx.source, ctx.streams = x.device, streams
        # Backward runs in another thread, with other current streams. The stream of forward will read the gradient.
        ctx.stream = stream_of(x.device) if _has_streams(x) else None
        return copy_to_device(x, target, streams)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, None, None]:
        """Start to copy the gradient back to the source."""
        (grad,) = grads
        if torch.is_grad_enabled() and grad.requires_grad:  # double backward
            moved = _CopyFunction.apply(grad, ctx.source, ctx.streams)  # type: ignore[no-untyped-call]
        else:
            moved = copy_to_device(grad, ctx.source, ctx.streams)
        if _has_streams(grad):
            stream_of(grad.device).wait_stream(ctx.streams.at(grad.device, grad.device, ctx.source))
        if ctx.stream is not None:
            ctx.stream.wait_stream(ctx.streams.at(ctx.source, grad.device, ctx.source))
            moved.record_stream(ctx.stream)
        return moved, None, None


def copy_to_device(x: torch.Tensor, target: torch.device, streams: CopyStreams) -> torch.Tensor:
    """Start to copy a tensor to a device, on the streams of the pair of devices.

    An expanded tensor is copied once and expanded on the target. The copy keeps the order of strides, but no gaps
    between elements.
    """
    queued = [d for d in dict.fromkeys((x.device, target)) if has_streams(d)]
    if not queued or isinstance(x, FakeTensor):
        return _copied(x, target, False)
    with ExitStack() as stack:
        for device in queued:
            side = streams.at(device, x.device, target)
            if device == x.device:
                side.wait_stream(stream_of(device))
                x.record_stream(side)
            stack.enter_context(side)
        # The CPU waits for no event: a copy to it must be complete, and its own memory may be written right away.
        return _copied(x, target, len(queued) == 2)


def _copied(x: torch.Tensor, target: torch.device, under_way: bool) -> torch.Tensor:
    if x.layout is not torch.strided or type(x) is not torch.Tensor or x.is_quantized:
        return x.to(target, copy=True, non_blocking=under_way)
    dense = x
    for dim in range(x.dim()):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            dense = dense.narrow(dim, 0, 1)
    made = dense.to(target, copy=True, non_blocking=under_way)
    return made if dense is x else made.expand(x.shape)


def _has_streams(x: torch.Tensor) -> bool:
    return not isinstance(x, FakeTensor) and has_streams(x.device)
