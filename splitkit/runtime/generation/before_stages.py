"""Prepares what the first stage of a decoder reads: on the first rank, where an encoder or images are run whole."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from splitkit.checks import is_whole
from splitkit.errors import PipelineError, listed, nearest
from splitkit.language_model import given_to_language_model
from splitkit.runtime.devices.accelerators import current
from splitkit.runtime.generation.generation_request import Request, is_array, not_on_ranks, unfit


@dataclass(frozen=True)
class ModelTokens:
    """What generation needs of a model besides its stages. The names are as in transformers' ``generate``.

    Attributes:
        eos_token_id: the tokens that end a sequence, unless a request names others.
        pad_token_id: the token that fills up shorter prompts, if there is one.
        positions: the most tokens of a sequence; ``None`` for no limit.
        decoder_start: the tokens with which a decoder starts that reads an encoder's output; empty if a request must
            say them, or if there is no encoder. All below is for such a decoder only.
        forced_bos_token_id: the first new token, if it is given.
        forced_eos_token_id: the last of ``max_new_tokens``, if it is given.
        suppress_tokens: tokens that are never chosen.
        begin_suppress_tokens: tokens that are not the first new token.
    """

    eos_token_id: tuple[int, ...] = ()
    pad_token_id: int | None = None
    positions: int | None = None
    decoder_start: tuple[int, ...] = ()
    forced_bos_token_id: int | None = None
    forced_eos_token_id: tuple[int, ...] = ()
    suppress_tokens: tuple[int, ...] = ()
    begin_suppress_tokens: tuple[int, ...] = ()

    @classmethod
    def of(cls, model: Any) -> ModelTokens:
        """Read them from a model's ``generation_config`` and ``config``.

        Raises:
            PipelineError: SK801 for a model that is not one of transformers.
        """
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            reason = f"{type(model).__name__} is not a model of transformers"
            raise PipelineError("SK801", reason, "Give the model that was captured, or none.")
        settings, config = getattr(model, "generation_config", None) or model.config, model.config
        text = config.get_text_config(decoder=True)
        positions = getattr(text, "max_position_embeddings", None) or getattr(text, "max_target_positions", None)
        found = cls(_row(settings.eos_token_id), settings.pad_token_id, positions)
        if not getattr(config, "is_encoder_decoder", False):
            return found
        return replace(
            found,
            decoder_start=_start(settings, config),
            forced_bos_token_id=getattr(settings, "forced_bos_token_id", None),
            forced_eos_token_id=_row(getattr(settings, "forced_eos_token_id", None)),
            suppress_tokens=_row(getattr(settings, "suppress_tokens", None)),
            begin_suppress_tokens=_row(getattr(settings, "begin_suppress_tokens", None)),
        )

    def or_given(self, ends: int | Collection[int] | None, pad: int | None, positions: int | None) -> ModelTokens:
        """Return the tokens, with the values that a user gave in place of the model's."""
        given = {"eos_token_id": None if ends is None else _row(ends), "pad_token_id": pad, "positions": positions}
        return replace(self, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]

    @property
    def pad(self) -> int:
        """The token that fills up shorter prompts; by default one that ends a sequence."""
        return min(self.eos_token_id, default=0) if self.pad_token_id is None else self.pad_token_id

    def ends_of(self, request: Request) -> frozenset[int]:
        """Return the tokens that end a sequence of a request."""
        return frozenset(self.eos_token_id if request.eos_token_id is None else request.eos_token_id)


