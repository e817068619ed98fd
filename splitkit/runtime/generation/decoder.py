"""Runs one stage of a decoder for several requests, whose caches stay with the stage."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.fx import Node

from splitkit.errors import PipelineError, listed
from splitkit.graph.caches import ARGUMENTS
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.devices.accelerators import current
from splitkit.runtime.generation.encoder_caches import EncoderCaches
from splitkit.runtime.generation.generation_request import Request, not_on_ranks
from splitkit.runtime.ranks.border_values import memory_order
from splitkit.runtime.ranks.stage import result_of
from splitkit.runtime.ranks.stage_chain import Chain

MASK = "attention_mask"
EMBEDDED = "inputs_embeds"
"""The input for embeddings in place of tokens."""
_IDS, _STARTED = "input_ids", "decoder_input_ids"
ENCODED = "encoder_outputs_last_hidden_state"
"""The input for the output of an encoder."""


@dataclass(frozen=True)
class DecoderInputs:
    """The names of the inputs of a decoder's step that are no caches.

    Attributes:
        tokens: the tokens of the step, or their embeddings.
        mask: which positions are padding.
        positions: the positions of the tokens.
        has_encoder: whether it reads the output of an encoder, `ENCODED`.
    """

    tokens: str
    mask: str
    positions: str
    has_encoder: bool

    @classmethod
    def among(cls, names: Collection[str]) -> DecoderInputs | None:
        """Return the names for a graph with these inputs; ``None`` if the graph is not a decoder."""
        tokens = next((name for name in (_STARTED, _IDS, EMBEDDED) if name in names), None)
        if tokens is None:
            return None
        before = "decoder_" if tokens == _STARTED else ""
        return cls(tokens, f"{before}{MASK}", f"{before}position_ids", bool(before))

    @property
    def embedded(self) -> bool:
        """Whether the step reads embeddings and no tokens."""
        return self.tokens == EMBEDDED

    def whole_tensors(self, model: Any) -> dict[str, torch.Tensor]:
        """Return name -> parameter or buffer of what runs whole; a tied one has several names."""
        if not self.whole:
            return {}
        every = parameters_and_buffers(model)
        if self.has_encoder:
            own = set(map(id, parameters_and_buffers(model.get_encoder()).values()))
        else:
            stages = [model.get_decoder(), model.get_output_embeddings()]
            of_stages = {id(t) for one in stages if one is not None for t in parameters_and_buffers(one).values()}
            own = set(map(id, every.values())) - of_stages
            own |= set(map(id, parameters_and_buffers(model.get_input_embeddings()).values()))
        return {name: tensor for name, tensor in every.items() if id(tensor) in own}

    @property
    def whole(self) -> bool:
        """Whether the first rank also runs an encoder, or modules in front of a language model, outside the stages."""
        return self.embedded or self.has_encoder


@dataclass(frozen=True)
class DecoderChain:
    """The stages of a decoder, and which inputs and outputs of its graph are caches.

    Attributes:
        chain: the stages.
        inputs: the names of the other inputs.
        logits: the node of the parent that computes the logits, ``[sequences, 1, vocabulary]``.
        caches: name of an input that is a cache -> the node of the parent that computes what it is after the step.
        constant: the caches that a step returns as they are: keys and values of an encoder's output.
    """

    chain: Chain
    inputs: DecoderInputs
    logits: Node
    caches: Mapping[str, Node]
    constant: frozenset[str]

    @classmethod
    def of(cls, chain: Chain) -> DecoderChain:
        """Find the caches of a captured decoder, by the names and the order that `splitkit.capture_decoder` gives.

        Raises:
            PipelineError: SK801 for a graph without caches, with other inputs, or with a cache that several stages
                read.
        """
        graph = chain.split.module.graph
        names = [str(node.target) for node in graph.find_nodes(op="placeholder")]
        known = [name for name in names if chain.facts.inputs[name] is not None]
        held = [name for name in known if name.startswith(ARGUMENTS)]
        outputs, inputs = graph.output_node().all_input_nodes, DecoderInputs.among(known)
        extra = int(inputs is not None and inputs.has_encoder)
        if not held or inputs is None or len(outputs) != 1 + len(held) + extra:
            raise PipelineError(
                "SK801",
                "the split is not that of a decoder with a cache: its inputs are " + listed(names, 6),
                "Capture one step of the decoder: sk.capture_decoder(model).",
            )
        caches = dict(zip(held, outputs[1 : 1 + len(held)], strict=True))
        constant = frozenset(name for name, node in caches.items() if str(node.target) == name)
        made = cls(chain, inputs, outputs[0], caches, constant)
        made._require_known()
        return made

    def _require_known(self) -> None:
        """Refuse shared caches, inputs that ranks cannot make, and values that cannot be sent."""
        inputs, readers = self.inputs, dict[str, int]()
        known = {*self.caches, inputs.tokens, inputs.mask, inputs.positions, *([MASK] if inputs.has_encoder else [])}
        for stage in range(self.chain.stages):
            for node in self.chain.border(stage, (self.logits,)) if stage < self.chain.stages - 1 else ():
                self.chain.value(node).sent(False)
            for name in (str(node.target) for node in self.chain.inputs(stage)):
                if name in self.caches:
                    keeper = self.chain.stage_of.get(self.caches[name], stage)
                    if (other := readers.setdefault(name, keeper)) != stage:
                        self._refuse_border(name, stage, other)
                elif (like := self.chain.facts.inputs.get(name)) is not None and (
                    # masks and positions of ranks are [sequences, positions]
                    name not in known or (name in (inputs.mask, inputs.positions) and like.dim() != 2)
                ):
                    raise not_on_ranks(f"stage {stage} reads the input {name}", name)

    def _refuse_border(self, name: str, stage: int, other: int) -> None:
        does = "reads" if name in self.constant else "writes"
        raise PipelineError(
            "SK801",
            f"stage {stage} reads the cache {name}, and stage {other} {does} it",
            "Put all nodes that read a cache into one stage.",
            [name],
        )

    def constants(self, stage: int) -> tuple[str, ...]:
        """Return the caches that a stage computes once from an encoder's output, in the order of the inputs."""
        read = {str(node.target) for node in self.chain.inputs(stage)}
        return tuple(name for name in self.caches if name in self.constant and name in read)

    def _reads_encoder(self, stage: int) -> bool:
        """Whether a stage needs an encoder's output, or how many positions it has."""
        masked = any(str(node.target) == MASK for node in self.chain.inputs(stage))
        return self.inputs.has_encoder and (masked or bool(self.constants(stage)))

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
        return (*self.chain.border(stage, (self.logits,)), *self.chain.computed(stage + 1, (self.logits,)))

    def passes_tokens(self, stage: int) -> bool:
        """Whether a stage behind this one reads the tokens."""
        later = range(stage + 1, self.stages)
        return any(str(node.target) == self.inputs.tokens for s in later for node in self.chain.inputs(s))

    def sends_encoded(self, stage: int) -> bool:
        """Whether the output of an encoder crosses the border behind a stage with a new request."""
        return any(self._reads_encoder(later) for later in range(stage + 1, self.stages))

    def require_like(self, name: str, value: torch.Tensor | None) -> None:
        """Refuse a value of an input of another dtype than at capture, whose graphs have dtypes of their own.

        Raises:
            PipelineError: SK803.
        """
        like = self.chain.facts.inputs.get(name)
        if value is not None and like is not None and (value.dtype, value.dim()) != (like.dtype, like.dim()):
            raise PipelineError(
                "SK803",
                f"{name} is {value.dtype} of {value.dim()} dimensions, and was captured as {like.dtype} of "
                f"{like.dim()}",
                "Give the model in the dtype in which it was captured.",
                [name],
            )


