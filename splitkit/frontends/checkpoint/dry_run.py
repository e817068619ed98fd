"""Measure the memory of a training step that does not run: on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn

from splitkit.errors import CaptureError, SplitError
from splitkit.frontends.capture.capture_errors import capture_error, require_module
from splitkit.frontends.checkpoint.real_integers import no_fake_run, on_fakes
from splitkit.frontends.joint.joint_checks import checked_loss
from splitkit.frontends.joint.train_step import Loss
from splitkit.frontends.trace_settings import without_meta_errors
from splitkit.memory.measurement import MeasuredMemory, measure_memory


def dry_run(
    model: nn.Module,
    *args: Any,
    loss: Loss | None = None,
    backend: str | Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] | None = None,
    **kwargs: Any,
) -> MeasuredMemory:
    """Return the memory of a training step of a model as `measure_memory` would measure it, without running it.

    The step is forward, the loss and backward, with the model's activation checkpointing, hooks and autograd functions.
    A copy of the model runs on fake tensors: nothing is computed or allocated, and the model is not changed.

    With a backend it is the step of ``torch.compile(model, backend=backend)``. For ``"inductor"``, and for
    ``splitkit.backend("least", "inductor")``, Inductor fuses, orders and generates code as it would, and its
    allocations count; no kernel is compiled. The model must be on the CPU and make one graph, without graph breaks.

    Args:
        model: the model, in the mode (train or eval) in which it will run.
        args: inputs, of which only shapes and dtypes count.
        loss: a function of the model's output that returns a scalar; the default is as in `capture_joint`.
        backend: what ``torch.compile`` takes: a name, `splitkit.backend`, or a function; ``None`` for eager mode.
        kwargs: keyword inputs.

    Raises:
        CaptureError: SK401 if the model does not run on fakes of the inputs, cannot be captured, is on another device
            than the CPU (with a backend), or has no loss.
        PolicyError: SK302 if there is no such backend.
        SplitError: what the policy of a backend refuses.
    """
    require_module(model)
    if backend is None:
        return _eager(model, loss, args, kwargs)
    from splitkit.frontends.compile.compiled_dry_run import compiled_dry_run

    try:
        return compiled_dry_run(model, backend, loss, args, kwargs)
    except SplitError:
        raise
    except Exception as error:
        _eager(model, loss, args, kwargs)  # a model that does not run at all is refused here
        raise capture_error(model, "dynamo", error, _WHOLE) from error


_WHOLE = "A dry run with a backend needs a model that becomes one graph (torch.compile(model, fullgraph=True))."


def _eager(model: nn.Module, loss: Loss | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MeasuredMemory:
    """Measure the step in eager mode."""

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
