"""Runs of a model that leave no trace: its inputs are copies, and its state is put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from splitkit._torch import pytree
from splitkit.costs.copies import copied
from splitkit.testing.trial import untouched

if TYPE_CHECKING:
    from splitkit.testing.models import Example


@contextmanager
def as_it_was(module: nn.Module, seed: int) -> Iterator[None]:
    """Draw from ``seed`` within, from the caller's random state again afterwards, when the module is as it was too."""
    with untouched(module), torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def own_inputs(example: Example) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the inputs, for a run that may write to them: they share memory with each other as these do.

    Those that require grad are leaves, which have no gradient yet.
    """
    given = (example.args, example.kwargs)
    args, kwargs = pytree.tree_map(_with_gradient, copied(given), given)
    return args, kwargs


def _with_gradient(copy: Any, given: Any) -> Any:
    return copy.requires_grad_(given.requires_grad) if isinstance(copy, Tensor) else copy
