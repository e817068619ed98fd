"""Writes the command that plans a model as it was fitted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from splitkit.errors import CaptureError
from splitkit.frontends.decoder.example_step import example_step
from splitkit.frontends.decoder.generate_calls import QUERY
from splitkit.studies.fit.cards import memory_word
from splitkit.studies.fit.fit_result import FittedDevice
from splitkit.studies.fit.training_fit import TrainingFit
from splitkit.testing.config_files import is_config
from splitkit.testing.factory import is_program


def is_decoder(given: object, model: Any) -> bool:
    """Whether a model was given as a configuration, and `splitkit.capture_decoder` takes it."""
    named = isinstance(given, str | os.PathLike) and is_config(os.fspath(given))
    generates = getattr(model, "can_generate", lambda: False)()
    return named and generates and (_keeps_tokens_alone(model) or _has_known_states(model))


def has_attention_alone(model: Any) -> bool:
    """Whether a model is a decoder of tokens with nothing in front of it, whose layers keep keys and values alone."""
    generates = getattr(model, "can_generate", lambda: False)() and not model.config.is_encoder_decoder
    return generates and model.config.get_text_config(decoder=True) is model.config and _keeps_tokens_alone(model)


def _keeps_tokens_alone(model: Any) -> bool:
    layers = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    # Mamba has cache_params, and hybrid models say which of their layers have other states
    return _keeps_tokens(model) and all(map(_is_attention, layers))


def _keeps_tokens(model: Any) -> bool:
    return "past_key_values" in signature(model.forward).parameters


def _has_known_states(model: Any) -> bool:
    try:
        example_step(model, 1, QUERY + 1)
    except CaptureError:
        return False
    return True


def _is_attention(layer: object) -> bool:
    name = str(layer)
    return name.endswith("attention") and not name.startswith("linear")


def decoder_command(
    model: object, made: Any, devices: Sequence[FittedDevice], requests: int, chunk: int, as_stored: bool
) -> str:
    """Return ``splitkit plan`` for a step of generation, with the most tokens in the caches if these grow.

    Args:
        model: the model as the user gave it.
        made: the model.
        devices: what each device holds.
        requests: the requests whose caches are held.
        chunk: the most new tokens of a step.
        as_stored: whether the weights count as the model has them.
    """
    used = [device for device in devices if device.names]
    words = ["--how", "decoder", "--stages", str(len(used))]
    if as_stored:
        limits = [memory_word(device.card.limit) for device in used]
        words += ["--memory", ",".join(limits if len(set(limits)) > 1 else limits[:1])]
        words += ["--objective", "tokens", "--chunk", str(chunk)] if _keeps_tokens(made) else []
    return _command(model, {"batch": requests}, words)


def inference_command(model: object, devices: Sequence[FittedDevice], sizes: Mapping[str, int], as_stored: bool) -> str:
    """Return ``splitkit plan`` for inference, within what the caches leave; empty for a model given as an object.

    Args:
        model: the model as the user gave it.
        devices: what each device holds.
        sizes: the sizes of its inputs: those of a step for a configuration.
        as_stored: whether the weights count as the model has them, as `splitkit plan` counts them; otherwise it plans
            without a limit of memory.
    """
    used = [device for device in devices if device.names]
    room = [device.card.limit - device.held.cache for device in used]
    evaluated = [] if isinstance(model, str) and is_program(model) else ["--eval"]
    words = [*evaluated, "--stages", str(len(used))]
    if as_stored and len({device.card.limit for device in used}) == 1:
        words += ["--memory", memory_word(min(room)), "--optimizer", "none"]
    elif as_stored:
        memory = [memory_word(nbytes) for nbytes in room]
        words = [*evaluated, "--policy", f"Stages({len(used)}, memory={memory}, optimizer=None)"]
    return _command(model, sizes, words)


def training_command(
    model: object, found: TrainingFit, devices: Sequence[FittedDevice], sizes: Mapping[str, int], as_stored: bool
) -> str:
    """Return ``splitkit plan`` for a step of the pipeline; arguments as for `inference_command`."""
    words = ["--stages", str(len(devices)), "--schedule", found.schedule, "--microbatches", str(found.microbatches)]
    words += ["--memory", memory_word(min(device.card.limit for device in devices))] if as_stored else []
    words += ["--optimizer", found.optimizer]
    return _command(model, sizes, words + ["--recompute"] * found.recompute)


def _command(model: object, sizes: Mapping[str, int], words: Sequence[str]) -> str:
    return plan_command(os.fspath(model), sizes, words) if isinstance(model, str | os.PathLike) else ""


def plan_command(model: str, sizes: Mapping[str, int], words: Sequence[str]) -> str:
    """Return the command that plans a model with these sizes and options, and writes ``plan.json``."""
    given = ["--size", ",".join(f"{name}={value}" for name, value in sizes.items())] if sizes else []
    return shlex.join(["splitkit", "plan", model, *given, *words, "-o", "plan.json"])


def sizes_of_inputs(model: object, sizes: Mapping[str, int] | None, batch: int, tokens: int) -> Mapping[str, int]:
    """Return the sizes for a configuration: sequences and tokens; for other models those that the user gave."""
    if isinstance(model, str | os.PathLike) and is_config(os.fspath(model)):
        return {"batch": batch, "seq": tokens}
    return sizes or {}
