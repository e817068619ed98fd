"""Answers requests on the ranks of a process group, with several requests underway at once.

::

    rank 0  ──hidden states of request 3──▶  rank 1  ──hidden states of request 2──▶  rank 2
       ▲                                                                                │
       └───────────────────────── next tokens of request 1 ─────────────────────────────┘

A stage works on one request while the next stage works on another, so there are as many requests underway as stages, or
more. Each stage keeps the caches of its layers for every request; they are never sent. The first rank decides which
request runs when. The last one chooses the tokens.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn

from splitkit.checks import is_whole, shown
from splitkit.engine.split import Split
from splitkit.errors import PipelineError, SplitError, listed
from splitkit.graph.caches import ENCODER_CACHES
from splitkit.graph.storages import parameters_and_buffers
from splitkit.runtime.devices.accelerators import move_tensors, replace_tensors, tables_of
from splitkit.runtime.folder.load import StageFolder
from splitkit.runtime.folder.load_weights import empty_like
from splitkit.runtime.generation.before_stages import (
    BeforeStages,
    BehindEmbeddings,
    BehindEncoder,
    ModelTokens,
    Sampler,
    processors,
    require_data,
)
from splitkit.runtime.generation.decoder import (
    ENCODED,
    DecoderChain,
    DecoderInputs,
    DecoderStage,
    Message,
    Ring,
)
from splitkit.runtime.generation.encoder_caches import encoder_caches_of
from splitkit.runtime.generation.generation_request import Request, RequestLimits, RequestResult
from splitkit.runtime.generation.prompt_pieces import piece
from splitkit.runtime.ranks.faults import RankProgress, naming_failures, time_limit
from splitkit.runtime.ranks.rank_agreement import from_first, require_process_group, require_same
from splitkit.runtime.ranks.rank_device import device_of_rank, place_stages
from splitkit.runtime.ranks.stage_chain import chain_of
from splitkit.runtime.ranks.stage_weights import require_same_model
from splitkit.short_repr import brief


def serve(
    split: Split | StageFolder,
    *,
    model: Any = None,
    eos_token_id: int | Collection[int] | None = None,
    pad_token_id: int | None = None,
    positions: int | None = None,
    in_flight: int | None = None,
    cache_tokens: int | None = None,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> Generator:
    """Make a generator of a split decoder, with one stage on each rank of a process group.

    Every rank calls it with the same split and arguments, and then calls `Generator.generate`::

        split = sk.split(sk.capture_decoder(model), sk.policies.Stages(2))
        generator = sk.serve(split, eos_token_id=2)
        results = generator.generate([{"input_ids": [5, 6, 7], "max_new_tokens": 20}])

    Args:
        split: one step of a decoder with its caches as inputs and outputs, in the order of the stages; or stages on
            disk (`splitkit.runtime.open_stages`); each rank loads its own stage.
        model: the model that was captured, on rank 0; other ranks may give ``None``. It is needed if it has an encoder
            or reads images: modules outside the stages run whole on rank 0, and need their weights. With stages on disk
            it may be on ``meta``: its weights are read from the same place as the stages' weights. The tokens and
            positions below come from its configuration, if they are not given.
        eos_token_id: the tokens that end a sequence, unless a request names others.
        pad_token_id: the token with which shorter prompts of a request are filled up; by default one that ends.
        positions: the most tokens of a sequence, ``max_position_embeddings`` of the model; ``None`` for no limit.
        in_flight: the most requests underway; by default twice as many as stages.
        cache_tokens: the most tokens that the caches of all requests underway may come to hold, with the positions of
            an encoder, which bounds their memory on every rank: a request waits until there is room. ``None`` for no
            limit.
        chunk: the most tokens of a prompt that run at once, so that a long prompt does not hold up the others; ``None``
            for the whole prompt. Later pieces of a prompt are shorter, so that each takes about as long as the first.
        group: the ranks; by default the whole default process group.
        device: the device of this rank; by default as for `splitkit.runtime.pipeline`.

    Raises:
        PipelineError: SK801 for a split that is no decoder, or has not one stage for each rank, or without a model that
            is needed; SK802 for arguments that make no sense; SK804 without a process group, or if the ranks do not run
            the same, or the model has other weights; SK807 for weights on ``meta``.
        FileError: as `StageFolder.load`.
    """
    require_process_group()
    for name, value in {
        "positions": positions,
        "in_flight": in_flight,
        "cache_tokens": cache_tokens,
        "chunk": chunk,
    }.items():
        if value is not None and not is_whole(value, 1):
            raise PipelineError("SK802", f"{name} is {shown(value)}", "Give a whole number of at least 1.")
    chain = chain_of(split) if isinstance(split, Split) else split.chain
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    given = ModelTokens().or_given(eos_token_id, pad_token_id, positions)
    require_same(chain, {"tokens": given, "in_flight": in_flight, "chunk": chunk}, group)
    if chain.stages != ranks:
        raise PipelineError(
            "SK801",
            f"there are {chain.stages} stages and {ranks} ranks",
            f"Generation runs one stage on each rank: split into {ranks}, or start {chain.stages} processes.",
        )
    placed = device_of_rank(device, group)
    if isinstance(split, StageFolder):
        split.load([rank], placed)
    decoder = DecoderChain.of(chain)
    place_stages(chain, [rank], placed)
    encoder = _encoder_caches(split, decoder, rank)
    require_same_model(chain, [rank], group, _constant_tensors(split, encoder, rank))
    before: list[BeforeStages] = []

    def prepared() -> ModelTokens:
        known = ModelTokens() if model is None else ModelTokens.of(model)
        known = known.or_given(eos_token_id, pad_token_id, positions)
        before.append(before_stages(model, split, decoder.inputs, known, placed))
        return known

    tokens = from_first(prepared, group)
    limits = RequestLimits(decoder.vocabulary, tokens.positions, cache_tokens)
    stage = DecoderStage(decoder, rank, placed, encoder)
    return Generator(stage, limits, tokens, in_flight or 2 * ranks, chunk, group, placed, *before)


def _encoder_caches(split: Split | StageFolder, decoder: DecoderChain, stage: int) -> fx.GraphModule | None:
    """Return the graph that computes the constant caches of a stage, if it has some."""
    if isinstance(split, StageFolder):
        return split.encoder_caches.get(stage)
    names = decoder.constants(stage)
    return encoder_caches_of(split.flow.root, names) if names else None


def _constant_tensors(
    split: Split | StageFolder, encoder: fx.GraphModule | None, rank: int
) -> Mapping[str, torch.Tensor]:
    """Return the weights that compute this rank's constant caches; on rank 0 all ranks' weights, if it has them."""
    held = encoder
    if rank == 0 and isinstance(split, Split):
        held = split.flow.root.meta.get(ENCODER_CACHES)
    return {} if held is None else parameters_and_buffers(held)


@dataclass
class Underway:
    """A request that has entered, on the first rank.

    Attributes:
        request: the request.
        tokens: the tokens to run next, ``[sequences, query]``, or their embeddings; for a prompt, the rest of
            the prompt.
        encoded: the output of an encoder, until it is sent.
        found: the tokens that each sequence got; empty until the first stage has begun.
    """

    request: Request
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    encoded: torch.Tensor | None = None
    found: list[list[int]] = field(default_factory=list)


class Generator:
    """See `serve`.

    Attributes:
        stage: the stage of this rank; ``stage.cache_bytes()`` are the bytes of the caches that it holds.
        limits: what a request may ask for.
        in_flight: the most requests underway.
        rank: the rank of this process in the group.
        device: the device of this rank.
    """

    def __init__(
        self,
        stage: DecoderStage,
        limits: RequestLimits,
        tokens: ModelTokens,
        in_flight: int,
        chunk: int | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
        before: BeforeStages | None = None,
    ) -> None:
        decoder = stage.decoder
        self.rank, self.device, self.limits, self.in_flight = dist.get_rank(group), device, limits, in_flight
        self.stage, self._before = stage, before or BeforeStages(tokens, device)
        self._tokens, self._chunk, self._stages = tokens, chunk, decoder.stages
        self._costly = decoder.chain.facts.costly
        self._ring, self._sends_encoded = Ring(group, device, in_flight), decoder.sends_encoded(self.rank)
        self._progress = ServingProgress(
            rank=self.rank, ranks=dist.get_process_group_ranks(group), device=device, limit=time_limit(group)
        )
        self._samplers: dict[int, Sampler | Exception] = {}

    __repr__ = brief

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.rank == self._stages - 1

    def generate(self, requests: Iterable[Any] = ()) -> list[RequestResult]:
        """Answer requests. All ranks must call it; the requests of rank 0 count.

        A request enters when one of the places is free and its caches fit, and leaves when its last sequence ends. One
        that cannot be answered fails alone: its result has the error, and the others go on.

        Args:
            requests: each a `Request`, or what `Request.from_data` takes; read one after another as places are free.

        Returns:
            On rank 0 the result of each request, in their order; elsewhere nothing.

        Raises:
            PipelineError: SK805 if this rank or another one failed.
        """
        return sorted(self.results(requests), key=lambda result: result.number)

    def results(self, requests: Iterable[Any] = ()) -> Iterator[RequestResult]:
        """Answer requests as `generate` does, and yield each result as soon as it is there.

        All ranks must take all results, of which there are none but on rank 0.
        """
        with naming_failures(self._progress):
            if self.rank:
                self._follow()
            else:
                yield from self._lead(requests)
            self._ring.finish()

    def _lead(self, requests: Iterable[Any]) -> Iterator[RequestResult]:
        """Let requests enter, run the first stage, and take the tokens of the last one."""
        line = _Line(self.limits, self.in_flight, requests, self._before, self._tokens)
        ready, left, unanswered = deque[int](), list[int](), 0
        while True:
            refused, entered = line.admit()
            yield from refused
            ready += entered
            if not line.underway:
                break
            while ready and unanswered < self.in_flight:
                number = ready.popleft()
                if error := self._unready(number, line.underway[number]):
                    yield line.leave(number, error)
                    continue
                if self._start(number, line.underway[number], left):
                    ready.append(number)
                left, unanswered = [], unanswered + 1
            if not unanswered:
                # all ready requests have failed
                continue
            number, done, error = self._answer(line.underway)
            unanswered -= 1
            if done is None:
                continue
            if not done:
                ready.append(number)
                continue
            left.append(number)
            self.stage.leave(number)
            yield line.leave(number, error)
        self._ring.send(Message(note=_note(left)))
        if self._stages == 1:
            self._know(self._ring.receive().request, None, left)

    def _unready(self, number: int, entry: Underway) -> SplitError | None:
        """Run the modules before the stages on a new request; return the error, if it fails."""
        if entry.found:
            return None
        self._progress.request, self._progress.running = number, True
        try:
            tokens, encoded = self._before.first(entry.request)
            self.stage.decoder.require_like(ENCODED, encoded)
            self.stage.decoder.require_like(self.stage.decoder.inputs.tokens, tokens)
        except SplitError as error:
            return error
        except Exception as error:
            names = listed([*entry.request.inputs], 3) or "the prompt"
            reason = f"the model cannot read {names}: {type(error).__name__}: {error}"
            return PipelineError("SK802", reason, "Give what the model's processor makes.")
        finally:
            self._progress.running = False
        entry.tokens, entry.encoded = tokens, encoded
        return None

    def _start(self, number: int, entry: Underway, left: list[int]) -> bool:
        """Run the first stage on the next tokens of a request; return whether more of the prompt is to follow."""
        request, encoded, entry.encoded = None if entry.found else entry.request, entry.encoded, None
        if request is not None:
            self.stage.enter(number, request, encoded)
            entry.found = [[] for _ in request.decoded]
        rest, query = entry.tokens, entry.tokens.shape[1]
        if self._chunk is not None:
            query = min(query, piece(self._chunk, self.stage.held[number].length, self._costly))
        now, entry.tokens = rest[:, :query], rest[:, query:]
        more = bool(entry.tokens.shape[1])
        self._know(number, request, left)
        entering = () if encoded is None else (encoded,)
        self._pass_on(Message(number, query, not more, _note(left, request), (now,), entering))
        return more

    def _pass_on(self, message: Message) -> None:
        """Run this rank's stage on what a message brings, and send on what comes out; from the last one, tokens."""
        self._progress.request, self._progress.running = message.request, True
        made = self.stage.run(message.request, message.query, message.values)
        self._progress.running = False
        if self.is_last:
            self._ring.send(self._chosen(message.request, made[0], message.last))
        else:
            self._ring.send(replace(message, values=made, entering=message.entering if self._sends_encoded else ()))

    def _answer(self, underway: dict[int, Underway]) -> tuple[int, bool | None, SplitError | None]:
        """Take the next answer; return the request, whether it is done, ``None`` within a prompt, and its error."""
        answer = self._ring.receive()
        entry, (tokens,) = underway[answer.request], answer.values
        if answer.note:
            return answer.request, True, PipelineError(**answer.note)
        if not len(tokens):
            return answer.request, None, None
        ends = self._tokens.ends_of(entry.request)
        for row, token in zip(entry.found, tokens.tolist(), strict=True):
            if not row or row[-1] not in ends:
                row.append(token)
        if not answer.last:
            entry.tokens = self._before.next(tokens)
        return answer.request, answer.last, None

    def _follow(self) -> None:
        """Run this rank's stage on what the rank before sends, and send on what comes out, until the end."""
        while True:
            message = self._ring.receive()
            known = message.note or {"left": [], "request": None}
            request = known["request"] and Request.from_data(json.loads(known["request"]))
            for number in known["left"]:
                self.stage.leave(number)
            self._know(message.request, request, known["left"])
            if request is not None:
                self.stage.enter(message.request, request, *message.entering)
            if message.request < 0:
                if not self.is_last:
                    self._ring.send(message)
                return
            self._pass_on(message)

    def _know(self, number: int, request: Request | None, left: Iterable[int]) -> None:
        """On the last rank, drop the samplers of requests that have left, and make the sampler of a new request."""
        if not self.is_last:
            return
        for gone in left:
            self._samplers.pop(gone, None)
        if request is None:
            return
        try:
            self._samplers[number] = Sampler(request, self._tokens, self.device)
        except Exception as error:
            self._samplers[number] = error

    def _chosen(self, number: int, logits: torch.Tensor, wanted: bool) -> Message:
        """Return the answer to the first rank: the next tokens, or none within a prompt, or why there are none."""
        nothing = torch.empty(0, dtype=torch.long, device=self.device)
        if not wanted:
            return Message(number, values=(nothing,))
        sampler = self._samplers[number]
        try:
            if isinstance(sampler, Exception):
                raise sampler
            tokens = sampler.next(logits)
        except Exception as error:
            # it fails alone: the state of no other request has changed
            known = error if isinstance(error, SplitError) else None
            reason = f"choosing a token failed: {type(error).__name__}: {error}"
            told = {
                "code": known.code if known else "SK805",
                "reason": known.reason if known else reason,
                "remedy": known.remedy if known else "Ask for other settings.",
            }
            return Message(number, last=True, note=told, values=(nothing,))
        return Message(number, last=sampler.done, values=(tokens,))


