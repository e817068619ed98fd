"""Splits a batch into microbatches."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from splitkit._torch import pytree
from splitkit.errors import PipelineError
from splitkit.graph.call_signature import input_binder
from splitkit.runtime.ranks.stage_chain import Chain


class BatchSplitter:
    """Splits the inputs and targets of a step, by the shapes with which the graph was captured."""

    def __init__(
        self, chain: Chain, microbatches: int, device: torch.device, needed: Collection[str] | None = None
    ) -> None:
        self._binder, self._count, self._device = input_binder(chain.split.module), microbatches, device
        self._wanted = chain.facts.inputs
        self._needed = self._wanted.keys() if needed is None else needed

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the inputs of each microbatch, by the names that they have in the graph.

        An input that this rank does not read may be missing, or ``None``.

        Raises:
            PipelineError: SK802 for arguments that the graph does not take, or of another dtype or shape than captured.
        """
        missing = [name for name in [*self._wanted][len(args) :] if name not in kwargs and name not in self._needed]
        try:
            values = self._binder(*args, **kwargs, **dict.fromkeys(missing))
        except Exception as error:
            reason = f"the graph does not take these arguments: {error}"
            raise PipelineError("SK802", reason, "Give the inputs of the model.") from error
        made: list[dict[str, Any]] = [{} for _ in range(self._count)]
        for (name, like), value in zip(self._wanted.items(), values, strict=True):
            for inputs, part in zip(made, self._parts(name, like, value), strict=True):
                inputs[name] = part
        return made

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

    def _parts(self, name: str, like: torch.Tensor | None, value: Any) -> list[Any]:
        if value is None and like is not None and name in self._needed:
            raise PipelineError("SK802", f"{name} is None, and this rank reads it", "See Pipeline.needs.", [name])
        if not isinstance(value, torch.Tensor) or like is None:
            return [value] * self._count
        shape = list(like.shape)
        whole = [shape[0] * self._count, *shape[1:]] if shape else shape
        if value.dtype != like.dtype or list(value.shape) not in (shape, whole):
            dtype, wants = (str(t.dtype).removeprefix("torch.") for t in (value, like))
            raise PipelineError(
                "SK802",
                f"{name} is {dtype}{list(value.shape)}",
                f"Give {wants}{whole}: {self._count} microbatches of {shape}, as captured.",
                [name],
            )
        value = value.to(self._device)
        return list(value.chunk(self._count)) if list(value.shape) == whole and shape else [value] * self._count

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
