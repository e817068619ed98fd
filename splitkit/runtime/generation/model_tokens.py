"""What a model of transformers says about its tokens: which ones begin and end a sequence, and which are forced."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from splitkit.checks import is_whole
from splitkit.errors import PipelineError
from splitkit.runtime.generation.generation_request import Request


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
