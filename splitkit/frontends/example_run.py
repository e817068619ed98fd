"""Describe the error that a model raises on its example inputs: which submodule raised it, and with which inputs."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from splitkit._torch import pytree
from splitkit.errors import CaptureError, listed
from splitkit.frontends.capture.capture_errors import first_line, raised_at
from splitkit.frontends.capture.first_call import attributes_restored, call_once
from splitkit.frontends.module_state import buffers_kept

_SHOWN = 6  # inputs, and values of one input, that a text names


def describe_failure(model: nn.Module, error: BaseException, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return ``RuntimeError: mat1 and mat2 ..., in its part fc, a Linear, called with float32[3, 9]``.

    Args:
        model: the model that was called.
        error: the error that the call raised.
        args: the positional example inputs.
        kwargs: the keyword example inputs.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = {id(module): name for name, module in model.named_modules()}
    for frame in reversed(frames):  # the innermost named submodule; nn.Module._call_impl: 2.11, 2.13, 2.15
        module = frame.f_locals.get("self")
        if frame.f_code.co_name == "_call_impl" and names.get(id(module)):
            given = frame.f_locals.get("args", ()), frame.f_locals.get("kwargs", {})
            part = (
                f", in its part {names[id(module)]}, a {type(module).__name__}, called with {describe_inputs(*given)}"
            )
            return f"{first_line(error)}{part}"
    return f"{first_line(error)}, called with {describe_inputs(args, kwargs)}"


def failed_run_error(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CaptureError | None:
    """Return the SK401 for a model that raises on its example inputs, with its error as cause; ``None`` if it runs.

    The model is called on copies of the inputs, and its state is restored.
    """
    try:
        with attributes_restored(model), buffers_kept(model), torch.enable_grad():
            call_once(model, args, kwargs)
    except CaptureError as error:  # what the model calls has said already what is wrong
        return error
    except Exception as error:
        what = (
            f"{type(model).__name__} does not run on the example inputs: {describe_failure(model, error, args, kwargs)}"
        )
        refusal = CaptureError("SK401", what + raised_at(error), "Give example inputs that model(...) accepts.")
        refusal.__cause__ = error
        return refusal
    return None


def describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return dtypes and shapes of the tensors among inputs: ``float32[3, 9], mask=bool[3]``."""
    texts = [_describe_value(value) for value in args] + [f"{name}={_describe_value(v)}" for name, v in kwargs.items()]
    return listed(texts, _SHOWN) or "no inputs"


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    leaves = pytree.tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:
        return repr(value)[:40]
    inner = ", ".join(map(_describe_value, leaves[:_SHOWN])) + (", ..." if len(leaves) > _SHOWN else "")
    return f"{type(value).__name__}({inner})"
