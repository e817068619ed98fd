"""Finds what would fit where a model does not: each change is planned again, and told with its number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from splitkit.errors import CaptureError
from splitkit.studies.fit.cards import MOST_CARDS, Card
from splitkit.studies.fit.fit_model import NARROW, FitModel
from splitkit.studies.fit.fit_result import Alternative
from splitkit.studies.fit.inference_fit import InferenceFit, weight_bytes
from splitkit.studies.fit.layout import HeldBytes
from splitkit.studies.fit.training_fit import TrainingFit
from splitkit.units import size

_MOST_MORE = 64
"""The most devices that are added."""

Found = TypeVar("Found", InferenceFit, TrainingFit)


def inference_alternatives(
    found: InferenceFit,
    cards: Sequence[Card],
    wanted: int | None,
    most: int | None,
    cast: Callable[[str], InferenceFit],
) -> list[Alternative]:
    """Return the changes with which a step fits: tokens, devices, lower precision.

    Args:
        found: the model.
        cards: the devices on which it does not fit.
        wanted: the tokens that are asked for.
        most: the most tokens that fit.
        cast: gives the model in another dtype.
    """
    asked = wanted or 1
    formats = [name for name, bits in NARROW.items() if found.bits is None or bits < found.bits]
    return [
        *_fewer_tokens(found, cards, most),
        *_more_devices(found, cards, asked),
        *_lower_precision(found, cards, asked, cast, [*_halved(found.subject), *formats]),
    ]


def training_alternatives(
    found: TrainingFit,
    cards: Sequence[Card],
    wanted: int | None,
    most: int | None,
    cast: Callable[[str], TrainingFit],
) -> list[Alternative]:
    """Return the changes with which a step of training fits; arguments as for `inference_alternatives`."""
    asked = wanted or 1
    return [
        *_fewer_tokens(found, cards, most),
        *_recomputed(found, cards, asked),
        *_more_devices(found, cards, asked),
        *_lower_precision(found, cards, asked, cast, _halved(found.subject)),
        *_other_optimizer(found, cards, asked),
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
            weights = weight_bytes(other.blocks, NARROW.get(name))
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
    held: list[HeldBytes] = found.rows(cards, tokens)
    return max(zip(held, cards, strict=True), key=lambda one: one[0].total / one[1].limit)[0].total
