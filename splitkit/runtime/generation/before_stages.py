"""Prepares what the first stage of a decoder reads: on the first rank, where an encoder or images are run whole."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from splitkit.errors import listed, nearest
from splitkit.language_model import given_to_language_model
from splitkit.runtime.devices.accelerators import current
from splitkit.runtime.generation.generation_request import Request, is_array, not_on_ranks, unfit
from splitkit.runtime.generation.model_tokens import ModelTokens
from splitkit.runtime.generation.sampling import padded_left

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


@dataclass(frozen=True)
class FirstInputs:
    """What a request brings to the first stage.

    Attributes:
        tokens: what the first stage reads: tokens ``[sequences, query]``, or embeddings ``[sequences, query, hidden]``.
        encoded: the output of an encoder, ``[sequences, positions, hidden]``.
    """

    tokens: torch.Tensor
    encoded: torch.Tensor | None = None


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

    def first(self, request: Request) -> FirstInputs:
        """Return what the first stage reads of the prompt."""
        return FirstInputs(self._padded(request))

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
    def first(self, request: Request) -> FirstInputs:
        """As `BeforeStages.first`."""
        given = dict(request.inputs)
        if self._main == "input_ids":
            longest = max(map(len, request.prompts))
            rows = [list(row) + [self._tokens.pad] * (longest - len(row)) for row in request.prompts]
            mask = [[1] * len(row) + [0] * (longest - len(row)) for row in request.prompts]
            given["input_ids"], given["attention_mask"] = (torch.tensor(x, device=self._device) for x in (rows, mask))
        with current(self._device):
            encoded = self._encoder(**given, return_dict=True)[0]
        return FirstInputs(self._padded(request), encoded)

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

    def first(self, request: Request) -> FirstInputs:
        """As `BeforeStages.first`."""
        tokens = self._padded(request)
        lengths = torch.tensor([len(prompt) for prompt in request.prompts], device=self._device)[:, None]
        mask = (torch.arange(tokens.shape[1], device=self._device) >= tokens.shape[1] - lengths).long()
        return FirstInputs(self._of(tokens, mask, request.inputs))

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
