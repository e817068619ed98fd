"""Run a divided training step as a module: it returns the loss, and backward of the loss runs the backward half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from splitkit.engine.pair import Pair
from splitkit.engine.staged_step import StagedStep
from splitkit.frontends.joint_capture import Joint


class DividedStep(nn.Module):
    """A module whose forward and backward are the halves of a pair, or those of stages, one after the other.

    Called like the model, it returns the loss and writes to buffers and inputs as the model does.

    Attributes:
        model: the model, which holds the parameters.
        joint: forward and backward as one graph.
        pair: the two halves of that graph, or its stages.
    """

    def __init__(self, joint: Joint, pair: Pair | StagedStep) -> None:
        super().__init__()
        self.model = joint.model
        self.joint, self.pair = joint, pair
        self.training = joint.model.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward half."""
        primals = self.joint.primals(*args, **kwargs)
        outputs: tuple[Any, ...] = _Halves.apply(self.joint, self.pair, *primals)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for position, index in _indices(self.joint, self.joint.signature.updates).items():
                primals[index].copy_(outputs[position])
        loss: Tensor = outputs[self.joint.signature.loss]
        return loss


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Joint, pair: Pair | StagedStep, *primals: Any) -> tuple[Any, ...]:
        outputs, ctx.held = pair.run_forward(primals)
        ctx.joint, ctx.pair, ctx.primals = joint, pair, len(primals)
        others = (v for i, v in enumerate(outputs) if i != joint.signature.loss and isinstance(v, Tensor))
        ctx.mark_non_differentiable(*others)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        signature = ctx.joint.signature
        of_outputs = zip(signature.tangents.values(), ctx.joint.tangents(), strict=True)
        # The loss has the gradient that autograd passes; other outputs are not differentiable, so theirs are zero.
        tangents = [gradients[position] if position == signature.loss else zero for position, zero in of_outputs]
        found = ctx.pair.run_backward(ctx.held, tangents)
        of_primals: list[Tensor | None] = [None] * ctx.primals
        for position, index in _indices(ctx.joint, signature.gradients).items():
            of_primals[index] = found[position - signature.forward_outputs]
        return None, None, *of_primals


def _indices(joint: Joint, named: Mapping[int, str]) -> dict[int, int]:
    """Return output position -> index of the primal of the same name in ``named``."""
    placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
    primals = [n.name for n in placeholders if n.name not in joint.signature.tangents]
    index = {name: i for i, name in enumerate(primals)}
    return {position: index[name] for position, name in named.items()}
