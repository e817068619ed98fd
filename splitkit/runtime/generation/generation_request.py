"""Describes requests for text and their results, and refuses requests that cannot be answered."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from splitkit.checks import is_number, is_whole, shown
from splitkit.errors import PipelineError, SplitError, nearest
from splitkit.short_repr import brief

_REFUSED = {
    "num_beams": "beam search needs a cache that is reordered after each token",
    "penalty_alpha": "contrastive search runs the model several times for each token",
    "assistant_model": "assisted generation takes back tokens",
}
"""Ways of ``generate`` that ranks do not have, and why."""
_LARGEST = 2**63 - 1
"""The largest number that a tensor holds."""


@dataclass(frozen=True)
class Request:
    """Prompts to continue, together as one batch, and how. The names are those of transformers' ``generate``.

    Attributes:
        prompts: the token ids of one or several sequences, of different lengths if you like. An encoder reads them, if
            the model has one; where it reads something else, such as speech, there are none.
        max_new_tokens: the most tokens that are added to each sequence.
        do_sample: whether to draw the next token at random; otherwise it is the most likely one.
        temperature: divides the logits, if ``do_sample``.
        top_k: draw from the k most likely tokens only; 0 for all.
        top_p: draw from the fewest tokens that have this probability together.
        min_p: draw from tokens at least this fraction as likely as the most likely one.
        repetition_penalty: above 1 makes tokens that occurred less likely.
        no_repeat_ngram_size: no run of this many tokens occurs twice; 0 for no limit.
        eos_token_id: tokens that end a sequence; ``None`` for the model's.
        seed: of the random numbers; a request gives the same tokens whatever runs beside it.
        decoder_input_ids: the tokens with which the decoder of a model with an encoder starts, all equally many: for
            each sequence, or once for all; ``None`` for the model's.
        inputs: what else the model reads, such as ``pixel_values`` or ``input_features``: name -> a tensor, or nested
            lists of numbers. `from_data` takes them beside the other fields too.
    """

    prompts: tuple[tuple[int, ...], ...] = ()
    max_new_tokens: int = 20
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    eos_token_id: tuple[int, ...] | None = None
    seed: int = 0
    decoder_input_ids: tuple[tuple[int, ...], ...] | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict, compare=False)

    __repr__ = brief

    @property
    def decoded(self) -> tuple[tuple[int, ...], ...]:
        """The tokens that the decoder reads before the first new one, of each sequence."""
        return self.prompts if self.decoder_input_ids is None else self.decoder_input_ids

    @property
    def longest(self) -> int:
        """The most tokens before the first new one, to which the other sequences are padded on the left."""
        return max(map(len, self.decoded))

    @property
    def positions(self) -> int:
        """The positions that a sequence may come to."""
        return self.longest + self.max_new_tokens

    @property
    def cache_tokens(self) -> int:
        """The tokens that the caches may come to hold, but for an encoder's: the last new token is never fed back."""
        return len(self.decoded) * (self.positions - 1)

    def to_json(self) -> str:
        """Return the request without its `inputs` as JSON text, for `from_data`."""
        data = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "inputs"}
        return json.dumps({name: value for name, value in data.items() if value not in (None, ())})

    @classmethod
    def from_data(cls, data: Any) -> Request:
        """Return the request that JSON-like data describes.

        Args:
            data: a mapping with the fields of a request, in which ``input_ids`` may stand for ``prompts``; or only the
                token ids, of one sequence or of several. Arrays and tensors are taken, too.

        Raises:
            PipelineError: SK802 for fields that a request does not have, or that have no such value.
        """
        given = dict(data) if isinstance(data, Mapping) else {"prompts": data}
        if "input_ids" in given:
            given["prompts"] = given.pop("input_ids")
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name in _REFUSED and value not in (None, 1):
                remedy = "Leave it out, or generate with the unsplit model."
                if name == "num_beams":
                    remedy = "Generate in one process: splitkit.generator."
                raise unfit(f"{name} is {shown(value)}: {_REFUSED[name]}", remedy)
            if name not in known and name not in _REFUSED and not is_array(value):
                raise unfit(f"a request has no field {name!r}", nearest(name, known, f"Fields: {', '.join(known)}."))
        further = {name: value for name, value in given.items() if name not in known and name not in _REFUSED}
        given = {name: value for name, value in given.items() if name in known}
        given["inputs"] = {**_mapping(given.get("inputs")), **further}
        if not (given["inputs"] or "prompts" in given or given.get("decoder_input_ids") is not None):
            raise unfit("a request has no prompt", "Give input_ids, or a prompt and a tokenizer.")
        for name in ("prompts", "decoder_input_ids"):
            if given.get(name) is not None:
                given[name] = _sequences(given[name])
        if (ends := given.get("eos_token_id")) is not None:
            given["eos_token_id"] = _row([ends] if is_whole(ends) else ends)
        made = cls(**given)
        _require_values(made)
        return made


@dataclass(frozen=True)
class RequestResult:
    """What came of a request.

    Attributes:
        number: the place of the request among those given, from 0.
        tokens: the new tokens of each sequence, with the one that ended it and without padding. Of a request that
            failed underway, the tokens until then.
        error: why the request failed, or ``None``.
    """

    number: int
    tokens: tuple[tuple[int, ...], ...] = ()
    error: SplitError | None = field(default=None)

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        error = self.error
        return {
            "number": self.number,
            "tokens": [list(row) for row in self.tokens],
            "error": None if error is None else {"code": error.code, "reason": error.reason, "remedy": error.remedy},
        }


