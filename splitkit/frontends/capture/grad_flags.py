"""Tell calls of ``requires_grad_`` inside a model that change no gradient from those that do.

Tracing loses the call. No parameter misses a gradient for that reason unless the tensor was detached from one::

    x.requires_grad_()                       an input, or made of inputs and frozen weights: nothing is lost
    h = self.linear(x).detach()
    h.requires_grad_()                       cut off from a parameter that trains: refused
    self.scale.requires_grad_()              a parameter or buffer: refused
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit.errors import CaptureError
from splitkit.frontends.capture.capture_errors import user_line
from splitkit.graph.storages import attribute

SETTERS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
DATA_SETTERS = (torch.Tensor.data.__set__,)  # type: ignore[attr-defined]
HOOKS = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


class GradFlags:
    """Calls of ``requires_grad_`` that a model makes while it is traced."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.where = ""  # the line of the first call

    def sets_flag(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Return whether a call makes a tensor require grad that did not."""
        if func not in SETTERS or not isinstance(args[0], torch.Tensor) or args[0].requires_grad:
            return False
        return bool(args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True))

    def set(self, tensor: torch.Tensor, tracer: Any) -> None:
        """Raise if the call changes gradients where it may not; else record its line."""
        self.where = self.where or user_line()
        # A gradient is missing only where the tensor comes from a parameter that trains, or is one.
        own = {tracer.tensor_tracker[t].proxy.node: t for t in self._own() if t in tracer.tensor_tracker}
        if tensor not in tracer.tensor_tracker:
            return  # created in the model, from no input
        node = tracer.tensor_tracker[tensor].proxy.node
        if node in own or any(n in own and own[n].requires_grad for n in _before(node)):
            raise self._refusal()

    def check(self, gm: fx.GraphModule) -> None:
        """Refuse a graph with an output that requires grad in the model and not in the graph."""
        if not self.where:
            return
        trained = {n for n in gm.graph.nodes if _trains(gm, n)}
        for node in gm.graph.output_node().all_input_nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.is_floating_point() and trained.isdisjoint(_before(node)):
                raise self._refusal()

    def _own(self) -> Iterable[torch.Tensor]:
        return (*self.model.parameters(), *self.model.buffers())

    def _refusal(self) -> CaptureError:
        return CaptureError(
            "SK401",
            f"the model calls requires_grad_ on a tensor, which torch.export drops: its gradient would be missing"
            f"{self.where}",
            "Make that tensor an input or a parameter. To run the graph without gradients, capture "
            "torch.export.export(model, args, kwargs).",
        )


def _before(node: Node) -> set[Node]:
    """Return the node and all nodes that it depends on."""
    found, left = {node}, [node]
    while left:
        for other in left.pop().all_input_nodes:
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def _trains(gm: fx.GraphModule, node: Node) -> bool:
    value = attribute(gm, str(node.target)) if node.op == "get_attr" else None
    value = node.meta.get("val") if node.op == "placeholder" else value
    return isinstance(value, torch.Tensor) and value.requires_grad
