"""Finds the part that keeps each cache of a split decoder, and what that costs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from splitkit.checks import is_whole, shown
from splitkit.engine.split import Split
from splitkit.errors import PipelineError, listed
from splitkit.graph.caches import cache_forms, caches_of
from splitkit.graph.symbols import symbols_of
from splitkit.plans.parts import PARENT, PartKey


@dataclass(frozen=True)
class KeptCache:
    """A tensor of a cache, such as the keys or the state of a layer, and where it stays.

    Attributes:
        given: the name of the input.
        updated: the name of the node that computes what the tensor is after a step.
        part: the part that reads and updates it.
        like: the tensor of the example; only its dtype and fixed sizes count.
        constant: whether the step returns it as it is, as the keys of an encoder's output.
    """

    given: str
    updated: str
    part: PartKey
    like: torch.Tensor
    constant: bool

    @property
    def grows(self) -> bool:
        """Whether it holds something for each position, as keys and values do, and a state does not."""
        return any(map(symbols_of, self.like.shape[1:]))

    def sizes(self, sequences: int, positions: int) -> list[int]:
        """Return the sizes of the tensor: its first dimension is the sequences, others that vary are the positions."""
        rest = [positions if symbols_of(size) else int(size) for size in self.like.shape[1:]]
        return [sequences, *rest]


def kept_caches(split: Split) -> tuple[KeptCache, ...]:
    """Return the caches of a split decoder, in the order of the inputs.

    Raises:
        PipelineError: SK801 for a graph without caches, or for a cache that several parts read.
    """
    found, graph = [], split.flow.graph
    for cache in caches_of(split.flow.root):
        parts = list(dict.fromkeys(key for node in cache_forms(graph, cache)[1] for key in split.plan.places[node]))
        if len(parts) != 1 or parts[0] is PARENT:
            raise PipelineError(
                "SK801",
                f"the cache {cache.given.name} would cross a border: it is read in parts {listed(parts, 4)}",
                "Plan with policies.Stages, which keeps each cache in one part.",
                [*cache],
            )
        value, constant = cache.given.meta["val"], cache.given is cache.updated
        found.append(KeptCache(cache.given.name, cache.updated.name, parts[0], value, constant))
    if not found:
        raise PipelineError(
            "SK801",
            "the split is not that of a decoder: its graph takes no cache that it returns",
            "Capture one step of the decoder: sk.capture_decoder(model).",
        )
    return tuple(found)


def decoder_cache(split: Split, *, sequences: int, tokens: int) -> Mapping[PartKey, int]:
    """Return the bytes of cache that each part of a split decoder keeps for so many sequences of so many tokens.

    During a step a part needs, beside them, the memory of one more tensor of its cache: a longer one is made, and then
    the old one is freed.

    Raises:
        PipelineError: SK801 for a split that is no decoder's, SK802 for counts that make no sense.
    """
    for name, value in (("sequences", sequences), ("tokens", tokens)):
        if not is_whole(value):
            raise PipelineError("SK802", f"{name} is {shown(value)}", "Give a whole number.")
    held = dict.fromkeys(split.parts, 0)
    for cache in kept_caches(split):
        held[cache.part] += math.prod(cache.sizes(sequences, tokens)) * cache.like.dtype.itemsize
    return held
