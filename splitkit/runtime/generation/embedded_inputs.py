"""Lets a model with images compute what its language model reads: embeddings of tokens, and images among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_PASSED_ON = ("past_key_values", "use_cache", "logits_to_keep")


class _ReachedError(Exception):
    """Ends a call of a model when it calls its language model, with the arguments that it gives it."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given


class EmbeddedInputs:
    """The part of a model in front of its language model.

    Args:
        model: the model; its class has its own ``forward``.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def of(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the language model for arguments of the model; it is not run."""
        own = {name: value for name, value in given.items() if name != "self"}
        handle = self._model.get_decoder().register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            type(self._model).forward(self._model, **own)
        except _ReachedError as reached:
            return {**reached.given, **{name: given[name] for name in _PASSED_ON if name in given}}
        finally:
            handle.remove()
        raise AssertionError("the model did not call its decoder")


def _stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _ReachedError(kwargs)