@dataclass
class Held:
    """What a stage holds of a request.

    Attributes:
        padding: the number of padded positions of each sequence, on the left, ``[sequences]``.
        length: the positions that the caches hold.
        encoded: which positions of an encoder's output are no padding, ``[sequences, positions]``; ``None`` if the
            stage does not read them.
        caches: name of an input -> the cache.
    """

    padding: torch.Tensor
    length: int
    encoded: torch.Tensor | None = None
    caches: dict[str, torch.Tensor] = field(default_factory=dict)


class DecoderStage:
    """One stage of a decoder.

    Args:
        decoder: the stages.
        stage: the number of the stage.
        device: its device.
        encoder: the graph that computes the constant caches of the stage, if it has some.

    Attributes:
        decoder: all stages.
        part: the module of the stage.
        held: number of a request -> what the stage holds of it.
    """

    def __init__(
        self, decoder: DecoderChain, stage: int, device: torch.device, encoder: fx.GraphModule | None = None
    ) -> None:
        chain = decoder.chain
        key = chain.keys[stage]
        self.part = chain.split.parts[key]
        self.held: dict[int, Held] = {}
        self._read = {**chain.own(stage), chain.split.names[key]: self.part}
        self._nodes, self._inputs = chain.nodes(stage), chain.inputs(stage)
        self.decoder, self._stage, self._device = decoder, stage, device
        self._received = decoder.live(stage - 1) if stage else ()
        self._sent = decoder.live(stage) if stage < decoder.stages - 1 else ()
        self._gets_tokens = not stage or decoder.passes_tokens(stage - 1)
        self._passes_tokens = decoder.passes_tokens(stage)
        names = decoder.constants(stage)
        captured = chain.facts.captured
        self._encoder = None if encoder is None else EncoderCaches(encoder, names, captured, device)

    def enter(self, number: int, request: Request, encoded: torch.Tensor | None = None) -> None:
        """Make the caches of a request: empty caches, and the caches of an encoder's output.

        Args:
            number: the number of the request.
            request: the request.
            encoded: the output of an encoder, ``[sequences, positions, hidden]``, where the stage reads it.
        """
        longest = request.longest
        padding = torch.tensor([longest - len(row) for row in request.decoded], device=self._device)
        held = self.held[number] = Held(padding, 0)
        growing = [name for name in self._caches if name not in self.decoder.constant]
        held.caches = {name: self._empty(name, len(padding)) for name in growing}
        if encoded is None:
            return
        held.encoded = _encoded_mask(request, encoded)
        if self._encoder is not None:
            # of the tokens only the number of sequences is read
            tokens = torch.zeros_like(padding)[:, None]
            given = {ENCODED: encoded, MASK: held.encoded, self.decoder.inputs.tokens: tokens}
            held.caches |= self._encoder.compute(given)

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
                ``[sequences, query]``, or their embeddings, ``[sequences, query, hidden]``.

        Returns:
            What crosses the border behind this stage; from the last one the logits of the last position,
            ``[sequences, vocabulary]``.
        """
        held = self.held[number]
        tokens = received[-1] if self._gets_tokens else None
        values: dict[Node, Any] = dict(zip(self._received, received, strict=False))
        for node in self._inputs:
            values[node] = self._input(str(node.target), held, query, tokens)
        with current(self._device):
            for node in self._nodes:
                values[node] = result_of(node, values, self._read, self.part)
        for name in self._caches:
            if name not in self.decoder.constant:
                held.caches[name] = values[self.decoder.caches[name]]
        held.length += query
        if self._stage == self.decoder.stages - 1:
            return (values[self.decoder.logits][:, -1],)
        passed = (tokens,) if self._passes_tokens else ()
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
        return tuple(name for node in self._inputs if (name := str(node.target)) in self.decoder.caches)

    def _input(self, name: str, held: Held, query: int, tokens: torch.Tensor | None) -> Any:
        if name == self.decoder.inputs.tokens:
            return tokens
        if name in held.caches:
            return held.caches[name] if name in self.decoder.constant else held.caches.pop(name)
        if name == MASK and self.decoder.inputs.has_encoder:
            return held.encoded
        end = held.length + query
        if name == self.decoder.inputs.mask:
            return (torch.arange(end, device=self._device) >= held.padding[:, None]).long()
        positions = torch.arange(held.length, end, device=self._device) - held.padding[:, None]
        return positions.clamp(min=0)

    def _empty(self, name: str, sequences: int) -> torch.Tensor:
        """Return a cache without positions: every size that may vary is 0, but for the number of sequences.

        A state of constant size begins with zeros.
        """
        facts = self.decoder.chain.facts
        like, shape = facts.inputs[name], facts.sizes.inputs[name]
        assert like is not None
        sizes = [size if isinstance(size, int) else 0 for size in shape]
        return torch.zeros([sequences, *sizes[1:]], dtype=like.dtype, device=self._device)


def _encoded_mask(request: Request, encoded: torch.Tensor) -> torch.Tensor:
    """Return which positions of an encoder's output are no padding: prompts are padded on the right."""
    places = torch.arange(encoded.shape[1], device=encoded.device)
    lengths = [len(prompt) for prompt in request.prompts] or [encoded.shape[1]] * encoded.shape[0]
    return (places < torch.tensor(lengths, device=encoded.device)[:, None]).long()


