"""The rule that finds the loss among a model's outputs, for everything that trains, compares or times a model.

1. The loss is the output called ``loss``: an attribute, a key or a field.
2. Otherwise it is the only number among the outputs that requires grad.
3. Otherwise there is none, and callers that need one refuse, with `no_loss` as the reason.

Dynamo traces these functions where `splitkit.capture_joint` captures a model with its loss, so they are plain Python.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 6  # levels of nesting that are searched
_CLOSED = (nn.Module, type, FunctionType, ModuleType)


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in a model's output, ``None`` if there is none."""
    own: Tensor | None = named_loss(output)
    if own is not None:
        return own
    found: list[Tensor] = []
    for _, value in tensors_in(output):
        if value.requires_grad and value.numel() == 1 and not any(value is other for other in found):
            found.append(value)
    return found[0] if len(found) == 1 else None


def named_loss(output: Any, kind: Any = Tensor) -> Any:
    """Return the value called ``loss`` in an output, ``None`` if there is none of this kind."""
    if isinstance(output, Mapping) and isinstance(output.get("loss"), kind):
        return output["loss"]
    own = getattr(output, "loss", None)
    return own if isinstance(own, kind) else None


def loss_node(graph: torch.fx.Graph, graded: Collection[torch.fx.Node]) -> torch.fx.Node | None:
    """Return the output of a graph that `loss_of` finds when the graph runs, ``None`` if there is none.

    Args:
        graph: a graph whose nodes have ``meta["val"]``.
        graded: the nodes whose values require grad.
    """
    named = named_loss(outputs_of(graph, lambda node: node), torch.fx.Node)
    if named is not None:
        return named if named in graded else None
    numbers = [node for node in graph.output_node().all_input_nodes if node in graded and _is_number(node)]
    return numbers[0] if len(numbers) == 1 else None


def _is_number(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(isinstance(size, int) and size == 1 for size in value.shape)


def tensors_in(output: Any, path: str = "", depth: int = 0) -> list[tuple[str, Tensor]]:
    """Return the tensors in an output with their paths, from tuples, lists, dicts and attributes of any object."""
    if isinstance(output, Tensor):
        return [(path, output)]
    found: list[tuple[str, Tensor]] = []
    if depth < _DEPTH:
        for name, value in _held(output):
            found += tensors_in(value, path + name, depth + 1)
    return found


def _held(output: Any) -> list[tuple[str, Any]]:
    """Return (path, value) of everything that a container or an object holds."""
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
    """Say why an output has no loss, and list its tensors: name, dtype, shape and whether they require grad."""
    tensors = tensors_in(output)
    numbers = sum(value.requires_grad and value.numel() == 1 for _, value in tensors)
    kind = type(output).__name__
    if not tensors:
        return f"the model returns a {kind} without tensors, and no loss"
    lines = [f"\n    output{path}: {_text(value)}" for path, value in tensors[:_SHOWN]]
    more = f"\n    and {len(tensors) - _SHOWN} more" if len(tensors) > _SHOWN else ""
    what = "none of its outputs is one number that requires grad" if not numbers else f"{numbers} numbers require grad"
    return f"the model returns no loss: nothing is called loss, and {what}:{''.join(lines)}{more}"


_SHOWN = 12  # outputs that the error names
GIVE = "loss=lambda output: ..."
"""The argument by which users name the loss."""


def _text(value: Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}{list(value.shape)}{', requires grad' if value.requires_grad else ''}"


def outputs_of(graph: torch.fx.Graph, value: Any) -> Any:
    """Return the output of a graph with ``value(node)`` for each node; ``None`` if its class rejects such values."""
    try:
        return graph.process_outputs(torch.fx.map_arg(graph.output_node().args[0], value))
    except Exception:  # whatever the constructor of the class raises
        return None
