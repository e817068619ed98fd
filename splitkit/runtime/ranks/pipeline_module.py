"""A pipeline as a module, for training loops that call a model and then ``loss.backward()``.

Such loops (transformers' ``Trainer``, accelerate, Lightning) run forward and backward apart, but a pipeline runs both
in one step. The module's forward therefore runs the whole step, keeps the gradients that it made, and returns a loss;
``loss.backward()`` then adds these gradients, times the gradient of the loss, to the gradients of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from splitkit.errors import PipelineError
from splitkit.runtime.ranks.evaluation import autocasts_of
from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.runtime.ranks.planned_stage import graphs_of
from splitkit.runtime.ranks.step_losses import NUMBER


class PipelineModule(nn.Module):
    """Run the steps of a pipeline as calls of a module.

    All ranks call it with the same batch and get the same loss. It has the parameters of the rank's stages, under
    the names of the unsplit model with dots replaced by ``/``.

    Args:
        pipe: the pipeline, which is trained.
        evaluation: `Pipeline.evaluation` of the model captured in eval mode, for calls in eval mode or without
            gradients.

    Attributes:
        accepts_loss_kwargs: for ``Trainer``: whether the graph has the input ``num_items_in_batch``, a tensor by which
            it divides a sum. If not, Trainer divides the loss by the accumulation steps.
    """

    def __init__(self, pipe: Pipeline, evaluation: Pipeline | None = None) -> None:
        super().__init__()
        self.pipe, self.evaluation = pipe, evaluation
        self.accepts_loss_kwargs = pipe.inputs.get(NUMBER) is not None
        for name, tensor in pipe.named_tensors().items():
            plain = name.replace(".", "/")
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(plain, tensor)
            else:
                self.register_buffer(plain, tensor)
        dtypes = {dtype for _, dtype in autocasts_of(pipe.modules)} | {t.dtype for t in pipe.named_tensors().values()}
        nodes = (node for part in pipe.modules for gm in graphs_of(part) for node in gm.graph.nodes)
        dtypes |= {value for node in nodes for value in node.kwargs.values() if isinstance(value, torch.dtype)}
        self._is_half = torch.float16 in dtypes
        self._anchor = torch.zeros((), device=pipe.device, requires_grad=True)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """Run a training step, or forward only in eval mode or without gradients.

        Returns:
            ``{"loss": loss}``, the loss of the step as the pipeline's ``reduction`` says, on every rank.

        Raises:
            PipelineError: SK802 in eval mode if there is no pipeline for it; otherwise as `Pipeline.step`.
        """
        if not self.training or not torch.is_grad_enabled():
            return {"loss": self._evaluated(args, kwargs)}
        held = self.pipe.parameters()
        before = [parameter.grad for parameter in held]
        for parameter in held:
            parameter.grad = None
        try:
            loss = self.pipe.step(*args, loss_everywhere=True, **_counted(self.pipe, kwargs)).loss
            made = [parameter.grad for parameter in held]
        finally:
            for parameter, grad in zip(held, before, strict=True):
                parameter.grad = grad
        found: torch.Tensor = _AddGradients.apply(self._anchor, loss, held, made, self._is_half)  # type: ignore[no-untyped-call]
        return {"loss": found}

    def _evaluated(self, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        if self.evaluation is None:
            raise PipelineError(
                "SK802",
                "the model was called in eval mode or without gradients, but the pipeline was captured for training",
                "Give PipelineModule(pipe, evaluation) a pipeline of the model captured in eval mode.",
            )
        return self.evaluation.evaluate(*args, **_counted(self.evaluation, kwargs)).float()


def _counted(pipe: Pipeline, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword inputs with the number of items as the graph takes it: versions of Trainer give ints or floats."""
    like, rest = pipe.inputs.get(NUMBER), {name: value for name, value in kwargs.items() if name != NUMBER}
    if like is None or NUMBER not in kwargs:
        return rest
    return {**rest, NUMBER: torch.as_tensor(kwargs[NUMBER], dtype=like.dtype)}


class _AddGradients(torch.autograd.Function):
    """The loss of a step that has run its backward already; backward hands over the gradients that it made."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        loss: torch.Tensor,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor | None],
        is_half: bool,
    ) -> torch.Tensor:
        ctx.parameters, ctx.gradients, ctx.is_half = parameters, gradients, is_half
        return loss.float()

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[None, None, None, None, None]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise PipelineError("SK802", "the loss was propagated backward twice", "Call the model again.")
        if ctx.is_half and float(scale) > 1:
            raise PipelineError(
                "SK802",
                f"the loss was scaled by {float(scale):g} after the backward of the step, whose float16 gradients may "
                "have been lost by then",
                "Capture in bfloat16, without a GradScaler; or drive the pipeline itself, with a scaler in its loss.",
            )
        with torch.no_grad():
            for parameter, made in zip(ctx.parameters, gradients, strict=True):
                if made is not None:
                    made.mul_(scale)
                    parameter.grad = made if parameter.grad is None else parameter.grad.add_(made)
        return None, None, None, None, None
