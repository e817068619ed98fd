"""Measure the memory of a training step that does not run: on fake tensors."""

from __future__ import annotations

from typing import Any

from torch import nn

from splitkit.errors import CaptureError
from splitkit.frontends.capture.capture_errors import require_module
from splitkit.frontends.checkpoint.real_integers import no_fake_run, on_fakes
from splitkit.frontends.joint.joint_checks import checked_loss
from splitkit.frontends.joint.train_step import Loss
from splitkit.frontends.trace_settings import without_meta_errors
from splitkit.memory.measurement import MeasuredMemory, measure_memory


def dry_run(
    model: nn.Module,
    *args: Any,
    loss: Loss | None = None,
    **kwargs: Any,
) -> MeasuredMemory:
    """Return the memory of a training step of a model as `measure_memory` would measure it, without running it.

    The step is forward, the loss and backward, with the model's activation checkpointing, hooks and autograd functions.
    A copy of the model runs on fake tensors: nothing is computed or allocated, and the model is not changed.

    Args:
        model: the model, in the mode (train or eval) in which it will run.
        args: inputs, of which only shapes and dtypes count.
        loss: a function of the model's output that returns a scalar; the default is as in `capture_joint`.
        kwargs: keyword inputs.

    Raises:
        CaptureError: SK401 if the model does not run on fakes of the inputs, or has no loss.
    """
    require_module(model)

    def step(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        # The output is not held during backward, as in `model(**batch).loss.backward()`.
        value = checked_loss(module(*inputs, **named), loss, model, args, kwargs)
        value.backward()  # type: ignore[no-untyped-call]

    try:
        with without_meta_errors(), on_fakes(model, (args, kwargs)) as (copied, (inputs, named)):
            return measure_memory(step, copied, inputs, named)
    except CaptureError:
        raise
    except Exception as error:
        raise no_fake_run(model, error, "splitkit.measure_memory, which runs the step") from error