class _Line:
    """The requests that wait, and those that are underway, on the first rank."""

    def __init__(
        self,
        limits: RequestLimits,
        places: int,
        requests: Iterable[Any],
        before: BeforeStages,
        tokens: ModelTokens,
    ) -> None:
        self._limits, self._places, self._before, self._tokens = limits, places, before, tokens
        self._coming = enumerate(requests)
        self._next: tuple[int, Request] | None = None
        self._held = 0
        self.underway: dict[int, Underway] = {}

    def admit(self) -> tuple[list[RequestResult], list[int]]:
        """Let requests enter while there is room; return the results of refused requests, and who entered."""
        refused, entered = list[RequestResult](), list[int]()
        while len(self.underway) < self._places:
            if self._next is None:
                number, given = next(self._coming, (-1, None))
                if number < 0:
                    break
                try:
                    self._next = number, self._checked(given)
                except Exception as error:
                    # whatever a request holds, it fails alone
                    if not isinstance(error, SplitError):
                        reason = f"the request cannot be read: {type(error).__name__}: {error}"
                        remedy = 'Give a dict such as {"input_ids": [5, 6, 7], "max_new_tokens": 20}.'
                        error = PipelineError("SK802", reason, remedy)
                    refused.append(RequestResult(number, error=error))
                    continue
            room, wants = self._limits.cache_tokens, self._wants(self._next[1])
            if room is not None and self._held + wants > room:
                break
            self._held += wants
            entered.append(self._next[0])
            self.underway[self._next[0]] = Underway(self._next[1])
            self._next = None
        return refused, entered

    def _checked(self, given: Any) -> Request:
        request = given if isinstance(given, Request) else Request.from_data(given)
        request = self._before.checked(request)
        self._limits.require(request, self._before.encoded_positions(request))
        processors(request, self._tokens)
        return request

    def _wants(self, request: Request) -> int:
        """Return the tokens that the caches of a request may come to hold."""
        return request.cache_tokens + len(request.decoded) * self._before.encoded_positions(request)

    def leave(self, number: int, error: SplitError | None) -> RequestResult:
        """Free the place of a request, and return its result."""
        entry = self.underway.pop(number)
        self._held -= self._wants(entry.request)
        return RequestResult(number, tuple(map(tuple, entry.found)), error)


