"""Runs one stage of a decoder for several requests, whose caches stay with the stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from splitkit.errors import PipelineError, listed
from splitkit.graph.caches import ARGUMENTS
from splitkit.runtime.devices.accelerators import current
from splitkit.runtime.generation.generation_request import Request
from splitkit.runtime.generation.ring import BorderType
from splitkit.runtime.ranks.stage import result_of
from splitkit.runtime.ranks.stage_chain import Chain

TOKENS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
_OF_ONE_PROCESS = ("encoder_outputs", "decoder_input_ids", "inputs_embeds")
"""What a decoder with an encoder or images reads."""


@dataclass(frozen=True)
class DecoderChain:
    """The stages of a decoder, and which inputs and outputs of its graph are caches.

    Attributes:
        chain: the stages.
        logits: the node of the parent that computes the logits, ``[sequences, 1, vocabulary]``.
        caches: name of an input that is a cache -> the node of the parent that computes what it is after the step.
    """

    chain: Chain
    logits: Node
    caches: Mapping[str, Node]

    @classmethod
    def of(cls, chain: Chain) -> DecoderChain:
        """Find the caches of a captured decoder, by the names and the order that `splitkit.capture_decoder` gives.

        Raises:
            PipelineError: SK801 for a graph without caches, with other inputs, or with a cache that several stages
                read.
        """
        graph = chain.split.module.graph
        inputs = [str(node.target) for node in graph.find_nodes(op="placeholder")]
        held = [name for name in inputs if name.startswith(ARGUMENTS) and chain.facts.inputs[name] is not None]
        outputs = graph.output_node().all_input_nodes
        foreign = [name for name in inputs if name.startswith(_OF_ONE_PROCESS) and chain.facts.inputs[name] is not None]
        if held and foreign:
            raise PipelineError(
                "SK801",
                f"the decoder reads {listed(foreign, 3)}, which ranks cannot make from a prompt",
                "Generate in one process, with transformers' generate: sk.generator(model, split, devices).",
                foreign,
            )
        if not held or TOKENS not in inputs or len(outputs) != len(held) + 1:
            raise PipelineError(
                "SK801",
                "the split is not that of a decoder with a cache: its inputs are " + listed(inputs, 6),
                "Capture one step of the decoder: sk.capture_decoder(model).",
            )
        made = cls(chain, outputs[0], dict(zip(held, outputs[1:], strict=True)))
        for stage in range(chain.stages):
            made._require_known(stage)
        return made

    def _require_known(self, stage: int) -> None:
        for node in self.chain.inputs(stage):
            name = str(node.target)
            if name in self.caches and (writes := self.chain.stage_of[self.caches[name]]) != stage:
                raise PipelineError(
                    "SK801",
                    f"stage {stage} reads the cache {name}, and stage {writes} writes it",
                    "Put all nodes that read a cache into one stage.",
                    [name],
                )
            given = self.chain.facts.inputs.get(name)
            if name not in (*self.caches, TOKENS, MASK, POSITIONS) and given is not None:
                raise PipelineError(
                    "SK801",
                    f"stage {stage} reads the input {name}, which ranks cannot make from a prompt",
                    "Generate in one process, with transformers' generate.",
                    [name],
                )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.chain.stages

    @property
    def vocabulary(self) -> int:
        """The number of tokens that the logits are for."""
        return self.chain.value(self.logits).like.shape[-1]

    def live(self, stage: int) -> tuple[Node, ...]:
        """Return the values that cross the border behind a stage: tensors, and numbers that follow from sizes."""
        return (*self._sent(stage), *self.chain.computed(stage + 1, (self.logits,)))

    def _sent(self, stage: int) -> tuple[Node, ...]:
        return self.chain.border(stage, (self.logits,))

    def passes_tokens(self, stage: int) -> bool:
        """Whether a stage behind this one reads the tokens."""
        later = range(stage + 1, self.stages)
        return any(str(node.target) == TOKENS for s in later for node in self.chain.inputs(s))

    def border(self, stage: int) -> tuple[BorderType, ...]:
        """Return the types of what crosses the border behind a stage; behind the last one, the next tokens.

        Raises:
            PipelineError: SK801 for a value that cannot be sent.
        """
        if stage == self.stages - 1:
            return (BorderType(torch.long, 1),)
        values = [self.chain.value(node).sent(False) for node in self._sent(stage)]
        types = [BorderType(v.like.dtype, v.like.dim(), v.order, v.scalar) for v in values]
        # numbers that follow from sizes, which a folder does not describe
        numbers = [BorderType(scalar=int)] * (len(self.live(stage)) - len(types))
        return (*types, *numbers, *([BorderType(torch.long, 2)] if self.passes_tokens(stage) else []))


@dataclass
class Held:
    """What a stage holds of a request.

    Attributes:
        padding: the number of padded positions of each sequence, on the left, ``[sequences]``.
        length: the positions that the caches hold.
        caches: name of an input -> the cache.
    """

    padding: torch.Tensor
    length: int
    caches: dict[str, torch.Tensor] = field(default_factory=dict)


class DecoderStage:
    """One stage of a decoder.

    Attributes:
        held: number of a request -> what the stage holds of it.
    """

    def __init__(self, decoder: DecoderChain, stage: int, device: torch.device) -> None:
        chain = decoder.chain
        key = chain.keys[stage]
        self.part = chain.split.parts[key]
        self.held: dict[int, Held] = {}
        self._read = {**chain.own(stage), chain.split.names[key]: self.part}
        self._nodes, self._inputs = chain.nodes(stage), chain.inputs(stage)
        self._decoder, self._stage, self._device = decoder, stage, device
        self._received = decoder.live(stage - 1) if stage else ()
        self._sent = decoder.live(stage) if stage < decoder.stages - 1 else ()

    def enter(self, number: int, request: Request) -> None:
        """Make the empty caches of a request."""
        longest = request.longest
        padding = torch.tensor([longest - len(prompt) for prompt in request.prompts], device=self._device)
        caches = {name: self._empty(name, len(padding)) for name in self._caches}
        self.held[number] = Held(padding, 0, caches)

    def leave(self, number: int) -> None:
        """Free the caches of a request."""
        del self.held[number]

    @torch.no_grad()
    def run(self, number: int, query: int, received: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run the next tokens of a request.

        Args:
            number: the request.
            query: the number of tokens of each sequence.
            received: what crosses the border before this stage; for the first stage the tokens,
                ``[sequences, query]``.

        Returns:
            What crosses the border behind this stage; from the last one the logits of the last position,
            ``[sequences, vocabulary]``.
        """
        held = self.held[number]
        tokens = received[-1] if not self._stage or self._decoder.passes_tokens(self._stage - 1) else None
        values: dict[Node, Any] = dict(zip(self._received, received, strict=False))
        for node in self._inputs:
            values[node] = self._input(str(node.target), held, query, tokens)
        with current(self._device):
            for node in self._nodes:
                values[node] = result_of(node, values, self._read, self.part)
        for name in self._caches:
            held.caches[name] = values[self._decoder.caches[name]]
        held.length += query
        if self._stage == self._decoder.stages - 1:
            return (values[self._decoder.logits][:, -1],)
        passed = (tokens,) if self._decoder.passes_tokens(self._stage) else ()
        return (*(values[node] for node in self._sent), *passed)

    def weight_bytes(self) -> int:
        """Return the bytes of the parameters of the stage, each counted once."""
        own = {*self.part.parameters(), *(value for value in self._read.values() if isinstance(value, nn.Parameter))}
        return sum(parameter.nbytes for parameter in own)

    def cache_bytes(self) -> int:
        """Return the bytes of all caches that the stage holds."""
        return sum(cache.nbytes for held in self.held.values() for cache in held.caches.values())

    @cached_property
    def _caches(self) -> tuple[str, ...]:
        return tuple(name for node in self._inputs if (name := str(node.target)) in self._decoder.caches)

    def _input(self, name: str, held: Held, query: int, tokens: torch.Tensor | None) -> Any:
        if name == TOKENS:
            return tokens
        if name in held.caches:
            return held.caches.pop(name)
        end = held.length + query
        if name == MASK:
            return (torch.arange(end, device=self._device) >= held.padding[:, None]).long()
        positions = torch.arange(held.length, end, device=self._device) - held.padding[:, None]
        return positions.clamp(min=0)

    def _empty(self, name: str, sequences: int) -> torch.Tensor:
        """Return a cache without positions: every size that may vary is 0, but for the number of sequences.

        A state of constant size begins with zeros.
        """
        facts = self._decoder.chain.facts
        like, shape = facts.inputs[name], facts.sizes.inputs[name]
        assert like is not None
        sizes = [size if isinstance(size, int) else 0 for size in shape]
        return torch.zeros([sequences, *sizes[1:]], dtype=like.dtype, device=self._device)
