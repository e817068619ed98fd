"""Join a model and its loss in one module, from which a joint graph is captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitkit._torch import pytree
from splitkit.graph.joint_marks import mark_of
from splitkit.graph.losses import loss_of

_WRAPPED = "model"
_ROOT = "L['self']"  # Dynamo's name of the module that it captures
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
Loss = Callable[[Any], Tensor]
NO_TENSOR = "the loss is not a tensor"
NO_LOSS = "the model returns no loss"
"""Texts of the errors raised during capture, by which the caller recognises them."""


class TrainingStep(nn.Module):
    """A model and its loss.

    Attributes:
        copies: whether to return a copy of the loss: AOTAutograd would differentiate the base of a loss that is a view.
    """

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.copies = False
        self.training = model.training

    def names(self) -> dict[str, str]:
        """Return each name of a parameter or buffer in the step -> its first name in the model."""
        return {**_first_names(self.named_parameters), **_first_names(self.named_buffers)}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the model on these inputs."""
        # The hooks of a captured graph only check inputs, in ways that Dynamo cannot trace.
        call = self.model.forward if isinstance(self.model, fx.GraphModule) else self.model
        output = call(*args, **kwargs)
        loss = loss_of(output) if self.loss is None else self.loss(output)
        if not isinstance(loss, Tensor):
            raise TypeError(NO_LOSS if self.loss is None else NO_TENSOR)
        return loss.clone() if self.copies else loss


def sum_of_outputs(output: Any) -> Tensor | None:
    """Return the sum of all tensors in an output that require grad, as a scalar float; ``None`` if there are none."""
    values = [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.requires_grad]
    sums = [(torch.view_as_real(v) if v.is_complex() else v).float().sum() for v in values]
    return torch.stack(sums).sum() if sums else None


def _first_names(named: Callable[..., Iterable[tuple[str, Tensor]]]) -> dict[str, str]:
    """Return each name in the step -> the first name of the tensor in the model."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name.removeprefix(f"{_WRAPPED}."))
        for name, tensor in named(remove_duplicate=False)
    }


def name_modules(graph: fx.Graph) -> None:
    """Remove the step from module paths, and give a path to the nodes of backward that have none."""
    for node in graph.nodes:
        for key in _STACKS:
            if stack := node.meta.get(key):
                node.meta[key] = dict(_inside_model(stack))
        if node.op == "call_function" and mark_of(node) == "is_backward":
            stacks = (n.meta.get(key) for n in (node, *node.all_input_nodes) for key in reversed(_STACKS))
            node.meta[_STACKS[1]] = next(filter(None, stacks), {})


def _inside_model(stack: Mapping[str, tuple[str, Any]]) -> Iterator[tuple[str, tuple[str, Any]]]:
    for key, (path, kind) in stack.items():
        if path != _ROOT:
            yield key, (path.replace(f"{_ROOT}.{_WRAPPED}", _ROOT, 1), kind)