def _note(left: list[int], request: Request | None = None) -> dict[str, Any] | None:
    if not left and request is None:
        return None
    return {"left": left, "request": request and request.to_json()}


# Says what a rank that generates is doing, for the messages about ranks that fail.


@dataclass
class ServingProgress(RankProgress):
    """What a rank that generates is doing; it runs the stage of the same number.

    Attributes:
        request: the request that it runs, or ran last; ``None`` before the first.
        running: whether it runs a request, and does not wait for one.
    """

    request: int | None = None
    running: bool = False

    def begin(self) -> None:
        """Forget what was done before."""
        self.request, self.running = None, False

    def state(self) -> object:
        """Return the request that it runs or ran last, and whether it runs."""
        return self.request, self.running

    def where(self) -> str:
        """Say what is or was done last."""
        return "generation" if self.request is None else f"request {self.request}, in stage {self.rank}"

    def waits(self) -> str:
        """Say what this rank waits for."""
        before = (self.rank - 1) % len(self.ranks)
        last = "" if self.request is None else f", after request {self.request}"
        if self.running:
            return f"ran {self.where()}"
        what = "a request from" if self.rank else "the next token from"
        return f"waited for {what} stage {before} (rank {before}){last}"

    def waited_for(self) -> int | None:
        """Return the rank that this one waits for."""
        return None if self.running or len(self.ranks) == 1 else (self.rank - 1) % len(self.ranks)