def _row(value: int | Iterable[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if is_whole(value) else tuple(sorted(value))  # type: ignore[arg-type]


def _start(settings: Any, config: Any) -> tuple[int, ...]:
    """Return the tokens with which a decoder starts, as ``generate`` chooses them; empty if they depend on the request.

    Whisper's begin with the language, if the model knows several, and end with a token for text without times.
    """
    first = getattr(settings, "decoder_start_token_id", None)
    first = getattr(settings, "bos_token_id", None) if first is None else first
    if getattr(config, "model_type", "") != "whisper":
        return _row(first)
    if hasattr(settings, "lang_to_id"):
        return ()
    return (*_row(first), *_row(getattr(settings, "no_timestamps_token_id", None)))


# What a model of transformers says about its tokens: which ones begin and end a sequence, and which are forced.


_OWN = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels", "use_cache", "return_dict")
_STEP = (
    "mm_encoder_outputs",
    "past_key_values",
    "cache_position",
    "logits_to_keep",
    "encoder_outputs",
    "kwargs",
    "self",
)
_GIVEN = ("inputs_embeds", "attention_mask", "position_ids")
_LEFT_OUT = ("past_key_values", "use_cache", "cache_position", "return_dict", "logits_to_keep")


First = tuple[torch.Tensor, torch.Tensor | None]
"""What a request brings to the first stage: tokens ``[sequences, query]`` or embeddings ``[sequences, query, hidden]``,
and the output of an encoder, ``[sequences, positions, hidden]``."""


class BeforeStages:
    """What is before the stages of a decoder that reads tokens: nothing but padding."""

    def __init__(self, tokens: ModelTokens, device: torch.device, further: Collection[str] = ()) -> None:
        self._tokens, self._device, self._names = tokens, device, further

    def checked(self, request: Request) -> Request:
        """Return the request, completed with values from the model.

        Raises:
            PipelineError: SK802 for inputs that the model does not have, or that are missing.
        """
        self._require_prompts(request)
        self._require_known(request)
        if request.decoder_input_ids is not None:
            raise unfit("the model has no encoder, and decoder_input_ids are given", "Give input_ids.")
        return request

    def encoded_positions(self, request: Request) -> int:
        """Return the positions of an encoder that are cached for each sequence of a request."""
        return 0

    def first(self, request: Request) -> First:
        """Return what the first stage reads of the prompt."""
        return self._padded(request), None

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return what the first stage reads of the next tokens, ``[sequences]``."""
        return tokens[:, None]

    def _padded(self, request: Request) -> torch.Tensor:
        return padded_left(request.decoded, self._tokens.pad, self._device)

    def _require_prompts(self, request: Request) -> None:
        if not request.prompts:
            raise unfit("a request has no prompt", "Give input_ids.")

    def _require_known(self, request: Request) -> None:
        for name in request.inputs:
            if name not in self._names:
                remedy = f"It reads {listed(sorted(self._names), 8)}." if self._names else "It reads input_ids."
                if name == "attention_mask":
                    remedy = "Give prompts without padding: input_ids=[[5, 6, 7], [8, 9]]."
                raise unfit(f"the model reads no further input {name!r}", nearest(name, self._names, remedy))

    def _given(self, request: Request) -> dict[str, Any]:
        return {name: _tensor(name, value, self._device) for name, value in request.inputs.items()}


class BehindEncoder(BeforeStages):
    """The encoder of a model."""

    def __init__(self, model: Any, tokens: ModelTokens, device: torch.device) -> None:
        super().__init__(tokens, device, _further(model.get_encoder()))
        self._encoder, self._config = model.get_encoder(), model.config
        main = getattr(self._encoder, "main_input_name", None) or getattr(model, "main_input_name", None)
        self._main = str(main or "input_ids")
        self._as_given = getattr(model.config, "model_type", "") == "whisper"

    def checked(self, request: Request) -> Request:
        """As `BeforeStages.checked`; the result also has the tokens with which the decoder starts."""
        self._require_known(request)
        if self._main == "input_ids":
            self._require_prompts(request)
            most, longest = getattr(self._config, "max_position_embeddings", None), max(map(len, request.prompts))
            if most is not None and longest > most:
                raise unfit(f"a prompt has {longest} tokens, and the encoder {most} positions", "Shorten the prompt.")
            start = self._start(request, len(request.prompts))
            return replace(request, inputs=self._given(request), decoder_input_ids=start)
        if request.prompts:
            remedy = "Leave input_ids out; tokens with which the decoder starts are decoder_input_ids."
            raise unfit(f"the encoder reads {self._main}, and no tokens", remedy)
        if self._main not in request.inputs:
            raise unfit(f"the request has no {self._main}", f"Give {self._main}, as the processor makes them.")
        given = self._given(request)
        if not given[self._main].ndim or not len(given[self._main]):
            raise unfit(f"{self._main} is {list(given[self._main].shape)}", "Give one for each sequence.")
        start = self._start(request, len(given[self._main]))
        return replace(request, inputs=given, decoder_input_ids=start)

    def encoded_positions(self, request: Request) -> int:
        """As `BeforeStages.encoded_positions`."""
        if self._main == "input_ids":
            return max(map(len, request.prompts))
        return int(getattr(self._config, "max_source_positions", None) or request.inputs[self._main].shape[-1])

    @torch.no_grad()
    def first(self, request: Request) -> First:
        """As `BeforeStages.first`."""
        given = dict(request.inputs)
        if self._main == "input_ids":
            longest = max(map(len, request.prompts))
            rows = [list(row) + [self._tokens.pad] * (longest - len(row)) for row in request.prompts]
            mask = [[1] * len(row) + [0] * (longest - len(row)) for row in request.prompts]
            given["input_ids"], given["attention_mask"] = (torch.tensor(x, device=self._device) for x in (rows, mask))
        with current(self._device):
            encoded = self._encoder(**given, return_dict=True)[0]
        return self._padded(request), encoded

    def _start(self, request: Request, sequences: int) -> tuple[tuple[int, ...], ...]:
        """Return the tokens with which the decoder starts, as ``generate`` chooses them.

        Raises:
            PipelineError: SK802 if there are none, or not for each sequence.
        """
        first, rows = self._tokens.decoder_start, request.decoder_input_ids
        if rows is None:
            if not first:
                remedy = "Give decoder_input_ids; for Whisper those of the language, the task and text without times."
                raise unfit("the model does not say with which tokens its decoder starts", remedy)
            return (first,) * sequences
        rows = rows * sequences if len(rows) == 1 else rows
        if len(rows) != sequences or len({*map(len, rows)}) > 1:
            reason = f"decoder_input_ids are {len(rows)} rows of {sorted({*map(len, rows)})} tokens"
            raise unfit(f"{reason}, for {sequences} sequences", "Give equally many tokens for each sequence.")
        if first and not self._as_given and all(row[0] != first[0] for row in rows):
            return tuple((*first, *row) for row in rows)
        return rows


class BehindEmbeddings(BeforeStages):
    """The part of a model in front of its language model: embeddings of tokens, and images among them."""

    def __init__(self, model: Any, tokens: ModelTokens, device: torch.device) -> None:
        super().__init__(tokens, device, _further(model))
        self._model = model
        self._placeholder = getattr(model.config, "image_token_id", None)

    def checked(self, request: Request) -> Request:
        """As `BeforeStages.checked`."""
        super().checked(request)
        if not request.inputs and any(self._placeholder in prompt for prompt in request.prompts):
            reason = f"a prompt has the token {self._placeholder}, in whose place an image is read, and there is none"
            raise unfit(reason, "Give the images, such as pixel_values.")
        return replace(request, inputs=self._given(request))

    def first(self, request: Request) -> First:
        """As `BeforeStages.first`."""
        tokens = self._padded(request)
        lengths = torch.tensor([len(prompt) for prompt in request.prompts], device=self._device)[:, None]
        mask = (torch.arange(tokens.shape[1], device=self._device) >= tokens.shape[1] - lengths).long()
        return self._of(tokens, mask, request.inputs), None

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `BeforeStages.next`."""
        return self._of(tokens[:, None], torch.ones_like(tokens)[:, None], {})

    def _of(self, tokens: torch.Tensor, mask: torch.Tensor, further: Mapping[str, Any]) -> torch.Tensor:
        """Return the embeddings, ``[sequences, query, hidden]``.

        Raises:
            PipelineError: SK801 if the language model also reads something that stages cannot make.
        """
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with current(self._device):
            own = {"input_ids": tokens, "attention_mask": mask, "use_cache": True, **further}
            given = given_to_language_model(self._model, own)
        for name, known in {"attention_mask": mask, "position_ids": positions}.items():
            value = given.get(name)
            if value is not None and not (isinstance(value, torch.Tensor) and torch.equal(value, known)):
                raise not_on_ranks(f"the language model reads {name} of its own", name)
        for name, value in given.items():
            if name not in (*_GIVEN, *_LEFT_OUT) and value is not None and value is not False:
                raise not_on_ranks(f"the language model reads {name}", name)
        found: torch.Tensor = given["inputs_embeds"]
        return found


def require_data(held: Mapping[str, torch.Tensor], reason: str, remedy: str) -> None:
    """Refuse tensors on ``meta`` of what runs whole.

    Raises:
        PipelineError: SK807.
    """
    first: dict[int, str] = {}
    for name, tensor in held.items():
        if tensor.is_meta:
            first.setdefault(id(tensor), name)
    if lacking := [*first.values()]:
        raise PipelineError("SK807", f"{listed(lacking, 2)} are on meta: {reason}", remedy, lacking)


def _further(module: Any) -> tuple[str, ...]:
    """Return the names of the inputs that a module reads besides tokens and the arguments of a step."""
    names = inspect.signature(type(module).forward).parameters
    starts = ("decoder_", "encoder_", "output_", "head_mask", "cross_")
    return tuple(name for name in names if name not in (*_OWN, *_STEP) and not name.startswith(starts))


def _tensor(name: str, value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if not is_array(value):
        return value
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise unfit(f"{name} is no tensor: {error}", "Give a tensor, or nested lists of equal lengths.") from error


# Chooses the next tokens of a request from the logits, as transformers' ``generate`` does.


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
