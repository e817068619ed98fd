"""Opaque code for random graphs: it rebinds buffers, changes ambient state, makes objects and shares memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from visiblestate import exit_level

from splitkit import _torch


class Rebinding(nn.Module):
    """A leaf module that rebinds a buffer of its own or of another module; the graph reads the buffer."""

    state: Tensor

    def __init__(self, size: int, other: Rebinding | None = None) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(size, size))
        self.other = [other]  # in a list, so that it is not a submodule

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (n, n) to the same shape."""
        (owner,) = self.other
        owner = self if owner is None else owner
        owner.state = owner.state + x.detach().mean()
        return x * 1


class Hidden(nn.Module):
    """A leaf module unknown to splitkit that reads, writes or returns a buffer, which it reaches through a list."""

    def __init__(self, held: list[Tensor], does: str) -> None:
        super().__init__()
        self.held, self.does = held, does

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (n, n) to the same shape."""
        (held,) = self.held
        if self.does == "lend":
            return held
        if self.does == "write":
            held.add_(x.detach().mean())
            return x * 1
        return x + held


class Meter:
    """An object whose methods are named like methods of a tensor, and change the object."""

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def add(self, x: Tensor) -> Tensor:
        """Add the mean of ``x`` to the total, and return ``x`` plus the total."""
        self.total = self.total + x.detach().mean()
        return x + self.total

    def mul(self, x: Tensor) -> Tensor:
        """Return ``x`` scaled by the total, in the same shape."""
        return x * (1 + self.total)


def meter_from(x: Tensor) -> Meter:
    """Return an object that opaque code makes."""
    meter = Meter()
    meter.add(x)
    return meter


def unsettle(x: Tensor) -> Tensor:
    """Change the default dtype, like code that sets it and never restores it; ``observe`` makes it visible."""
    wide = torch.get_default_dtype() is torch.float64
    torch.set_default_dtype(torch.float32 if wide else torch.float64)
    return x * 1


def wrapper_of(kind: Any, held: Tensor) -> Any:
    """Make a tensor of a subclass that has the size of a tensor but no memory of its own."""
    return Tensor._make_wrapper_subclass(kind, held.shape, dtype=held.dtype)


class Wrapped(Tensor):
    """A wrapper subclass: it has no memory of its own, and its ops run on the tensor that it holds."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapped:
        """Return a wrapper with the shape of the tensor that it holds."""
        made: Wrapped = wrapper_of(cls, held)
        return made

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the op on the wrapped tensors; an in-place op returns its first argument."""

        def bare(value: Any) -> Any:
            return value.held if isinstance(value, Wrapped) else value

        result = func(*map(bare, args), **{k: bare(v) for k, v in (kwargs or {}).items()})
        return args[0] if func.overloadpacket.__name__.endswith("_") else result


def wrap(x: Tensor) -> Wrapped:
    """Return a wrapper over the memory of ``x``."""
    return Wrapped(x.detach())


def random_array(size: int, seed: int) -> npt.NDArray[np.float32]:
    """Return a random array of shape (size, size)."""
    return np.random.default_rng(seed).random((size, size), dtype=np.float32)


def close_all() -> None:
    """Leave every region that a failed graph has left open."""
    exit_level(0)
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_enabled("cpu", False)
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        _torch.POP_HOOKS()
    while _torch.functorch_depth():
        _torch.CLOSE_VMAP[0]()
