"""The differences of two tensors or objects: how large they are, and whether rounding explains them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from splitkit.testing.trial import bitwise, layout_and_entries

GRADIENT_TOLERANCE = 1e-4
"""Largest difference of a gradient, relative to its own largest entry, that counts as rounding, since summing the same
terms in another order rounds differently."""

NOISE = 3e-7
"""Allowed difference of a gradient that would be zero without rounding (the key bias of attention, a bias before batch
norm), relative to the largest gradient of the model. Such a gradient has no scale of its own. Measured in float32 on
small batches: it is up to 6e-7 and differs by up to 2e-7. The allowance holds for gradients up to ten times this."""

_MISSING = object()


@dataclass(frozen=True)
class Difference:
    """One tensor of the reference compared with the same tensor of the candidate.

    Attributes:
        name: ``output[0]``, ``gradient of transformer.wte.weight``, ``buffer running_mean`` ...
        largest: largest absolute difference; ``inf`` if one tensor is missing, has another shape, dtype or
            ``requires_grad``, or is infinite or NaN in other places.
        scale: largest finite absolute entry of the reference.
        bitwise: whether every bit is equal.
    """

    name: str
    largest: float
    scale: float
    bitwise: bool

    @property
    def relative(self) -> float:
        """``largest`` divided by ``scale``."""
        return self.largest / self.scale if self.scale else self.largest


def is_rounding(d: Difference, tolerance: float, noise: float) -> bool:
    """Return whether a tensor differs by no more than ``tolerance`` of its scale, or than ``noise`` if it is tiny."""
    return d.bitwise or d.largest <= max(tolerance * d.scale, noise if d.scale <= 10 * noise else 0.0)


def differences(first: Mapping[str, Any], second: Mapping[str, Any], title: str) -> tuple[Difference, ...]:
    """Return the differences of tensors or objects of the same names; ``title`` makes their names of these."""
    names = dict.fromkeys([*first, *second])
    return tuple(measure_difference(title.format(n), first.get(n, _MISSING), second.get(n, _MISSING)) for n in names)


def measure_difference(name: str, a: Any, b: Any) -> Difference:
    """Return the difference of two tensors or objects; it is infinite if they are of different kinds."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        equal = _equal(a, b)
        return Difference(name, 0.0 if equal else math.inf, 0.0, equal)
    (where, x), (elsewhere, y) = layout_and_entries(a.detach()), layout_and_entries(b.detach())
    kinds = [(t.layout, t.dtype, t.device, t.requires_grad) for t in (a, b)]
    if kinds[0] != kinds[1] or where != elsewhere:
        return Difference(name, math.inf, 0.0, False)
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    equal = bitwise(a, b)
    # infinities of equal sign and NaNs at the same place count as no difference
    same = (x == y) | (x.isnan() & y.isnan())
    apart = (x - y).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0.0)
    scale = x.abs().masked_fill(~x.isfinite(), 0.0)
    return Difference(name, _largest(apart) if not equal else 0.0, _largest(scale), equal)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _equal(a: Any, b: Any) -> bool:
    """Return whether two objects are equal. NaN equals NaN; objects that cannot be compared differ."""
    if a is b or type(a) is not type(b):
        return a is b
    try:
        if isinstance(a, np.ndarray):
            same = np.array_equal(a, b) if a.dtype.hasobject else a.tobytes() == b.tobytes()
            return bool(same and a.dtype == b.dtype and a.shape == b.shape)
        return bool(a == b or (a != a and b != b))
    except Exception:
        return False
