"""Answers whether a model fits devices, for inference or training, and what would fit instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitkit.checks import count
from splitkit.errors import PolicyError
from splitkit.prices import Optimizer
from splitkit.studies.fit.alternatives import inference_alternatives
from splitkit.studies.fit.blocks import blocks_of
from splitkit.studies.fit.cards import Card, CardList, cards_of
from splitkit.studies.fit.fit_model import FitModel, fit_model
from splitkit.studies.fit.fit_result import Fit, FittedDevice
from splitkit.studies.fit.inference_fit import InferenceFit
from splitkit.studies.fit.layout import Range

_USUAL_TOKENS = 4096
"""The tokens that are asked for by default, or the model's context if that is less."""


def fit(
    model: Any,
    devices: CardList = None,
    *,
    tokens: int | None = None,
    requests: int = 1,
    chunk: int = 512,
    dtype: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Fit:
    """Return whether a model fits devices, what each of them holds, and the most tokens that fit.

    No weights are made or loaded: the model runs on torch's ``meta`` device, and every allocation of a step is
    recorded. 5 % of each device stay free.

    ``print(sk.fit("llama-3-70b/config.json", "4x48GiB", tokens=8192))``

    Args:
        model: the path of a transformers ``config.json`` or of its folder, a configuration, a module on ``meta``, the
            name of an example, or a factory ``"my_model.py:make"`` that returns ``(module, inputs)``.
        devices: ``"2x24GiB"``, ``"rtx-3090,rtx-4090"``, a sequence of sizes, names and `splitkit.costs.Device`;
            ``None``: the GPUs of this machine, or its main memory. The model's blocks lie on them in this order.
        tokens: tokens of each request in the cache; by default 4096, or the model's context if that is less.
        requests: the requests whose caches are held at once.
        chunk: the most new tokens that a step computes, of all requests together; at least one of each.
        dtype: the dtype of the model: ``"float32"``, ``"bfloat16"``, ``"float16"``; or ``"float8"`` or ``"int4"`` for
            the matrices of its layers, with scales; ``None``: as its configuration or factory says.
        sizes: arguments of the example or factory.

    Raises:
        PolicyError: SK302 for an argument that makes no sense.
        CostError: SK321 for an unknown device.
        CaptureError: SK401 for a model that does not run on ``meta``, or has a cache of an unknown kind.
        FileError: SK504 if the configuration cannot be read.
    """
    tokens = None if tokens is None else count("fit", "tokens", tokens)
    requests, chunk, cards = count("fit", "requests", requests), count("fit", "chunk", chunk), cards_of(devices)
    subject = fit_model(model, dtype, sizes)
    return _for_inference(subject, cards, tokens, requests, chunk)


def _wanted(subject: FitModel, tokens: int | None) -> int | None:
    """Return the tokens that are asked for.

    Raises:
        PolicyError: SK302 for tokens of a model that has inputs of its own.
    """
    if subject.example is None:
        return tokens or min(_USUAL_TOKENS, subject.context or _USUAL_TOKENS)
    if tokens is not None:
        remedy = "Give the sizes of its inputs to the factory (--size), or a transformers configuration."
        raise PolicyError("SK302", f"fit: tokens={tokens} for {subject.name}, which has inputs of its own", remedy)
    return None


def _for_inference(
    subject: FitModel, cards: Sequence[Card], tokens: int | None, requests: int, chunk: int
) -> Fit:
    wanted = _wanted(subject, tokens)
    found = InferenceFit(subject, blocks_of(subject.model), requests, chunk, subject.bits)
    most = None if wanted is None else found.most_tokens(cards)
    asked = wanted or 1
    fits = asked <= most if most is not None else found.layout(cards, asked) is not None
    layout = found.even_layout(cards, most if fits and most else asked)
    others = () if fits else inference_alternatives(found, cards, wanted, most)
    return Fit(
        model=subject.name,
        purpose="inference",
        fits=fits,
        wanted=wanted,
        tokens=most,
        context=subject.context,
        requests=requests,
        devices=_rows(found, cards, layout, asked),
        alternatives=others,
        facts={},
        next="",
    )


def _rows(found: InferenceFit, cards: Sequence[Card], layout: Sequence[Range], tokens: int) -> list[FittedDevice]:
    step, line = found.step(tokens), found.line
    return [
        FittedDevice(card, tuple(block.name for block in line[start:end]), found.holds(step, start, end))
        for card, (start, end) in zip(cards, layout, strict=True)
    ]