# Sends requests from each rank to the next one, and from the last one back to the first.
#
# A message says its own sizes, for those of a request change with every token::
#
#     header    the bytes of the text, and of the payload
#     payload   the text, which is JSON: the fields of the message and, for each value, the number, or the dtype, shape
#               and order of dimensions of the tensor; and the tensors one after another, each from a multiple of 64
#               bytes on
#
# Every message of the first rank but the last is answered, and at most ``window`` of them are unanswered. So a message
# that was sent ``window`` messages ago has been received, and its memory can be given back.


_ALIGNMENT = 64  # bytes
_HEAD = ("request", "query", "last", "note")


@dataclass(frozen=True)
class Message:
    """What crosses a border for one request.

    Attributes:
        request: the number of the request; below 0 for the end of all.
        query: the tokens of each of its sequences that are run.
        last: whether the next token is wanted; from the last rank, whether the request is done.
        note: what else there is to say, as data for JSON; ``None`` for nothing.
        values: tensors and numbers.
        entering: tensors that cross the border once, with a new request; empty for all other messages.
    """

    request: int = -1
    query: int = 0
    last: bool = False
    note: Any = None
    values: tuple[Any, ...] = ()
    entering: tuple[torch.Tensor, ...] = ()


class Ring:
    """The connections of this rank with the one before and the one after it."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, window: int) -> None:
        self._group, self._device, self._window = group, device, window
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._underway: deque[list[tuple[Any, torch.Tensor]]] = deque()
        # a single rank is its own neighbour
        self._own: deque[Message] = deque()

    def send(self, message: Message) -> None:
        """Send a message to the next rank, without waiting for it to be received."""
        if self.size == 1:
            self._own.append(message)
            return
        told, pieces = list[Any](), list[torch.Tensor]()
        for value in (*message.values, *message.entering):
            if isinstance(value, torch.Tensor):
                order = memory_order(value)
                laid = value.permute(order) if order else value
                pieces.append(laid.contiguous().reshape(-1).view(torch.uint8))
                told.append([str(value.dtype).removeprefix("torch."), list(laid.shape), order])
            else:
                told.append(value)
        head = {name: getattr(message, name) for name in _HEAD}
        text = json.dumps([head, told, len(message.entering)]).encode()
        pieces.insert(0, torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device))
        whole, at = torch.empty(sum(map(_aligned, map(len, pieces))), dtype=torch.uint8, device=self._device), 0
        for piece in pieces:
            whole[at : at + len(piece)] = piece
            at += _aligned(len(piece))
        after, header = (self.rank + 1) % self.size, torch.tensor([len(text), len(whole)], device=self._device)
        sent = [(dist.isend(t, group=self._group, group_dst=after), t) for t in (header, whole)]
        self._underway.append(sent)
        if len(self._underway) > self._window:
            self._complete()

    def receive(self) -> Message:
        """Wait for the next message of the rank before."""
        if self.size == 1:
            return self._own.popleft()
        before, header = (self.rank - 1) % self.size, torch.empty(2, dtype=torch.long, device=self._device)
        dist.recv(header, group=self._group, group_src=before)
        length, total = header.tolist()
        payload = torch.empty(total, dtype=torch.uint8, device=self._device)
        dist.recv(payload, group=self._group, group_src=before)
        head, told, entering = json.loads(payload[:length].cpu().numpy().tobytes())
        at, values = _aligned(length), list[Any]()
        for each in told:
            if not isinstance(each, list):
                values.append(each)
                continue
            name, shape, order = each
            dtype = getattr(torch, name)
            count = math.prod(shape) * dtype.itemsize
            value = payload[at : at + count].view(dtype).view(shape)
            at += _aligned(count)
            values.append(value.permute([order.index(i) for i in range(len(order))]) if order else value)
        last = len(values) - entering
        return Message(**head, values=tuple(values[:last]), entering=tuple(values[last:]))

    def finish(self) -> None:
        """Wait until all messages have been received."""
        while self._underway:
            self._complete()

    def _complete(self) -> None:
        for work, _ in self._underway.popleft():
            work.wait()


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
