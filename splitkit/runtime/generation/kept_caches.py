"""Finds the part that keeps each cache of a split decoder, and what that costs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from splitkit.checks import is_whole, shown
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.graph.caches import caches_of
from splitkit.graph.symbols import symbols_of
from splitkit.plans.parts import PartKey


@dataclass(frozen=True)
class KeptCache:
    """A tensor of a cache, such as the keys of a layer, and where it stays.

    Attributes:
        given: the name of the input.
        updated: the name of the node that computes what the tensor is after a step.
        part: the part that reads and updates it.
        like: the tensor of the example; only its dtype and fixed sizes count.
    """

    given: str
    updated: str
    part: PartKey
    like: torch.Tensor

    def sizes(self, sequences: int, positions: int) -> list[int]:
        """Return the sizes of the tensor; those that may vary but for the first are its positions."""
        rest = [positions if symbols_of(size) else int(size) for size in self.like.shape[1:]]
        return [sequences, *rest]


def kept_caches(split: Split) -> tuple[KeptCache, ...]:
    """Return the caches of a split decoder, in the order of the inputs.

    Raises:
        PipelineError: SK801 for a graph without caches, or for a cache that several parts read or the parent updates.
    """
    found = []
    for given, updated in caches_of(split.flow.root):
        readers = [key for key, sub in split.subgraphs.items() if given in sub.inputs]
        home = [key for key in readers if updated in split.subgraphs[key].outputs]
        if len(readers) != 1 or not home:
            raise PipelineError(
                "SK801",
                f"the cache {given.name} would cross a border: parts {', '.join(map(repr, readers))} read it, and "
                f"{updated.name} updates it",
                "Plan with policies.Stages, which keeps each cache in one part.",
                [given, updated],
            )
        found.append(KeptCache(given.name, updated.name, home[0], given.meta["val"]))
    if not found:
        raise PipelineError(
            "SK801",
            "the split is not that of a decoder: its graph takes no cache that it returns",
            "Capture one step of the decoder: sk.capture_decoder(model).",
        )
    return tuple(found)


def cache_bytes(split: Split, *, sequences: int, tokens: int) -> Mapping[PartKey, int]:
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
