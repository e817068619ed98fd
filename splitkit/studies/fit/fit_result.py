"""The answer whether a model fits: a row for each device, the most tokens, and what would fit instead."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

from splitkit.errors import CaptureError
from splitkit.frontends.capture_decoder import example_step
from splitkit.frontends.generate_calls import QUERY
from splitkit.hardware.device_specs import devices as known_devices
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.short_repr import brief
from splitkit.solvers.most_fitting import MOST_TOKENS
from splitkit.studies.fit.layout import Card, memory_word
from splitkit.studies.fit.training_fit import TrainingFit
from splitkit.testing.config_files import is_config
from splitkit.testing.factory import is_program
from splitkit.units import size
from splitkit.view.data.report import joined_layers
from splitkit.view.tables import table

if TYPE_CHECKING:
    from rich.table import Table


def is_decoder(given: object, model: Any) -> bool:
    """Whether a model was given as a configuration, and `splitkit.capture_decoder` takes it."""
    named = isinstance(given, str | os.PathLike) and is_config(os.fspath(given))
    generates = getattr(model, "can_generate", lambda: False)()
    return named and generates and (_keeps_tokens_alone(model) or _has_known_states(model))


def has_attention_alone(model: Any) -> bool:
    """Whether a model is a decoder of tokens with nothing in front of it, whose layers keep keys and values alone."""
    generates = getattr(model, "can_generate", lambda: False)()
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
    words = ["--how", "decoder", *_where(used)]
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
    words = [*evaluated, *_where(used)]
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
    used = [device for device in devices if device.names]
    words = [*_where(used), "--schedule", found.schedule, "--microbatches", str(found.microbatches)]
    words += ["--memory", memory_word(min(device.card.limit for device in used))] if as_stored else []
    words += ["--optimizer", found.optimizer]
    return _command(model, sizes, words + ["--recompute"] * found.recompute)


def _where(used: Sequence[FittedDevice]) -> list[str]:
    """Return the one device that has all of the model, if it is a known one, or else the number of stages."""
    names = {device.card.name for device in used} & known_devices().keys()
    return ["--devices", *names] if len(used) == 1 and names else ["--stages", str(len(used))]


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


# Writes the command that plans a model as it was fitted.


@dataclass(frozen=True)
class FittedDevice:
    """One device and what it holds.

    Attributes:
        card: the device.
        names: the paths of the modules that it runs.
        held: the bytes.
        in_flight: in training, the most microbatches whose saved values it holds.
        saved: in training, the bytes that each of them saves for backward.
        budget: in training, the bytes that each of them could save within the limit, beside all else.
    """

    card: Card
    names: tuple[str, ...]
    held: ByteBreakdown
    in_flight: int = 0
    saved: int = 0
    budget: int = 0

    @property
    def fits(self) -> bool:
        """Whether all of it is within the limit."""
        return self.held.total <= self.card.limit

    def to_dict(self) -> dict[str, Any]:
        """Return the device as plain data, in bytes."""
        training = {"in_flight": self.in_flight, "saved": self.saved, "budget": self.budget} if self.in_flight else {}
        return {
            "name": self.card.name,
            "memory": self.card.memory,
            "limit": self.card.limit,
            **self.held.to_dict(),
            "fits": self.fits,
            "modules": ", ".join(joined_layers(self.names)),
            **training,
        }


@dataclass(frozen=True)
class Alternative:
    """A change with which the model fits, planned again with it.

    Attributes:
        change: what changes: ``"devices"``, ``"tokens"``, ``"dtype"``, ``"recompute"`` ...
        value: the new value, such as a number of devices or tokens, or bytes.
        text: the change in words, with its number.
        fullest: the bytes on the device that is the fullest relative to its limit.
    """

    change: str
    value: int | str
    text: str
    fullest: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Fit:
    """Whether a model fits devices, and how.

    Attributes:
        model: the model as the user named it.
        purpose: ``"inference"``, or ``"training with adamw"``.
        fits: whether it fits with the tokens and requests that were asked for.
        wanted: the tokens of each request, or of each sequence of a microbatch; ``None`` for a model with inputs of
            its own.
        tokens: the most that fit, with the best cuts between blocks; ``None`` for a model with inputs of its own.
        context: the most tokens that the model is made for, if its configuration says so.
        requests: the requests at once, or the sequences of a microbatch.
        devices: what each device runs and holds.
        alternatives: changes with which it fits, if it does not.
        next: the next command; empty if nothing fits, or the model was given as an object.
    """

    model: str
    purpose: str
    fits: bool
    wanted: int | None
    tokens: int | None
    context: int | None
    requests: int
    devices: Sequence[FittedDevice]
    alternatives: Sequence[Alternative]
    next: str

    __repr__ = brief

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; all sizes are bytes."""
        return {
            "model": self.model,
            "purpose": self.purpose,
            "fits": self.fits,
            "wanted": self.wanted,
            "tokens": self.tokens,
            "context": self.context,
            "requests": self.requests,
            "devices": [device.to_dict() for device in self.devices],
            "alternatives": [alternative.to_dict() for alternative in self.alternatives],
            "next": self.next or None,
        }

    def table(self) -> Table:
        """Return a row for each device, for `rich`."""
        training = any(device.held.gradients for device in self.devices)
        kinds = (
            ("weights", "gradients", "optimizer", "activations") if training else ("weights", "cache", "activations")
        )
        titles = ("", "device", *kinds, "total", "limit", "fits", "modules")
        rows = [self._cells(number, kinds) for number in range(len(self.devices))]
        return table(titles, rows, (*kinds, "total", "limit"))

    def _cells(self, number: int, kinds: Sequence[str]) -> tuple[str, ...]:
        device = self.devices[number]
        sizes = [size(getattr(device.held, kind)) for kind in kinds]
        fits = "yes" if device.fits else f"{size(device.held.total - device.card.limit)} too much"
        names = ", ".join(joined_layers(device.names)) or "nothing"
        return str(number), device.card.name, *sizes, size(device.held.total), size(device.card.limit), fits, names

    def lines(self) -> list[str]:
        """Return the verdict, and what would fit, as lines of text."""
        verdict = f"{self.model} {'fits' if self.fits else 'does not fit'}: {self.purpose}{self._amount()}"
        instead = ["it would fit with", *(f"  {one.text}" for one in self.alternatives)] if self.alternatives else []
        return [verdict, *self._most(), *([] if self.fits else instead)]

    def _amount(self) -> str:
        if self.wanted is None:
            return ", with the inputs of its factory"
        return f" of {self.requests} x {self.wanted:,} tokens"

    def _most(self) -> list[str]:
        """Say how many tokens fit at most."""
        if not self.tokens:
            return [] if self.tokens is None else ["not even 1 token fits"]
        least = "at least " if self.tokens == MOST_TOKENS else ""
        context = "" if self.context is None else f"; the model is made for {self.context:,}"
        return [f"the most that fit: {least}{self.requests} x {self.tokens:,} tokens{context}"]

    def __str__(self) -> str:
        from splitkit.view.console import to_text

        return "\n".join(
            [self.lines()[0], to_text(self.table()), *self.lines()[1:], *([self.next] if self.next else [])]
        )
