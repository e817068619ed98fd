"""Which of a model's outputs is its loss: one rule for everything that trains, compares or times a model.

1. what is called ``loss``: an attribute, a key or a field of the output;
2. else the only number among the outputs that requires grad;
3. else none: whoever needs one refuses, with `no_loss` as the reason.

Dynamo traces these functions where `splitkit.capture_joint` captures a model with its loss: they are plain Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 6  # of outputs inside outputs
_CLOSED = (nn.Module, type, FunctionType, ModuleType)


def loss_of(output: Any) -> Tensor | None:
    """The loss in what a model returned, ``None`` if it returned none."""
    own: Tensor | None = named_loss(output)
    if own is not None:
        return own
    found: list[Tensor] = []
    for _, value in tensors_in(output):
        if value.requires_grad and value.numel() == 1 and not any(value is other for other in found):
            found.append(value)
    return found[0] if len(found) == 1 else None


def named_loss(output: Any, kind: Any = Tensor) -> Any:
    """What is called ``loss`` in an output, ``None`` if that is nothing, or nothing of this kind."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), kind):
        return output["loss"]
    own = getattr(output, "loss", None)
    return own if isinstance(own, kind) else None


def tensors_in(output: Any, path: str = "", depth: int = 0) -> list[tuple[str, Tensor]]:
    """The tensors in an output with their paths: in tuples, lists, dicts, and attributes of objects of any class."""
    if isinstance(output, Tensor):
        return [(path, output)]
    found: list[tuple[str, Tensor]] = []
    if depth < _DEPTH:
        for name, value in _held(output):
            found += tensors_in(value, path + name, depth + 1)
    return found


def _held(output: Any) -> list[tuple[str, Any]]:
    """What a container or an object holds, and how it is reached."""
    if isinstance(output, Mapping):
        return [(f"[{key!r}]", value) for key, value in output.items()]
    if isinstance(output, (tuple, list)):
        fields = getattr(output, "_fields", None)
        names = [f"[{i}]" for i in range(len(output))] if fields is None else [f".{name}" for name in fields]
        return list(zip(names, output, strict=True))
    if isinstance(output, _CLOSED):
        return []
    slots = getattr(type(output), "__slots__", None)
    if slots is None:
        return [(f".{name}", value) for name, value in getattr(output, "__dict__", {}).items()]
    own = (slots,) if isinstance(slots, str) else slots
    return [(f".{name}", getattr(output, name)) for name in own if hasattr(output, name)]


def no_loss(output: Any) -> str:
    """Why an output has no loss, with all tensors in it: name, dtype, shape and whether it requires grad."""
    tensors = tensors_in(output)
    numbers = sum(value.requires_grad and value.numel() == 1 for _, value in tensors)
    kind = type(output).__name__
    if not tensors:
        return f"the model returns a {kind} without tensors, and no loss"
    lines = [f"\n    output{path}: {_text(value)}" for path, value in tensors[:_SHOWN]]
    more = f"\n    and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    what = "none of its outputs is one number that requires grad" if not numbers else f"{numbers} numbers require grad"
    return f"the model returns no loss: nothing is called loss, and {what}:{''.join(lines)}{more}"


_SHOWN = 12
GIVE = "loss=lambda output: ..."
"""How a loss is given."""


def _text(value: Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)}{', requires grad' if value.requires_grad else ''}"


def outputs_of(graph: torch.fx.Graph, value: Any) -> Any:
    """What a graph returns, with ``value(node)`` for each node; ``None`` if its class takes no such value."""
    try:
        return graph.process_outputs(torch.fx.map_arg(graph.output_node().args[0], value))
    except Exception:  # of the class's own
        return None