@dataclass(frozen=True)
class RequestLimits:
    """What a request may ask for.

    Attributes:
        vocabulary: the number of tokens that the model knows.
        positions: the most tokens of a sequence; ``None`` for no limit.
        cache_tokens: the most tokens that the caches of all requests in flight hold; ``None`` for no limit.
    """

    vocabulary: int
    positions: int | None = None
    cache_tokens: int | None = None

    def require(self, request: Request, encoded: int = 0) -> None:
        """Refuse a request that can never be answered.

        Args:
            request: the request.
            encoded: the positions of an encoder that are cached for each of its sequences.

        Raises:
            PipelineError: SK802; names the limit.
        """
        for row, prompt in enumerate((*request.prompts, *(request.decoder_input_ids or ()))):
            wrong = next((token for token in prompt if not 0 <= token < self.vocabulary), None)
            if wrong is not None:
                raise unfit(
                    f"prompt {row % len(request.decoded)} has the token {wrong}, and the model knows tokens from 0 to "
                    f"{self.vocabulary - 1}",
                    "Use the tokenizer of this model.",
                )
        if self.positions is not None and request.positions > self.positions:
            remedy, room = "Shorten the prompt.", self.positions - request.longest
            if room > 0:
                remedy = f"Shorten the prompt, or ask for at most {room} new tokens."
            raise unfit(
                f"{request.longest} tokens and {request.max_new_tokens} new ones are {request.positions} positions, "
                f"and the model has {self.positions}",
                remedy,
            )
        wanted = request.cache_tokens + encoded * len(request.decoded)
        if self.cache_tokens is not None and wanted > self.cache_tokens:
            raise unfit(
                f"the cache would come to {wanted} tokens, and there is memory for {self.cache_tokens}",
                "Ask for fewer new tokens, or for fewer sequences at once.",
            )


def _require_values(request: Request) -> None:
    if not all(request.prompts) or not all(request.decoder_input_ids or ()):
        raise unfit("the prompt is empty", "Give at least one token, for example the one that begins a text.")
    for name, least in {"max_new_tokens": 1, "top_k": 0, "no_repeat_ngram_size": 0, "seed": 0}.items():
        if not is_whole(value := getattr(request, name), least):
            raise unfit(f"{name} is {shown(value)}", f"Give a whole number of at least {least}.")
        if value > _LARGEST:
            raise unfit(f"{name} is {shown(value)}", f"Give at most {_LARGEST}.")
    for name, (above, most) in {
        "temperature": (0.0, math.inf),
        "top_p": (0.0, 1.0),
        "repetition_penalty": (0.0, math.inf),
    }.items():
        value = getattr(request, name)
        if not is_number(value) or not above < value <= most or math.isinf(value):
            finite, to = ("finite ", "") if math.isinf(most) else ("", f" and at most {most:g}")
            raise unfit(f"{name} is {shown(value)}", f"Give a {finite}number above {above:g}{to}.")
    if not is_number(request.min_p) or not 0 <= request.min_p <= 1:
        raise unfit(f"min_p is {shown(request.min_p)}", "Give a number from 0 to 1.")
    if not isinstance(request.do_sample, bool):
        raise unfit(f"do_sample is {shown(request.do_sample)}", "Give true or false.")


def is_array(value: Any) -> bool:
    """Whether a value of a request may become a tensor."""
    return hasattr(value, "shape") or isinstance(value, list | tuple)


def _mapping(value: Any) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise unfit(f"inputs is {shown(value)}", 'Give names and tensors: {"pixel_values": ...}.')
    return value or {}


def _sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise unfit(f"the prompts are {shown(value)}", "Give token ids: [5, 6, 7], or [[5, 6, 7], [8, 9]].")
    rows = [row.tolist() if hasattr(row, "tolist") else row for row in value]
    several = rows and all(isinstance(row, Sequence) and not isinstance(row, str | bytes) for row in rows)
    return tuple(_row(row) for row in rows) if several else (_row(rows),)


def _row(tokens: Any) -> tuple[int, ...]:
    if not isinstance(tokens, Iterable):
        raise unfit(f"{shown(tokens)} is not a list of token ids", "Give whole numbers: [5, 6, 7].")
    wrong = [token for token in tokens if not is_whole(token, -_LARGEST) or token > _LARGEST]
    if wrong:
        raise unfit(f"{shown(wrong[0])} is not a token id", "Give whole numbers.")
    return tuple(int(token) for token in tokens)


def not_on_ranks(reason: str, *names: str) -> PipelineError:
    """Return the error of an input that ranks cannot make from a prompt: SK801."""
    remedy = "Generate in one process: sk.generator(model, split, devices)."
    return PipelineError("SK801", f"{reason}, which ranks cannot make from a prompt", remedy, names)


def unfit(reason: str, remedy: str) -> PipelineError:
    """Return the error of an input of generation that cannot be used: SK802."""
    return PipelineError("SK802", reason, remedy)
