"""Give a model that returns predictions a loss, for commands that train; imports torch where it is used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from splitkit.errors import CaptureError
from splitkit.testing.factory import Example, module_at

if TYPE_CHECKING:
    from torch import Tensor

LOSSES = ("cross_entropy", "mse")
TARGET = "target"
"""The keyword input of an example that goes to the loss and not to the model."""
_WITHOUT = "_splitkit_without_loss"


def with_loss(example: Example, loss: str) -> Example:
    """Return an example whose model returns ``loss`` of what it returned before.

    The model keeps its parameters and their names; it gets a subclass of its own class. The target is the example's
    keyword input ``target``, unless the model takes it. Without one, ``cross_entropy`` counts the predictions through
    the classes (0, 1, 2 ...), and ``mse`` compares with zeros.

    Args:
        example: the model and its inputs.
        loss: ``"cross_entropy"`` or ``"mse"`` of the predictions; or ``place:function``, which is called with the
            output, and with the target if there is one.

    Raises:
        CaptureError: SK403 for a function that is missing, or a model of which nothing can be derived.
    """
    from torch import fx

    model = example.model
    if isinstance(model, fx.GraphModule):
        reason = "a graph, such as an exported program, cannot be given a loss"
        raise CaptureError("SK403", reason, "Export the model with its loss, or name the function that makes it.")
    own = _own_loss(loss) if loss not in LOSSES else None
    kind = vars(type(model)).get(_WITHOUT, type(model))  # a factory may return the same module again
    taken = TARGET in inspect.signature(kind.forward).parameters

    @wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        target = None if taken else kwargs.pop(TARGET, None)
        output = kind.forward(self, *args, **kwargs)
        if own is not None:
            return own(output) if target is None else own(output, target)
        return _loss_of(loss, _predictions(output, loss), target)

    if not taken and TARGET in example.kwargs:
        forward.__signature__ = _with_target(inspect.signature(kind.forward))  # type: ignore[attr-defined]
    names = {"forward": forward, _WITHOUT: kind, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), names)
    return example


def _own_loss(spec: str) -> Callable[..., Any]:
    place, _, name = spec.rpartition(":")
    found = getattr(module_at(place), name, None)
    if not callable(found):
        raise CaptureError("SK403", f"{place} has no function {name!r}", "Define it there: def loss(output): ...")
    return found  # type: ignore[no-any-return]  # a module's attribute may be anything


def _with_target(signature: inspect.Signature) -> inspect.Signature:
    named = list(signature.parameters.values())
    at = next((i for i, one in enumerate(named) if one.kind is one.VAR_KEYWORD), len(named))
    named.insert(at, inspect.Parameter(TARGET, inspect.Parameter.KEYWORD_ONLY))
    return signature.replace(parameters=named)


def _predictions(output: Any, loss: str) -> Tensor:
    """Return an output that is a tensor, its ``logits``, or its only tensor of floating point."""
    import torch

    from splitkit.graph.losses import tensors_in

    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, torch.Tensor):
        return named
    found = [value for _, value in tensors_in(output) if value.is_floating_point()]
    if len(found) != 1:
        reason = f"--loss {loss} needs predictions, and the model returns {len(found)} tensors of floating point"
        raise CaptureError("SK403", reason, "Write your own: --loss FILE.py:FUNCTION, called with the output.")
    return found[0]


def _loss_of(loss: str, predictions: Tensor, target: Tensor | None) -> Tensor:
    import torch
    from torch.nn import functional

    if loss == "mse":
        return functional.mse_loss(predictions, torch.zeros_like(predictions) if target is None else target)
    if predictions.dim() < 2:
        reason = f"--loss cross_entropy needs [batch, classes], and the model returns {list(predictions.shape)}"
        raise CaptureError("SK403", reason, "Use --loss mse, or write your own: --loss FILE.py:FUNCTION.")
    classes_last = predictions.movedim(1, -1) if predictions.dim() > 3 else predictions
    flat = classes_last.reshape(-1, classes_last.shape[-1])
    if target is None:
        target = torch.arange(flat.shape[0], device=flat.device) % flat.shape[1]
    return functional.cross_entropy(flat, target.reshape(-1))
