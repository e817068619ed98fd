"""Chooses the next tokens of a request from the logits, as transformers' ``generate`` does."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from splitkit.errors import PipelineError
from splitkit.runtime.generation.generation_request import Request


class Sampler:
    """The state of a request that choosing its tokens needs.

    Attributes:
        unfinished: which sequences go on, ``[sequences]``.
    """

    def __init__(self, request: Request, ends: Collection[int], pad: int, device: torch.device) -> None:
        longest = request.longest
        rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in request.prompts]
        self._history = torch.tensor(rows, device=device)
        self._ends, self._pad = torch.tensor(sorted(ends), dtype=torch.long, device=device), pad
        self._left = request.max_new_tokens
        self.unfinished = torch.ones(len(rows), dtype=torch.bool, device=device)
        self._processors = processors(request)
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


def processors(request: Request) -> list[Any]:
    """Return transformers' processors of logits for a request, in the order in which ``generate`` applies them.

    Raises:
        PipelineError: SK802 without transformers, if the request asks for any.
    """
    wanted = [
        ("RepetitionPenaltyLogitsProcessor", request.repetition_penalty, 1.0),
        ("NoRepeatNGramLogitsProcessor", request.no_repeat_ngram_size, 0),
    ]
    if request.do_sample:
        wanted += [
            ("TemperatureLogitsWarper", request.temperature, 1.0),
            ("TopKLogitsWarper", request.top_k, 0),
            ("TopPLogitsWarper", request.top_p, 1.0),
            ("MinPLogitsWarper", request.min_p, 0.0),
        ]
    wanted = [row for row in wanted if row[1] != row[2]]
    if not wanted:
        return []
    try:
        import transformers
    except ImportError as error:
        reason = "temperature, top_k and their like are transformers', which is not installed"
        raise PipelineError("SK802", reason, "pip install 'transformers>=5'") from error
    return [
        getattr(transformers, name)(value if name != "TemperatureLogitsWarper" else float(value))
        for name, value, _ in wanted
    ]
