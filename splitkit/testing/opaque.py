"""Opaque code for random graphs: it rebinds buffers, changes ambient state, makes objects and shares memory unseen."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from splitkit import _torch


class Rebinding(nn.Module):
    """A leaf that binds a buffer anew, its own or one of another module; the graph reads it."""

    state: Tensor

    def __init__(self, size: int, other: Rebinding | None = None) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(size, size))
        self.other = [other]  # in a list, so that it is no child

    def forward(self, x: Tensor) -> Tensor:
        """Shape (n, n) -> the same."""
        (owner,) = self.other
        owner = self if owner is None else owner
        owner.state = owner.state + x.detach().mean()
        return x * 1


class Meter:
    """An object whose methods have the names of a tensor's, and change it."""

    def __init__(self) -> None:
        self.total = torch.zeros(())

    def add(self, x: Tensor) -> Tensor:
        """Count ``x`` in; gives ``x`` and what there is."""
        self.total = self.total + x.detach().mean()
        return x + self.total

    def mul(self, x: Tensor) -> Tensor:
        """Shape of ``x`` -> the same."""
        return x * (1 + self.total)


def meter_from(x: Tensor) -> Meter:
    """An object that opaque code makes."""
    meter = Meter()
    meter.add(x)
    return meter


def unsettle(x: Tensor) -> Tensor:
    """Change the default dtype, as code does that sets it and forgets it; ``observe`` shows which it is."""
    wide = torch.get_default_dtype() is torch.float64
    torch.set_default_dtype(torch.float32 if wide else torch.float64)
    return x * 1


class Wrapped(Tensor):
    """A wrapper subclass: it has no memory of its own, and ops on it are ops on the tensor that it holds."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapped:
        """A wrapper of the size of what it holds."""
        made: Wrapped = _torch.make_wrapper(cls, held.shape, dtype=held.dtype)
        return made

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the op on what is wrapped; one in place gives its first argument back."""

        def bare(value: Any) -> Any:
            return value.held if isinstance(value, Wrapped) else value

        result = func(*map(bare, args), **{k: bare(v) for k, v in (kwargs or {}).items()})
        return args[0] if func.overloadpacket.__name__.endswith("_") else result


def wrap(x: Tensor) -> Wrapped:
    """A wrapper over the memory of ``x``."""
    return Wrapped(x.detach())


def random_array(size: int, seed: int) -> npt.NDArray[np.float32]:
    """Shape (size, size)."""
    return np.random.default_rng(seed).random((size, size), dtype=np.float32)