# Finds what of a model is in no stage and runs whole on the first rank, and puts its weights there.


def before_stages(
    model: Any, split: Split | StageFolder, inputs: DecoderInputs, tokens: ModelTokens, device: torch.device
) -> BeforeStages:
    """Return what prepares the inputs of the first stage, on the device of the first rank.

    Args:
        model: the model that was captured, if it has an encoder or reads images. With a folder of stages, its weights
            are read from the same place as the stages' weights.
        split: the stages.
        inputs: the inputs of a step.
        tokens: the tokens of the model.
        device: the device.

    Raises:
        PipelineError: SK801 without a model that is needed, or if it was not captured; SK802 in training mode; SK804
            with other weights; SK807 for weights on ``meta``.
        FileError: SK507 if the folder has no such weights.
    """
    if not inputs.whole:
        return BeforeStages(tokens, device)
    what = "an encoder's output" if inputs.has_encoder else "embeddings with images among them"
    if model is None:
        raise PipelineError(
            "SK801",
            f"the decoder reads {what}, computed by what is in no stage, and the first rank has no model",
            "Give the model that was captured: sk.serve(split, model=model).",
        )
    if not hasattr(model, "get_encoder") or inputs.has_encoder != bool(model.config.is_encoder_decoder):
        raise PipelineError(
            "SK801",
            f"{type(model).__name__} is not the model that was captured: the decoder reads {what}",
            "Give that model.",
        )
    if model.training:
        raise PipelineError(
            "SK802", "the model is in training mode, where dropout changes tokens", "Call model.eval()."
        )
    held = inputs.whole_tensors(model)
    held = _read_from(split, model, held) if isinstance(split, StageFolder) else held
    remedy = "Give the first rank a model with its weights, for example by from_pretrained."
    require_data(held, "what is in no stage runs whole on the first rank", remedy)
    if isinstance(split, Split):
        _require_captured(held, parameters_and_buffers(split.flow.root))
    move_tensors(model, nn.Module(), dict.fromkeys(map(id, held.values()), device))
    kind = BehindEncoder if inputs.has_encoder else BehindEmbeddings
    return kind(model, tokens, device)


