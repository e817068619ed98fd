"""Finds what would fit where a model does not: each change is planned again, and told with its number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from splitkit.studies.fit.cards import Card
from splitkit.studies.fit.fit_model import NARROW
from splitkit.studies.fit.fit_result import Alternative
from splitkit.studies.fit.inference_fit import InferenceFit, weight_bytes
from splitkit.units import size

_MOST_MORE = 64
"""The most devices that are added."""


def inference_alternatives(
    found: InferenceFit, cards: Sequence[Card], wanted: int | None, most: int | None
) -> list[Alternative]:
    """Return the changes with which a step fits: tokens, devices, formats of the weights, offloading.

    Args:
        found: the model.
        cards: the devices on which it does not fit.
        wanted: the tokens that are asked for.
        most: the most tokens that fit.
    """
    asked = wanted or 1
    return [
        *_fewer_tokens(found, cards, most),
        *_more_devices(found, cards, asked),
        *_narrower(found, cards, asked),
        *_offloaded(found, cards, asked),
    ]


def _fewer_tokens(found: InferenceFit, cards: Sequence[Card], most: int | None) -> Iterator[Alternative]:
    if most:
        what = f"{most:,} tokens instead, the most that fit (--tokens {most})"
        yield Alternative("tokens", most, what, _fullest(found, cards, most))


def _more_devices(found: InferenceFit, cards: Sequence[Card], tokens: int) -> Iterator[Alternative]:
    largest = max(cards, key=lambda card: card.memory)
    for more in range(1, _MOST_MORE + 1):
        several = [*cards, *[largest] * more]
        if found.layout(several, tokens) is not None:
            what = f"{more} more device{'s' if more > 1 else ''} like {largest.name}: {len(several)} in all"
            yield Alternative("devices", len(several), what, _fullest(found, several, tokens))
            return


def _narrower(found: InferenceFit, cards: Sequence[Card], tokens: int) -> Iterator[Alternative]:
    for name, bits in NARROW.items():
        if found.bits is not None and found.bits <= bits:
            continue
        narrow = replace(found, bits=bits)
        if narrow.layout(cards, tokens) is not None:
            weights = size(weight_bytes(narrow.blocks, bits))
            what = f"{bits}-bit weights of the layers, {weights} in all (--dtype {name})"
            yield Alternative("dtype", name, what, _fullest(narrow, cards, tokens))


def _offloaded(found: InferenceFit, cards: Sequence[Card], tokens: int) -> Iterator[Alternative]:
    """Find the fewest blocks whose weights must stay in main memory, evenly spread over the model."""
    order, count = found.step(tokens).order, len(found.blocks)
    heavy = [n for n in order if weight_bytes([found.blocks[n]])]
    low, high = 0, len(heavy)
    if _without(found, heavy, high, count).layout(cards, tokens) is None:
        return
    while high - low > 1:
        middle = (low + high) // 2
        fits = _without(found, heavy, middle, count).layout(cards, tokens) is not None
        low, high = (low, middle) if fits else (middle, high)
    less = _without(found, heavy, high, count)
    assert less.resident is not None
    moved = weight_bytes([block for block, stays in zip(found.blocks, less.resident, strict=True) if not stays], found.bits)
    what = f"{size(moved)} of weights in main memory ({high} of {len(heavy)} blocks), copied to the devices in each step"
    yield Alternative("offload", moved, what, _fullest(less, cards, tokens))


def _without(found: InferenceFit, heavy: Sequence[int], number: int, count: int) -> InferenceFit:
    """Return the fit with the weights of so many blocks away from the devices."""
    away = {heavy[i * len(heavy) // number] for i in range(number)} if number else set()
    return replace(found, resident=[n not in away for n in range(count)])


def _fullest(found: InferenceFit, cards: Sequence[Card], tokens: int) -> int:
    """Return the bytes on the device that is the fullest with the layout that fits."""
    layout, step = found.layout(cards, tokens), found.step(tokens)
    assert layout is not None
    held = [(found.holds(step, i, j).total, card.limit) for card, (i, j) in zip(cards, layout, strict=True)]
    return max(held, key=lambda one: one[0] / one[1])[0]
