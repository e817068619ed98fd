"""Refuses changes to stages that would not do what they do to a model, because the capture has fixed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from splitkit import _torch
from splitkit.errors import PipelineError


def autocasts_of(parts: Sequence[fx.GraphModule]) -> frozenset[tuple[str, torch.dtype]]:
    """Return the types of devices and the dtypes of the autocasts that graphs enter."""
    regions = [node for part in parts for node in part.graph.nodes if node.target is _torch.ENTER_AUTOCAST]
    entered: Any = (node.args[:2] for node in regions if node.args[2:3] != (False,))
    return frozenset(entered)


def require_gradients() -> None:
    """Refuse a step where gradients are off.

    Raises:
        PipelineError: SK802.
    """
    if not torch.is_grad_enabled():
        raise PipelineError(
            "SK802",
            "gradients are off, and a step runs backward",
            "Call step outside torch.no_grad() and torch.inference_mode(); forward alone is Pipeline.infer.",
        )


class FixedAtCapture:
    """The modes of the parts of a rank, and which of its parameters train, when the pipeline was made."""

    def __init__(self, parts: Sequence[fx.GraphModule], parameters: Mapping[str, nn.Parameter]) -> None:
        # Modules that a graph calls, as after symbolic_trace, follow their own mode.
        self._modes = [(part, part.training) for part in parts if not part.graph.find_nodes(op="call_module")]
        self._flags = {name: parameter.requires_grad for name, parameter in parameters.items()}

        self._autocasts = autocasts_of(parts)

    def require_autocast(self, device: torch.device) -> None:
        """Refuse an autocast around a call, unless it was around the capture too.

        Inside it, stages would compute other dtypes than those that the graph says cross the borders.

        Raises:
            PipelineError: SK802.
        """
        if not torch.is_autocast_enabled(device.type):
            return
        dtype = torch.get_autocast_dtype(device.type)
        if (device.type, dtype) not in self._autocasts:
            name = str(dtype).removeprefix("torch.")
            raise PipelineError(
                "SK802",
                f"autocast to {name} is active around the call, but was not active around the capture",
                f"Call capture inside torch.autocast(..., {dtype}); the call needs no autocast then.",
            )

    def require_modes(self) -> None:
        """Refuse parts whose mode has changed.

        Raises:
            PipelineError: SK802.
        """
        for part, mode in self._modes:
            if part.training != mode:
                called = "train" if part.training else "eval"
                raise PipelineError(
                    "SK802",
                    f"{called}() was called on a part, which has no effect: dropout and BatchNorm stay as captured",
                    "Capture the model in the other mode, and run that with the same weights: "
                    f"pipe.evaluation(sk.capture(model.{called}(), **inputs_of_one_microbatch)). Undo it with "
                    f"{'eval' if part.training else 'train'}().",
                )

    def require_flags(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Refuse parameters whose ``requires_grad`` has changed: it decides which gradients cross borders.

        Raises:
            PipelineError: SK802.
        """
        for name, parameter in parameters.items():
            if parameter.requires_grad != self._flags[name]:
                raise PipelineError(
                    "SK802",
                    f"requires_grad of {name} is {parameter.requires_grad}, and was {self._flags[name]} when the "
                    "pipeline was made: the other ranks do not know that",
                    "Tell all ranks: pipe.train_only(lambda name: ...).",
                    [name],
                )
