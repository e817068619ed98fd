"""Run a model on fake tensors, but compute its integers and booleans, so that it takes the path of a real run.

transformers, for instance, looks whether a mask is all ones, or positions begin anew, and builds a causal mask only if
it must. On fakes it cannot look, and always builds one: another run, with another peak.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (  # 2.11, 2.13, 2.15
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # 2.11, 2.13, 2.15

from splitkit._torch import FakeTensor, FakeTensorMode, fake_mode, pytree
from splitkit.errors import CaptureError, message_line
from splitkit.frontends.capture.forward_hooks import hook_state_restored


class RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes ops whose inputs and results are integers or booleans; all others run on fakes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, on fakes if a float is among its inputs or results."""
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(t, FakeTensor) or is_inexact(t) for t in given):
            run = _grouped_mm if func is GROUPED_MM and args[0].dtype != torch.bfloat16 else func
            return run(*args, **kwargs)
        if not given:
            made = func(*args, **kwargs)  # fake
            if any(is_inexact(t) for t in pytree.tree_leaves(made) if isinstance(t, Tensor)):
                return made
        with _disable_current_modes():
            made = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, self._fake_if_inexact, made)

    def _fake_if_inexact(self, tensor: Tensor) -> Tensor:
        return self.mode.from_tensor(tensor) if is_inexact(tensor) else tensor


GROUPED_MM = torch.ops.aten._grouped_mm.default  # 2.11, 2.13, 2.15


def _grouped_mm(rows: Tensor, matrices: Tensor, offsets: Tensor | None = None, *_: Any, **others: Any) -> Tensor:
    """Return the fake result of a product of groups of rows (by experts) with a matrix each.

    torch's fake kernel takes bfloat16 only (2.13, 2.15), but its kernels take any floats.
    """
    offsets = others.get("offs", offsets)
    groups = list(rows.shape[:-2] if offsets is None else offsets.shape if rows.ndim == matrices.ndim == 2 else ())
    return rows.new_empty(*groups, rows.shape[-2], matrices.shape[-1])


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor has floats or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


@contextmanager
def on_fakes(model: nn.Module, inputs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a copy of a model with fake parameters, and its inputs; inside, only integers are computed.

    The state of the random generators, and of the model's forward hooks, is restored at the end.
    """
    hooks = hook_state_restored(model)
    with fake_mode() as mode, RealIntegers(mode), torch.enable_grad(), torch.random.fork_rng(), hooks:
        made: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                with _disable_current_modes():
                    made[id(tensor)] = mode.from_tensor(tensor) if is_inexact(tensor) else tensor.clone()
            return made[id(tensor)]

        state = {id(t): fake(t) for t in (*model.parameters(), *model.buffers())}
        copied = copy.deepcopy(model, dict[int, Any](state))
        yield copied, pytree.tree_map_only(Tensor, fake, inputs)


def no_fake_run(model: nn.Module, error: Exception, instead: str) -> CaptureError:
    """Return the SK401 for a model that failed on fakes.

    Args:
        model: the model.
        error: how it failed.
        instead: what takes a model that looks at values of floats, or at integers that follow from them.
    """
    reason = f"the model does not run on fake tensors of these inputs: {message_line(error)}"
    if not isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        remedy = "Give inputs that the model accepts; register fake kernels for custom ops; let copy.deepcopy copy it."
        return CaptureError("SK401", reason, remedy)
    experts = getattr(getattr(model, "config", None), "_experts_implementation", None)  # transformers >= 5
    blind = experts is None or experts in _BLIND_EXPERTS
    other = "" if blind else 'Call model.set_experts_implementation("batched_mm") first. Or use '
    return CaptureError("SK401", f"{reason} needs values", f"{other or 'Use '}{instead}.")


_BLIND_EXPERTS = ("grouped_mm", "batched_mm")
"""Ways in which transformers runs experts without looking at how many tokens each has."""
