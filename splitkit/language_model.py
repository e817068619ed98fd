"""What a model with images gives its language model: embeddings of tokens, with images among them, masks, positions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import nn


class _ReachedError(Exception):
    """Ends a call of a model when it calls its language model, with the arguments that it gives it."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given


@torch.no_grad()
def given_to_language_model(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model gives its language model, which is not run, for arguments of the model's class."""
    try:
        with model.get_decoder().register_forward_pre_hook(_stop, with_kwargs=True):
            type(model).forward(model, **given)
    except _ReachedError as reached:
        return dict(reached.given)
    raise AssertionError("the model did not call its language model")


def _stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise _ReachedError({**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs})
