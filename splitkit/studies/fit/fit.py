"""Answers whether a model fits devices, for inference or training, and what would fit instead."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.fx import Node

from splitkit.checks import count, shown
from splitkit.costs import Costs, default
from splitkit.errors import CaptureError, NoPlanError, PolicyError
from splitkit.frontends.capture_decoder import capture_decoder, example_step
from splitkit.frontends.generate_calls import QUERY
from splitkit.graph.dataflow import Dataflow, analyze, module_path
from splitkit.graph.node_values import cache_bytes
from splitkit.hardware.device_specs import devices as known_devices
from splitkit.pipeline.decoder_step import DecoderSteps
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.purpose import microbatches_of, ranks_of
from splitkit.pipeline.stage_prices import STATE_OF
from splitkit.plans.record import Plan
from splitkit.policies.stages import Stages
from splitkit.search.request import StageRequest
from splitkit.short_repr import brief
from splitkit.solvers.most_fitting import MOST_TOKENS
from splitkit.studies.fit.block_fit import InferenceFit, TrainingFit, weight_bytes
from splitkit.studies.fit.fit_model import (
    MOST_CARDS,
    NARROW,
    Card,
    CardList,
    FitModel,
    cards_of,
    fit_model,
    memory_word,
)
from splitkit.testing.config_files import is_config
from splitkit.testing.factory import is_program
from splitkit.units import size
from splitkit.view.data.report import joined_layers
from splitkit.view.tables import table

if TYPE_CHECKING:
    from rich.table import Table


# The answer whether a model fits: a row for each device, the most tokens, and what would fit instead.


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
    layers = map(str, getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ())
    # Mamba has cache_params, and hybrid models say which of their layers have other states
    alone = all(layer.endswith("attention") and not layer.startswith("linear") for layer in layers)
    return alone and _keeps_tokens(model)


def _keeps_tokens(model: Any) -> bool:
    return "past_key_values" in signature(model.forward).parameters


def _has_known_states(model: Any) -> bool:
    try:
        example_step(model, 1, QUERY + 1)
    except CaptureError:
        return False
    return True


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
            **vars(self),
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
        rows = []
        for number, device in enumerate(self.devices):
            total, limit = device.held.total, device.card.limit
            sizes = [size(nbytes) for nbytes in (*(getattr(device.held, kind) for kind in kinds), total, limit)]
            fits = "yes" if device.fits else f"{size(total - limit)} too much"
            rows.append((number, device.card.name, *sizes, fits, ", ".join(joined_layers(device.names)) or "nothing"))
        return table(titles, rows, (*kinds, "total", "limit"))

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


_USUAL_TOKENS = 4096
"""The tokens that are asked for by default, or the model's context if that is less."""


