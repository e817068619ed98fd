"""Predicts the memory that each part of a split decoder needs for a step: weights, caches and what it computes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from splitkit.checks import is_whole, shown
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.graph.symbols import plain_size, symbols_of
from splitkit.memory.profile import simulate_memory
from splitkit.plans.parts import PartKey
from splitkit.runtime.generation.kept_caches import KeptCache, decoder_cache, kept_caches
from splitkit.units import size

_PROMPT = ("input_ids", "position_ids", "inputs_embeds", "decoder_input_ids", "decoder_position_ids")


@dataclass(frozen=True)
class PartMemory:
    """The memory of a part in a step, in bytes.

    Attributes:
        weights: of its parameters and buffers; a tied weight counts in each part that reads it.
        cache: what its caches hold after the step.
        peak: the most bytes alive at once: weights, caches, and what it receives and computes. All that it receives is
            counted to the end of the step, so that it is rarely less than what is measured (T5: by 0.25 %).
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
    caches = {cache.given: cache for cache in kept_caches(split)}
    sizes: dict[str, int] = {}
    for node in split.flow.graph.find_nodes(op="placeholder"):
        sizes |= _sizes(node, caches.get(node.name), sequences, tokens, query)
    held = decoder_cache(split, sequences=sequences, tokens=tokens)
    found = {}
    for key, part in split.parts.items():
        given = [node for node in split.subgraphs[key].inputs if node.name not in caches]
        known = {str(symbol) for node in part.graph.nodes for symbol in symbols_of(node.meta.get("val"))}
        run = simulate_memory(part, keep_inputs=False, sizes={name: n for name, n in sizes.items() if name in known})
        received = sum(_bytes(node, sizes) for node in given)
        weights = {id(tensor): tensor.nbytes for tensor in (*part.parameters(), *part.buffers())}
        found[key] = PartMemory(sum(weights.values()), held[key], run.peak + received)
    return found


def _bytes(node: Node, sizes: Mapping[str, int]) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    return math.prod(plain_size(n, sizes) for n in value.shape) * value.dtype.itemsize


def _sizes(node: Node, cache: KeptCache | None, sequences: int, tokens: int, query: int) -> Mapping[str, int]:
    """Return symbol -> size for the sizes of an input."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return {}
    if cache is not None:
        wanted = cache.sizes(sequences, tokens if cache.constant else tokens - query)
    else:
        wanted = [sequences, query if node.name in _PROMPT else tokens, *map(int, value.shape[2:])]
    sizes = zip(value.shape, wanted, strict=True)
    return {str(symbols_of(given)[0]): n for given, n in sizes if symbols_of(given)}
