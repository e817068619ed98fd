"""Predicts the memory that each part of a split decoder needs for a step: weights, caches and what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from splitkit.checks import is_whole, shown
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.pipeline.decoder_step import step_kernels, step_peak, step_sizes, weights_of
from splitkit.pipeline.placed_prices import costs_of_plan, in_part
from splitkit.plans.parts import PartKey
from splitkit.runtime.generation.encoder_caches import decoder_cache, kept_caches
from splitkit.units import size


@dataclass(frozen=True)
class PartMemory:
    """The memory of a part in a step, in bytes.

    Attributes:
        weights: of its parameters and buffers; a tied weight counts in each part that reads it.
        cache: what its caches hold after the step.
        peak: the most bytes alive at once: weights, caches, and what it receives and computes. All that it receives is
            counted to the end of the step, so that it is rarely less than what is measured (T5: by 0.25 %). Attention
            takes what its kernel takes on the device that the plan's prices are for; without one, on the device of the
            capture, or for a capture on ``meta`` on an A100.
    """

    weights: int
    cache: int
    peak: int

    def __str__(self) -> str:
        return f"{size(self.peak)} at the peak: {size(self.weights)} of weights, {size(self.cache)} of caches"


def decoder_memory(split: Split, *, sequences: int, tokens: int, query: int = 1) -> Mapping[PartKey, PartMemory]:
    """Return the memory of each part of a split decoder in a step.

    Args:
        split: of the graph of `splitkit.capture_decoder`.
        sequences: the number of sequences.
        tokens: positions of each sequence in the caches after the step; an encoder has as many.
        query: tokens of the step: 1 to generate, or the length of a prompt or of a chunk of it.

    Raises:
        PipelineError: SK801 for a split that is no decoder's, SK802 for counts that make no sense.
    """
    for name, value, least in (("sequences", sequences, 1), ("query", query, 1), ("tokens", tokens, query)):
        if not is_whole(value, least):
            raise PipelineError("SK802", f"{name} is {shown(value)}", f"Give a whole number from {least} on.")
    caches = {cache.given for cache in kept_caches(split)}
    sizes = step_sizes(split.flow.root, sequences, tokens, query)
    held = decoder_cache(split, sequences=sequences, tokens=tokens)
    costs, found = costs_of_plan(split.plan, split.flow), dict[PartKey, PartMemory]()
    for key, part in split.parts.items():
        kernels = step_kernels(in_part(costs, key))
        found[key] = PartMemory(weights_of(part), held[key], step_peak(part, caches, sizes, kernels))
    return found
