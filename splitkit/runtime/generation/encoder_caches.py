"""Computes the keys and values of an encoder's output once a request, each on the device that keeps them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit.checks import is_whole, shown
from splitkit.engine.split import Split
from splitkit.engine.subgraphs import reduce_to
from splitkit.errors import PipelineError, listed
from splitkit.graph.caches import ENCODER_CACHES, cache_forms, caches_of, constant_caches
from splitkit.graph.storages import parameters_and_buffers, symbols_of
from splitkit.pipeline.decoder_step import step_kernels, step_peak, step_sizes, weights_of
from splitkit.pipeline.placed_prices import costs_of_plan, in_part
from splitkit.plans.parts import PARENT, PartKey
from splitkit.runtime.devices.accelerators import current, move_tensors
from splitkit.runtime.devices.device_map import follow_device
from splitkit.units import size as in_bytes


class EncoderCaches:
    """The graph that computes the constant caches of one part of a decoder.

    Args:
        gm: from `encoder_caches_of`; its tensors are moved to the device.
        names: the names of the caches, in the order in which the graph returns them.
        captured: the device types on which the graph was captured.
        device: the device of the part.
    """

    def __init__(
        self, gm: fx.GraphModule, names: Sequence[str], captured: frozenset[str], device: torch.device
    ) -> None:
        follow_device(gm, torch.device(device.type), captured)
        move_tensors(gm, nn.Module(), dict.fromkeys(map(id, parameters_and_buffers(gm).values()), device))
        self._gm, self._names, self._device = gm, tuple(names), device
        self._inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]

    @torch.no_grad()
    def compute(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return name -> constant cache, for the output of an encoder among the inputs of a step."""
        with current(self._device):
            found = self._gm(*(inputs[name].to(self._device) for name in self._inputs))
        return dict(zip(self._names, found, strict=True))


def encoder_caches_of(gm: fx.GraphModule, names: Collection[str]) -> fx.GraphModule:
    """Return the graph that computes some of a decoder's constant caches, in their order; it shares the tensors.

    Args:
        gm: the graph of a step of a decoder with an encoder.
        names: the names of the caches.
    """
    whole: fx.GraphModule = gm.meta[ENCODER_CACHES]
    graph, copied = fx.Graph(), dict[Node, Node]()
    graph.graph_copy(whole.graph, copied)
    outputs: Any = whole.graph.output_node().args[0]
    kept = [copied[node] for name, node in zip(constant_caches(gm), outputs, strict=True) if name in names]
    graph.output(tuple(kept))
    reduce_to(graph, tuple(kept))
    return fx.GraphModule(whole, graph)


# Finds the part that keeps each cache of a split decoder, and what that costs it.


@dataclass(frozen=True)
class KeptCache:
    """A tensor of a cache, such as the keys or the state of a layer, and where it stays.

    Attributes:
        given: the name of the input.
        part: the part that reads and updates it.
        like: the tensor of the example; only its dtype and fixed sizes count.
        constant: whether the step returns it as it is, as the keys of an encoder's output.
    """

    given: str
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
        found.append(KeptCache(cache.given.name, parts[0], value, constant))
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


# Predicts the memory that each part of a split decoder needs for a step: weights, caches and what it computes.


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
        return (
            f"{in_bytes(self.peak)} at the peak: {in_bytes(self.weights)} of weights, {in_bytes(self.cache)} of caches"
        )


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