def fit(
    model: Any,
    devices: CardList = None,
    *,
    tokens: int | None = None,
    requests: int = 1,
    chunk: int = 512,
    train: str | None = None,
    schedule: str = "1f1b",
    microbatches: int | None = None,
    recompute: bool = False,
    dtype: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Fit:
    """Return whether a model fits devices, what each of them holds, and the most tokens that fit.

    No weights are created or loaded. A decoder is captured on torch's ``meta`` device and planned with
    ``Stages(objective="tokens")``, so that plan and answer are the same. Any other model, and one with quantized
    weights, runs on ``meta``, every allocation of a step is recorded, and it is cut between its layers (the items of
    its lists of modules), such that the most tokens fit. 5 % of each device stays free::

        print(sk.fit("llama-3-70b/config.json", "8x24GiB", tokens=8192))
        sk.fit("config.json", ["rtx-3090", "rtx-4090"], train="adamw", tokens=2048).tokens

    Args:
        model: the path of a transformers ``config.json`` or of its folder, a configuration, a model of transformers on
            ``meta``, the name of an example, or a factory ``"my_model.py:make"`` that returns ``(module, inputs)``.
        devices: ``"2x24GiB"``, ``"rtx-3090,rtx-4090"``, a sequence of sizes, names and `splitkit.costs.Device`;
            ``None``: the GPUs of this machine, or its main memory. The model's layers are placed on them in this order.
        tokens: tokens of each request in the cache, or of each sequence in training; by default 4096, or the model's
            context if that is less.
        requests: the requests whose caches are held at once, or the sequences of a microbatch.
        chunk: for inference, the most new tokens that a step computes, of all requests together; at least one of each.
        train: the optimizer, for training: ``"adamw"``, ``"adam"``, ``"momentum"``, ``"sgd"``; ``None``: inference.
        schedule: for training, the schedule of the pipeline, with one stage on each device: ``"1f1b"``, ``"gpipe"``.
        microbatches: for training, the microbatches in a step; by default two for each device.
        recompute: for training, whether each stage saves only its inputs and is recomputed in backward.
        dtype: the dtype of the model: ``"float32"``, ``"bfloat16"``, ``"float16"``; or ``"float8"`` or ``"int4"`` for
            the matrices of its layers, with scales; ``None``: as its configuration or factory says. A quantized
            checkpoint has the bytes of the safetensors files beside its configuration, or of the format that it names.
        sizes: arguments of the example or factory.

    Raises:
        PolicyError: SK302 for an invalid argument.
        CostError: SK321 for an unknown device.
        ScheduleError: SK330 for an unknown schedule.
        CaptureError: SK401 for a model that does not run on ``meta``, or has a cache of an unknown kind.
        FileError: SK504 if the configuration cannot be read; SK504, SK505 or SK507 for the files of a quantized
            checkpoint in a format that only they tell the size of.
    """
    tokens = None if tokens is None else count("fit", "tokens", tokens)
    requests, chunk, cards = count("fit", "requests", requests), count("fit", "chunk", chunk), cards_of(devices)
    if train is None:
        if given := "recompute" if recompute else "microbatches" if microbatches is not None else "":
            raise PolicyError("SK302", f"fit: {given} is for training only", "Name the optimizer: train='adamw'.")
        subject = fit_model(model, dtype, sizes)
        return _for_inference(model, subject, cards, tokens, requests, chunk, dtype, sizes)
    microbatches = microbatches_of(microbatches, len(cards))
    _check_training(train, schedule, microbatches, len(cards))
    subject = fit_model(model, dtype, sizes)
    if subject.bits is not None or subject.stored:
        remedy = "Give dtype='bfloat16' (--dtype bfloat16)."
        raise PolicyError("SK302", f"fit: quantized weights of {subject.name} cannot be trained", remedy)
    found = TrainingFit(subject, train, schedule, microbatches, requests, recompute)
    return _for_training(model, found, cards, tokens, dtype, sizes)


def _check_training(train: str, schedule: str, microbatches: int, devices: int) -> None:
    if train not in STATE_OF:
        raise PolicyError("SK302", f"fit: train={shown(train)}", f"Name an optimizer: {', '.join(STATE_OF)}.")
    microbatches = count("fit", "microbatches", microbatches)
    if devices > 1 and ranks_of(schedule, microbatches, devices) != tuple(range(devices)):
        remedy = "Use 1f1b or gpipe; `splitkit sweep` compares other schedules."
        raise PolicyError("SK302", f"fit: {schedule} does not run one stage per device", remedy)


def _wanted(subject: FitModel, tokens: int | None) -> int | None:
    """Return the tokens that are asked for.

    Raises:
        PolicyError: SK302 for tokens of a model that has inputs of its own, or more than it has positions.
    """
    if tokens is not None and subject.longest is not None and tokens > subject.longest:
        remedy = f"Ask for {subject.longest} or less."
        raise PolicyError("SK302", f"fit: tokens={tokens}, and {subject.name} has {subject.longest} positions", remedy)
    if subject.example is None:
        return tokens or min(_USUAL_TOKENS, subject.context or _USUAL_TOKENS)
    if tokens is not None:
        remedy = "Give the sizes of its inputs to the factory (--size), or a transformers configuration."
        raise PolicyError("SK302", f"fit: tokens={tokens} for {subject.name}, which defines its own inputs", remedy)
    return None


def _for_inference(
    model: Any,
    subject: FitModel,
    cards: Sequence[Card],
    tokens: int | None,
    requests: int,
    chunk: int,
    dtype: str | None,
    sizes: Mapping[str, int] | None,
) -> Fit:
    wanted = _wanted(subject, tokens)
    found = InferenceFit(subject, requests, chunk)
    asked = wanted or 1
    decoder = DecoderFit(subject, requests, chunk)
    held = weight_bytes(subject.blocks, subject.bits) <= sum(card.limit for card in cards)
    planned = wanted is not None and held and decoder.is_planned
    plan = decoder.plan(cards) if planned else None
    if plan is not None and plan.claim is not None:
        most: int | None = min(int(plan.claim.value) // requests, subject.longest or MOST_TOKENS)
    else:
        most = None if wanted is None else 0 if planned or not held else found.most_tokens(cards)
    fits = asked <= most if most is not None else found.layout(cards, asked) is not None
    if fits and plan is not None:
        devices = decoder.devices(cards, plan, asked)
    else:
        layout, step, line = found.even_layout(cards, most if fits and most else asked), found.step(asked), found.line
        devices = [
            FittedDevice(card, tuple(block.name for block in line[i:j]), found.holds(step, i, j))
            for card, (i, j) in zip(cards, layout, strict=True)
        ]

    def cast(name: str) -> InferenceFit:
        return InferenceFit(fit_model(model, name, sizes), requests, chunk)

    others = [] if fits else alternatives(found, cards, asked, most, cast)
    command, as_stored = "", dtype is None and not subject.stored
    if fits and most is not None and is_decoder(model, subject.model):
        command = decoder_command(model, subject.model, devices, requests, chunk, as_stored)
    elif fits:
        given = sizes_of_inputs(model, sizes, requests, min(asked, max(1, chunk // requests)))
        command = inference_command(model, devices, given, as_stored)
    return Fit(subject.name, "inference", fits, wanted, most, subject.context, requests, devices, others, command)


def _for_training(
    model: Any,
    found: TrainingFit,
    cards: Sequence[Card],
    tokens: int | None,
    dtype: str | None,
    sizes: Mapping[str, int] | None,
) -> Fit:
    subject, wanted = found.subject, _wanted(found.subject, tokens)
    most = None if wanted is None else found.most_tokens(cards)
    asked = wanted or 1
    fits = asked <= most if most is not None else found.layout(cards, asked) is not None
    devices = _training_rows(found, cards, asked)

    def cast(name: str) -> TrainingFit:
        return found.changed(keep=False, subject=fit_model(model, name, sizes))

    others = [] if fits else alternatives(found, cards, asked, most, cast)
    given = sizes_of_inputs(model, sizes, found.sequences, asked)
    command = training_command(model, found, devices, given, dtype is None) if fits else ""
    purpose, requests = f"training with {found.optimizer}", found.sequences
    return Fit(subject.name, purpose, fits, wanted, most, subject.context, requests, devices, others, command)


def _training_rows(found: TrainingFit, cards: Sequence[Card], tokens: int) -> list[FittedDevice]:
    step, flying, line = found.step(tokens), found.in_flight(len(cards)), found.line
    rows = []
    for device, (card, (i, j)) in enumerate(zip(cards, found.even_layout(cards, tokens), strict=True)):
        held, saved = found.holds(step, flying[device], i, j), found.saved(step, i, j)
        budget = max(0, saved + (card.limit - held.total) // flying[device])
        names = tuple(block.name for block in line[i:j])
        rows.append(FittedDevice(card, names, held, flying[device], saved, budget))
    return rows


# Asks the planner how many tokens a decoder's stages hold: the plan that `splitkit plan` then makes.


@dataclass(frozen=True, eq=False)
class DecoderFit:
    """Answers for a decoder that `capture_decoder` takes, with weights as the model has them.

    Attributes:
        subject: the model.
        requests: the number of requests whose caches are held.
        chunk: the most new tokens that a step computes, of all requests together.
    """

    subject: FitModel
    requests: int
    chunk: int

    @cached_property
    def flow(self) -> Dataflow:
        """Facts about the graph of a step."""
        return analyze(capture_decoder(self.subject.in_mode(training=False), batch=self.requests))

    @property
    def is_planned(self) -> bool:
        """Whether the planner counts all that generation takes, and its caches grow; else only a run tells."""
        if self.subject.stored or self.subject.bits is not None or not has_attention_alone(self.subject.model):
            return False
        try:
            return self._steps is not None and bool(self._cached)
        except CaptureError:
            return False

    @cached_property
    def _costs(self) -> Costs:
        return default(self.flow)

    @cached_property
    def _steps(self) -> DecoderSteps | None:
        return DecoderSteps.of(self.flow, self._costs, self.chunk)

    @cached_property
    def _cached(self) -> Mapping[Node, int]:
        return cache_bytes(self.flow)

    def plan(self, cards: Sequence[Card]) -> Plan | None:
        """Return the plan with room for the most tokens, one stage on each device; ``None`` if none has room for one.

        Its claim counts the tokens of all requests.
        """
        limits = [card.limit for card in cards]
        policy = Stages(len(cards), memory=limits, objective="tokens", chunk=self.chunk)
        try:
            return policy.assign(self.flow, self._costs)
        except NoPlanError:
            return None

    def devices(self, cards: Sequence[Card], plan: Plan, tokens: int) -> list[FittedDevice]:
        """Return what each device holds with so many tokens of each request."""
        count = tokens * self.requests
        cache = {node: count * nbytes for node, nbytes in self._cached.items()}
        step = StageRequest(None, self.flow, self._costs, optimizer=None, cache=cache, steps=self._steps, tokens=count)
        found = []
        for key, (card, held) in enumerate(zip(cards, step.held(plan), strict=True)):
            paths = {f"{module_path(node)}." for node in self.flow.nodes if plan.home(node) == key}
            inside = [b.name for b in self.subject.blocks if any(path.startswith(f"{b.name}.") for path in paths)]
            found.append(FittedDevice(card, tuple(inside), held))
        return found


# Finds what would fit where a model does not: each change is planned again, and told with its number.


_MOST_MORE = 64
"""The most devices that are added."""

Found = TypeVar("Found", InferenceFit, TrainingFit)


def alternatives(
    found: Found, cards: Sequence[Card], asked: int, most: int | None, cast: Callable[[str], Found]
) -> list[Alternative]:
    """Return the changes with which a step fits: tokens, devices, lower precision, and what training can do without.

    Args:
        found: the model.
        cards: the devices on which it does not fit.
        asked: the tokens that are asked for.
        most: the most tokens that fit.
        cast: gives the model in another dtype.
    """
    formats: list[str] = _halved(found.subject)
    if isinstance(found, InferenceFit):
        formats += [name for name, bits in NARROW.items() if found.subject.bits is None or bits < found.subject.bits]
    return [
        *_fewer_tokens(found, cards, most),
        *(_recomputed(found, cards, asked) if isinstance(found, TrainingFit) else ()),
        *_more_devices(found, cards, asked),
        *_lower_precision(found, cards, asked, cast, formats),
        *(_other_optimizer(found, cards, asked) if isinstance(found, TrainingFit) else ()),
    ]


def _fewer_tokens(found: InferenceFit | TrainingFit, cards: Sequence[Card], most: int | None) -> Iterator[Alternative]:
    if most:
        what = f"{most:,} tokens instead, the most that fit (--tokens {most})"
        yield Alternative("tokens", most, what, _fullest(found, cards, most))


def _more_devices(
    found: InferenceFit | TrainingFit, cards: Sequence[Card], tokens: int, also: str = ""
) -> Iterator[Alternative]:
    largest: Card = max(cards, key=lambda card: card.memory)
    most = min(_MOST_MORE, MOST_CARDS - len(cards))
    for more in range(1, most + 1):
        several: list[Card] = [*cards, *[largest] * more]
        if found.layout(several, tokens) is not None:
            what = f"{more} more device{'s' if more > 1 else ''} like {largest.name}: {len(several)} in all{also}"
            yield Alternative("devices", len(several), what, _fullest(found, several, tokens))
            return


def _halved(subject: FitModel) -> list[str]:
    """Return bfloat16 for a model with weights in float32."""
    wide = any(parameter.dtype in (torch.float32, torch.float64) for parameter in subject.model.parameters())
    return ["bfloat16"] if wide and subject.bits is None and not subject.stored else []


def _lower_precision(
    found: Found, cards: Sequence[Card], tokens: int, cast: Callable[[str], Found], formats: Sequence[str]
) -> Iterator[Alternative]:
    for name in formats:
        other = cast(name)
        try:
            fits = other.layout(cards, tokens) is not None
        except CaptureError:  # code that makes tensors of its own dtype beside the weights
            continue
        if fits:
            weights = weight_bytes(other.subject.blocks, NARROW.get(name))
            what = f"weights in {name}, {size(weights)} in all (--dtype {name})"
            yield Alternative("dtype", name, what, _fullest(other, cards, tokens))


def _recomputed(found: TrainingFit, cards: Sequence[Card], tokens: int) -> Iterator[Alternative]:
    if found.recompute:
        return
    again = found.changed(recompute=True)
    if again.layout(cards, tokens) is not None:
        what = "stages that save only their inputs and recompute the rest (--recompute)"
        yield Alternative("recompute", 1, what, _fullest(again, cards, tokens))
    else:
        yield from _more_devices(again, cards, tokens, " with --recompute")


def _other_optimizer(found: TrainingFit, cards: Sequence[Card], tokens: int) -> Iterator[Alternative]:
    for name in ("momentum", "sgd") if found.optimizer in ("adam", "adamw") else ():
        other = found.changed(optimizer=name)
        if other.layout(cards, tokens) is not None:
            what = f"the optimizer {name}, which has less state (--train {name})"
            yield Alternative("optimizer", name, what, _fullest(other, cards, tokens))
            return


def _fullest(found: InferenceFit | TrainingFit, cards: Sequence[Card], tokens: int) -> int:
    """Return the bytes on the device that is the fullest with the most even layout."""
    held: list[ByteBreakdown] = found.rows(cards, tokens)
    return max(zip(held, cards, strict=True), key=lambda one: one[0].total / one[1].limit)[0].total
