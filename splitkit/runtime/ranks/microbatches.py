"""Splits a batch into microbatches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from splitkit._torch import pytree
from splitkit.errors import PipelineError
from splitkit.graph.call_signature import input_binder
from splitkit.runtime.ranks.stage_chain import Chain


class BatchSplitter:
    """Splits the inputs and targets of a step, by the shapes with which the graph was captured."""

    def __init__(self, chain: Chain, microbatches: int, device: torch.device) -> None:
        self._binder, self._count, self._device = input_binder(chain.split.module), microbatches, device
        self._wanted = chain.facts.inputs

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the inputs of each microbatch, by the names that they have in the graph.

        Raises:
            PipelineError: SK802 as in `whole`.
        """
        return self.divided(self.whole(args, kwargs))

    def whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of a step on this device, by the names that they have in the graph.

        Raises:
            PipelineError: SK802 for arguments that the graph does not take, or of another dtype or shape than captured.
        """
        try:
            values = self._binder(*args, **kwargs)
        except Exception as error:
            reason = f"the graph does not take these arguments: {error}"
            raise PipelineError("SK802", reason, "Give the inputs of the model.") from error
        pairs = zip(self._wanted.items(), values, strict=True)
        return {name: self._checked(name, like, value) for (name, like), value in pairs}

    def divided(self, whole: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the inputs of each microbatch.

        Args:
            whole: the result of `whole`.
        """
        parts = {name: self._parts(self._wanted[name], value) for name, value in whole.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(self._count)]

    def has(self, name: str) -> bool:
        """Whether the graph has an input of this name."""
        return name in self._wanted

    def targets(self, target: Any) -> list[Any]:
        """Return the target of each microbatch.

        Raises:
            PipelineError: SK802 if the rows of a tensor cannot be shared out evenly.
        """
        leaves, spec = pytree.tree_flatten(target)
        parts = [self._even(leaf) for leaf in leaves]
        return [pytree.tree_unflatten([part[i] for part in parts], spec) for i in range(self._count)]

    def _checked(self, name: str, like: torch.Tensor | None, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or like is None:
            return value
        shape, whole = list(like.shape), self._whole_shape(like)
        if value.dtype != like.dtype or list(value.shape) not in (shape, whole):
            dtype, wants = (str(t.dtype).removeprefix("torch.") for t in (value, like))
            raise PipelineError(
                "SK802",
                f"{name} is {dtype}{list(value.shape)}",
                f"Give {wants}{whole}: {self._count} microbatches of {shape}, as captured.",
                [name],
            )
        return value.to(self._device)

    def _whole_shape(self, like: torch.Tensor) -> list[int]:
        return [like.shape[0] * self._count, *like.shape[1:]] if like.dim() else []

    def _parts(self, like: torch.Tensor | None, value: Any) -> list[Any]:
        if not isinstance(value, torch.Tensor) or like is None:
            return [value] * self._count
        is_whole = like.dim() and list(value.shape) == self._whole_shape(like)
        return list(value.chunk(self._count)) if is_whole else [value] * self._count

    def _even(self, leaf: Any) -> list[Any]:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return [leaf] * self._count
        if leaf.shape[0] % self._count:
            raise PipelineError(
                "SK802",
                f"the target has {leaf.shape[0]} rows for {self._count} microbatches",
                f"Give a multiple of {self._count}.",
            )
        return list(leaf.to(self._device).chunk(self._count))
