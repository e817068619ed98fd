"""Makes the model that should fit, on ``meta``: from a transformers configuration, an example or a user's factory."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from splitkit._torch import pytree
from splitkit.errors import CaptureError, PolicyError
from splitkit.studies.fit.stored_weights import stored_bytes
from splitkit.testing import models
from splitkit.testing.config_files import checkpoint_beside, is_config
from splitkit.testing.config_models import config_at, config_dtype, config_model

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""The dtypes in which a model may compute."""
NARROW: Mapping[str, int] = {"float8": 8, "int4": 4}
"""Formats of the weights only -> bits a value; the model computes in bfloat16, or its own 16 bits."""


@dataclass(frozen=True, eq=False)
class FitModel:
    """A model without weights.

    Attributes:
        name: how the user named it.
        model: the module, on ``meta``.
        config: its transformers configuration, if it has one.
        example: positional and keyword inputs of a user's model; ``None`` if the inputs follow from the configuration.
        bits: bits a value of the weights; ``None``: as the model has them.
        stored: identity of memory -> its bytes in a quantized checkpoint; empty for any other.
        cast: the dtype to which a user's model and its inputs were cast, ``""`` if they were not.
    """

    name: str
    model: nn.Module
    config: Any
    example: tuple[tuple[Any, ...], dict[str, Any]] | None
    bits: int | None
    stored: Mapping[int, int] = field(default_factory=dict)
    cast: str = ""

    def in_mode(self, training: bool) -> nn.Module:
        """Return the model in training or evaluation mode; an exported program keeps its own."""
        with suppress(NotImplementedError):
            self.model.train(training)
        return self.model

    def failed(self, does: str, amount: str, error: Exception, needs: str) -> CaptureError:
        """Return the SK401 for a run on ``meta`` that failed.

        Args:
            does: what it does not: ``"run"`` or ``"train"``.
            amount: the inputs of a model with a configuration.
            error: how it failed.
            needs: the remedy.
        """
        first = (str(error).strip().splitlines() or [""])[0]
        inputs = amount if self.example is None else f"the inputs of its factory{self.cast and f' in {self.cast}'}"
        remedy = f"Leave out dtype, or cast inside the model: it does not run in {self.cast}." if self.cast else needs
        reason = f"{self.name} does not {does} on meta with {inputs}: {type(error).__name__}: {first}"
        return CaptureError("SK401", reason, remedy)

    @property
    def context(self) -> int | None:
        """The most tokens of a sequence that the model is made for, if the configuration says so."""
        if self.config is None:
            return None
        names = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len")
        text = self.config.get_text_config(decoder=True)
        found = [value for name in names if isinstance(value := getattr(text, name, None), int)]
        return found[0] if found else None

    @property
    def longest(self) -> int | None:
        """The most tokens that the model runs with: its context if it has an embedding of each position."""
        context = self.context
        tokens = {id(table.weight) for table in _token_tables(self.model)}
        tables = [one for one in self.model.modules() if isinstance(one, nn.Embedding) and id(one.weight) not in tokens]
        if context is not None and any(context <= table.num_embeddings <= context + 2 for table in tables):
            return context
        return None


def _token_tables(model: nn.Module) -> list[Any]:
    """Return the embeddings of tokens, of which there may be as many as positions (Mistral 7B: 32,768 of both)."""
    found = []
    for module in model.modules():
        with suppress(AttributeError, NotImplementedError):
            table = getattr(module, "get_input_embeddings", lambda: None)()
            found += [table] if isinstance(table, nn.Embedding) else []
    return found


def fit_model(model: object, dtype: str | None, sizes: Mapping[str, int] | None = None) -> FitModel:
    """Return the model on ``meta``.

    Args:
        model: a path of a configuration, a configuration, a module, an example's name or ``place:factory``.
        dtype: one of `DTYPES` or `NARROW`; ``None``: the dtype that the configuration names, or the factory makes.
        sizes: arguments of the example or factory.

    Raises:
        PolicyError: SK302 for an unknown dtype.
        CaptureError: SK401 if the model cannot be made, SK402 or SK403 as for `splitkit.testing.models.load`.
        FileError: SK504 if the configuration cannot be read; else as `stored_bytes`.
    """
    if dtype is not None and dtype not in DTYPES and dtype not in NARROW:
        raise PolicyError("SK302", f"fit: dtype is {dtype!r}", f"Use one of {', '.join((*DTYPES, *NARROW))}.")
    bits = None if dtype is None else NARROW.get(dtype)
    configured = not isinstance(model, str) or is_config(model)
    if configured and sizes:
        raise PolicyError("SK302", f"fit: sizes={dict(sizes)} of a configuration", "Give tokens and requests instead.")
    if isinstance(model, nn.Module):
        return FitModel(type(model).__name__, _cast(_copied(model), dtype), model.config, None, bits)
    if isinstance(model, str | os.PathLike) and is_config(os.fspath(model)):
        path = os.fspath(model)
        return _from_config(path, config_at(path), dtype, checkpoint_beside(path))
    if hasattr(model, "model_type"):
        return _from_config(str(model.model_type), model, dtype)
    if not isinstance(model, str):
        raise PolicyError(
            "SK302", f"fit: the model is a {type(model).__name__}", "Give a path of a config.json, or place:factory."
        )
    with torch.device("meta"), torch.random.fork_rng():
        made = models.load(model, **(sizes or {}))
    found = _cast(_moved(made.model), dtype)
    inputs = pytree.tree_map_only(torch.Tensor, lambda one: _in(dtype, one.to("meta")), (made.args, made.kwargs))
    cast = dtype if dtype in DTYPES else None
    return FitModel(model, found, getattr(found, "config", None), inputs, bits, cast=cast or "")


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of a user's module, which must be on ``meta`` and have a configuration that tells its inputs."""
    real = next((name for name, tensor in model.named_parameters() if not tensor.is_meta), None)
    if real is not None or not hasattr(model, "config"):
        found = "has no config" if real is None else f"has real weights, such as {real}"
        remedy = "Give its config.json, a model of transformers made under torch.device('meta'), or place:factory."
        raise PolicyError("SK302", f"fit: the {type(model).__name__} {found}", remedy)
    return copy.deepcopy(model)


def _cast(model: nn.Module, dtype: str | None) -> nn.Module:
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = _in(dtype, tensor.data)
    return model


def _in(dtype: str | None, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in a dtype of `DTYPES` if it has floats; for other names, as it is."""
    wanted = DTYPES.get(dtype or "")
    return tensor if wanted is None or not tensor.is_floating_point() else tensor.to(wanted)


def _moved(model: nn.Module) -> nn.Module:
    """Drop the values of weights that a factory made on another device; what is tied stays tied."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_meta:
                made = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                setattr(module, name, moved.setdefault(id(parameter), made))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to("meta"))
    return model


def _from_config(name: str, config: Any, dtype: str | None, files: str = "") -> FitModel:
    own, quantized = config_dtype(config), getattr(config, "quantization_config", None) is not None
    if own == torch.float32 and (dtype in NARROW or (dtype is None and quantized)):
        own = torch.bfloat16
    model = config_model(config, DTYPES.get(dtype or "", own))
    stored = stored_bytes(name, model, config, files) if dtype is None else {}
    return FitModel(name, model, config, None, NARROW.get(dtype or ""), stored)