def _read_from(folder: StageFolder, model: nn.Module, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Let a model hold the weights that a folder of stages, or the checkpoint it was opened with, has."""
    saved, groups = set(model.state_dict()), dict[int, tuple[torch.Tensor, list[str]]]()
    for name, tensor in held.items():
        if name in saved:
            groups.setdefault(id(tensor), (tensor, []))[1].append(name)
    new = {key: empty_like(old, torch.device("cpu")) for key, (old, _) in groups.items()}
    folder.read([(names, new[key]) for key, (_, names) in groups.items()])
    unsaved = {name: old for name, old in held.items() if name not in saved and old.is_meta}
    filled = folder.read_unsaved({name: empty_like(old, torch.device("cpu")) for name, old in unsaved.items()})
    new |= {id(unsaved[name]): buffer for name, buffer in filled.items()}
    replace_tensors(tables_of(model), new)
    return {name: new.get(id(tensor), tensor) for name, tensor in held.items()}


def _require_captured(held: Mapping[str, torch.Tensor], known: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model with other weights than the one that was captured.

    Raises:
        PipelineError: SK804.
    """
    for name, tensor in held.items():
        other = known.get(name, tensor)
        if other is tensor or other.is_meta:
            continue
        if other.shape != tensor.shape or not torch.equal(other.to(tensor.device), tensor):
            raise PipelineError(
                "SK804",
                f"{name} of the model differs from the one that was captured",
                "Give the model that was captured, or capture this one.",
                [name],
            )
