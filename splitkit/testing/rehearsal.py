"""Run a model without side effects: on copies of its inputs, with its state restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from splitkit._torch import pytree
from splitkit.costs.timing.run_inputs import copy_tensors
from splitkit.testing.trial import untouched

if TYPE_CHECKING:
    from splitkit.testing.models import Example


@contextmanager
def state_restored(module: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch's RNG inside the block; restore the caller's RNG state and the module's state afterwards."""
    with untouched(module), torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def copied_inputs(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return copies of an example's inputs, for a run that may write to them; they share memory as the originals do.

    Copies that require grad are leaves without a gradient.
    """
    given = (example.args, example.kwargs)
    args, kwargs = pytree.tree_map(_with_gradient, copy_tensors(given), given)
    return args, kwargs


def _with_gradient(copy: Any, given: Any) -> Any:
    return copy.requires_grad_(given.requires_grad) if isinstance(copy, Tensor) else copy
