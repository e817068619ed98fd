"""Chooses the next tokens of a request from the logits, as transformers' ``generate`` does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from splitkit.errors import PipelineError
from splitkit.runtime.generation.generation_request import Request
from splitkit.runtime.generation.model_tokens import ModelTokens


class Sampler:
    """The state of a request that choosing its tokens needs.

    Attributes:
        unfinished: which sequences go on, ``[sequences]``.
    """

    def __init__(self, request: Request, known: ModelTokens, device: torch.device) -> None:
        self._history = padded_left(request.decoded, known.pad, device)
        self._ends = torch.tensor(sorted(known.ends_of(request)), dtype=torch.long, device=device)
        self._pad = known.pad
        self._left = request.max_new_tokens
        self.unfinished = torch.ones(len(self._history), dtype=torch.bool, device=device)
        self._processors = processors(request, known)
        self._draws = request.do_sample
        self._random = torch.Generator(device).manual_seed(request.seed)

    @torch.no_grad()
    def next(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the next token of each sequence, ``[sequences]``; padding for those that have ended.

        Args:
            logits: those of the last position, ``[sequences, vocabulary]``.

        Raises:
            PipelineError: SK805 if a logit is not a number.
        """
        scores = logits.float()
        if bool(scores.isnan().any()):
            raise PipelineError("SK805", "a logit is nan", "Look at the weights, or compute in another dtype.")
        for processor in self._processors:
            scores = processor(self._history, scores)
        if self._draws:
            chances = torch.softmax(scores, dim=-1)
            tokens = torch.multinomial(chances, num_samples=1, generator=self._random).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        tokens = tokens.where(self.unfinished, self._pad)
        if self._processors:
            self._history = torch.cat([self._history, tokens[:, None]], 1)
        self._left -= 1
        self.unfinished = self.unfinished & ~torch.isin(tokens, self._ends)
        return tokens

    @property
    def done(self) -> bool:
        """Whether no sequence goes on."""
        return not self._left or not bool(self.unfinished.any())


def padded_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> torch.Tensor:
    """Return sequences of tokens as a tensor, ``[sequences, longest]``."""
    longest = max(map(len, rows))
    return torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], device=device)


def processors(request: Request, known: ModelTokens) -> list[Any]:
    """Return transformers' processors of logits for a request, in the order in which ``generate`` applies them.

    Args:
        request: the request.
        known: the tokens that the model forces and suppresses.

    Raises:
        PipelineError: SK802 without transformers, if the request asks for any.
    """
    wanted = [*_always(request, known), *(_if_drawn(request) if request.do_sample else ())]
    if not wanted:
        return []
    try:
        import transformers
    except ImportError as error:
        reason = "temperature, top_k and their like are transformers', which is not installed"
        raise PipelineError("SK802", reason, "pip install 'transformers>=5'") from error
    return [getattr(transformers, name)(*arguments) for name, *arguments in wanted]


def _always(request: Request, known: ModelTokens) -> Iterator[tuple[Any, ...]]:
    """Yield classes of processors with their arguments."""
    if request.repetition_penalty != 1:
        yield "RepetitionPenaltyLogitsProcessor", request.repetition_penalty
    if request.no_repeat_ngram_size:
        yield "NoRepeatNGramLogitsProcessor", request.no_repeat_ngram_size
    if known.forced_bos_token_id is not None:
        yield "ForcedBOSTokenLogitsProcessor", known.forced_bos_token_id
    if known.forced_eos_token_id:
        yield "ForcedEOSTokenLogitsProcessor", request.positions, list(known.forced_eos_token_id)
    if known.suppress_tokens:
        yield "SuppressTokensLogitsProcessor", list(known.suppress_tokens)
    if known.begin_suppress_tokens:
        # where the first new token is given, the one after it counts as the first
        given = request.longest == 1 and known.forced_bos_token_id is not None
        yield "SuppressTokensAtBeginLogitsProcessor", list(known.begin_suppress_tokens), request.longest + given


def _if_drawn(request: Request) -> Iterator[tuple[Any, ...]]:
    """Yield classes of processors with their arguments, for tokens that are drawn at random."""
    if request.temperature != 1:
        yield "TemperatureLogitsWarper", float(request.temperature)
    if request.top_k:
        yield "TopKLogitsWarper", request.top_k
    if request.top_p != 1:
        yield "TopPLogitsWarper", request.top_p
    if request.min_p:
        yield "MinPLogitsWarper", request.min_p
