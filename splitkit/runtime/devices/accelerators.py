"""Devices, their streams and their random numbers, by torch's interfaces that do not name a vendor."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from splitkit._torch import FakeTensor


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
        new_stream(torch.device(kind))
    except RuntimeError:  # such as mps, which has one stream
        return False
    return True


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of the device."""
    made: Any = torch.Stream
    found: torch.Stream = made(device=device)
    return found


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
