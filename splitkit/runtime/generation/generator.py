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
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from splitkit.checks import is_whole, shown
from splitkit.engine.split import Split
from splitkit.errors import PipelineError, SplitError
from splitkit.runtime.folder.load import StageFolder
from splitkit.runtime.generation.decoder import DecoderChain, DecoderStage
from splitkit.runtime.generation.generation_request import Request, RequestLimits, RequestResult
from splitkit.runtime.generation.prompt_pieces import piece
from splitkit.runtime.generation.ring import END, RUN, Message, Ring
from splitkit.runtime.generation.sampling import Sampler, processors
from splitkit.runtime.generation.serving_progress import ServingProgress
from splitkit.runtime.ranks.faults import global_ranks, naming_failures, time_limit
from splitkit.runtime.ranks.rank_agreement import require_process_group, require_same
from splitkit.runtime.ranks.rank_device import device_of_rank, place_stages
from splitkit.runtime.ranks.stage_chain import chain_of
from splitkit.runtime.ranks.weight_agreement import require_same_model
from splitkit.short_repr import brief


def serve(
    split: Split | StageFolder,
    *,
    eos_token_id: int | Collection[int] = (),
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
            disk (`splitkit.runtime.open_stages`), of which each rank loads its own.
        eos_token_id: the tokens that end a sequence, unless a request names others.
        pad_token_id: the token with which shorter prompts of a request are filled up; by default one that ends.
        positions: the most tokens of a sequence, ``max_position_embeddings`` of the model; ``None`` for no limit.
        in_flight: the most requests underway; by default twice as many as stages.
        cache_tokens: the most tokens that the caches of all requests underway may come to hold, which bounds their
            memory on every rank: a request waits until there is room. ``None`` for no limit.
        chunk: the most tokens of a prompt that run at once, so that a long prompt does not hold up the others; ``None``
            for the whole prompt. Later pieces of a prompt are shorter, so that each takes about as long as the first.
        group: the ranks; by default the whole default process group.
        device: the device of this rank; by default as for `splitkit.runtime.pipeline`.

    Raises:
        PipelineError: SK801 for a split that is no decoder, or has not one stage for each rank; SK802 for arguments
            that make no sense; SK804 without a process group, or if the ranks do not run the same.
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
    ends = frozenset([eos_token_id] if is_whole(eos_token_id) else eos_token_id)  # type: ignore[arg-type]
    chain = chain_of(split) if isinstance(split, Split) else split.chain
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    facts = {"end tokens": sorted(ends), "padding": pad_token_id, "in_flight": in_flight, "chunk": chunk}
    require_same(chain, facts, group)
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
    require_same_model(chain, [rank], group)
    limits = RequestLimits(decoder.vocabulary, positions, cache_tokens)
    tokens = Tokens(ends, next(iter(sorted(ends)), 0) if pad_token_id is None else pad_token_id)
    return Generator(decoder, limits, tokens, in_flight or 2 * ranks, chunk, group, placed)


@dataclass(frozen=True)
class Tokens:
    """Tokens with a meaning.

    Attributes:
        ends: those that end a sequence, unless a request names others.
        pad: the one that fills up shorter prompts.
    """

    ends: frozenset[int]
    pad: int

    def ends_of(self, request: Request) -> frozenset[int]:
        """Return the tokens that end a sequence of a request."""
        return self.ends if request.eos_token_id is None else frozenset(request.eos_token_id)


@dataclass
class Underway:
    """A request that has entered, on the first rank.

    Attributes:
        request: the request.
        tokens: the tokens to run next, ``[sequences, query]``; with those of a prompt, all that are left of it.
        found: the tokens that each sequence got.
        entered: whether the other ranks know the request.
    """

    request: Request
    tokens: torch.Tensor
    found: list[list[int]] = field(default_factory=list)
    entered: bool = False


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
        decoder: DecoderChain,
        limits: RequestLimits,
        tokens: Tokens,
        in_flight: int,
        chunk: int | None,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.rank, self.device, self.limits, self.in_flight = dist.get_rank(group), device, limits, in_flight
        self.stage = DecoderStage(decoder, self.rank, device)
        self._tokens, self._chunk, self._stages = tokens, chunk, decoder.stages
        self._costly = decoder.chain.facts.costly
        before = decoder.border((self.rank - 1) % decoder.stages)
        self._ring = Ring(group, device, before, decoder.border(self.rank), in_flight)
        self._progress = ServingProgress(self.rank, decoder.stages, global_ranks(group), device, time_limit(group))
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
        line = _Line(self.limits, self.in_flight, requests)
        ready, left, unanswered = deque[int](), list[int](), 0
        while True:
            refused = line.admit()
            yield from refused
            ready += line.take_entered(self._tokens.pad, self.device)
            if not line.underway:
                break
            while ready and unanswered < self.in_flight:
                number = ready.popleft()
                if self._start(number, line.underway[number], left):
                    ready.append(number)
                left, unanswered = [], unanswered + 1
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
        self._ring.send(Message(END, note=_note(left)))
        if self._stages == 1:
            self._know(self._ring.receive().request, None, left)

    def _start(self, number: int, entry: Underway, left: list[int]) -> bool:
        """Run the first stage on the next tokens of a request; return whether more of the prompt is to follow."""
        request = None if entry.entered else entry.request
        if request is not None:
            self.stage.enter(number, request)
            entry.entered = True
            entry.found = [[] for _ in request.prompts]
        rest, query = entry.tokens, entry.tokens.shape[1]
        if self._chunk is not None:
            query = min(query, piece(self._chunk, self.stage.held[number].length, self._costly))
        now, entry.tokens = rest[:, :query], rest[:, query:]
        more = bool(entry.tokens.shape[1])
        if self._stages == 1:
            self._know(number, request, left)
        self._progress.request, self._progress.running = number, True
        made = self.stage.run(number, query, (now,))
        self._progress.running = False
        if self._stages == 1:
            self._ring.send(self._chosen(number, made[0], not more))
        else:
            self._ring.send(Message(RUN, number, query, not more, _note(left, request), made))
        return more

    def _answer(self, underway: dict[int, Underway]) -> tuple[int, bool | None, SplitError | None]:
        """Take the next answer; return the request, whether it is done, ``None`` within a prompt, and its error."""
        answer = self._ring.receive()
        entry, (tokens,) = underway[answer.request], answer.values
        if answer.note:
            told = json.loads(answer.note)
            return answer.request, True, PipelineError(told["code"], told["reason"], told["remedy"])
        if not len(tokens):
            return answer.request, None, None
        ends = self._tokens.ends_of(entry.request)
        for row, token in zip(entry.found, tokens.tolist(), strict=True):
            if not row or row[-1] not in ends:
                row.append(token)
        entry.tokens = tokens[:, None]
        return answer.request, answer.last, None

    def _follow(self) -> None:
        """Run this rank's stage on what the rank before sends, and send on what comes out, until the end."""
        while True:
            message = self._ring.receive()
            known = json.loads(message.note) if message.note else {"left": [], "request": None}
            request = known["request"] and Request.from_data(json.loads(known["request"]))
            for number in known["left"]:
                self.stage.leave(number)
            self._know(message.request, request, known["left"])
            if request is not None:
                self.stage.enter(message.request, request)
            if message.kind == END:
                if not self.is_last:
                    self._ring.send(message)
                return
            self._progress.request, self._progress.running = message.request, True
            made = self.stage.run(message.request, message.query, message.values)
            self._progress.running = False
            if self.is_last:
                self._ring.send(self._chosen(message.request, made[0], message.last))
            else:
                self._ring.send(Message(RUN, message.request, message.query, message.last, message.note, made))

    def _know(self, number: int, request: Request | None, left: Iterable[int]) -> None:
        """On the last rank, forget how the tokens of some requests are chosen, and learn how one is to be."""
        if not self.is_last:
            return
        for gone in left:
            self._samplers.pop(gone, None)
        if request is None:
            return
        try:
            self._samplers[number] = Sampler(request, self._tokens.ends_of(request), self._tokens.pad, self.device)
        except Exception as error:
            self._samplers[number] = error

    def _chosen(self, number: int, logits: torch.Tensor, wanted: bool) -> Message:
        """Return the answer to the first rank: the next tokens, or none within a prompt, or why there are none."""
        nothing = torch.empty(0, dtype=torch.long, device=self.device)
        if not wanted:
            return Message(RUN, number, values=(nothing,))
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
            return Message(RUN, number, last=True, note=json.dumps(told).encode(), values=(nothing,))
        return Message(RUN, number, last=sampler.done, values=(tokens,))


class _Line:
    """The requests that wait, and those that are underway, on the first rank."""

    def __init__(self, limits: RequestLimits, places: int, requests: Iterable[Any]) -> None:
        self._limits, self._places = limits, places
        self._coming = enumerate(requests)
        self._next: tuple[int, Request] | None = None
        self._held = 0
        self.underway: dict[int, Underway] = {}
        self._fresh: list[tuple[int, Request]] = []

    def admit(self) -> list[RequestResult]:
        """Let requests enter while there is room; return the results of those that are refused."""
        refused = list[RequestResult]()
        while len(self.underway) + len(self._fresh) < self._places:
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
                        error = PipelineError("SK802", reason, "Give the fields of splitkit.runtime.Request.")
                    refused.append(RequestResult(number, error=error))
                    continue
            room, wants = self._limits.cache_tokens, self._next[1].cache_tokens
            if room is not None and self._held + wants > room:
                break
            self._held += wants
            self._fresh.append(self._next)
            self._next = None
        return refused

    def _checked(self, given: Any) -> Request:
        request = given if isinstance(given, Request) else Request.from_data(given)
        self._limits.require(request)
        processors(request)
        return request

    def take_entered(self, pad: int, device: torch.device) -> list[int]:
        """Return the numbers of the requests that entered since the last call."""
        for number, request in self._fresh:
            longest = request.longest
            rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in request.prompts]
            self.underway[number] = Underway(request, torch.tensor(rows, device=device))
        entered = [number for number, _ in self._fresh]
        self._fresh = []
        return entered

    def leave(self, number: int, error: SplitError | None) -> RequestResult:
        """Free the place of a request, and return its result."""
        entry = self.underway.pop(number)
        self._held -= entry.request.cache_tokens
        return RequestResult(number, tuple(map(tuple, entry.found)), error)


def _note(left: list[int], request: Request | None = None) -> bytes:
    if not left and request is None:
        return b""
    return json.dumps({"left": left, "request": request and request.to_json()}).encode()
