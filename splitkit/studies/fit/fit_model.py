"""Makes the model that should fit, on ``meta``: from a transformers configuration, an example or a user's factory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splitkit._torch import pytree
from splitkit.errors import CaptureError, FileError, PolicyError
from splitkit.testing import models

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
    """

    name: str
    model: nn.Module
    config: Any
    example: tuple[tuple[Any, ...], dict[str, Any]] | None
    bits: int | None

    @property
    def context(self) -> int | None:
        """The most tokens of a sequence that the model is made for, if the configuration says so."""
        if self.config is None:
            return None
        names = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len")
        text = self.config.get_text_config(decoder=True)
        found = [value for name in names if isinstance(value := getattr(text, name, None), int)]
        return found[0] if found else None


def is_config(spec: object) -> bool:
    """Return whether a text names a ``config.json`` or a folder with one."""
    if isinstance(spec, os.PathLike):
        spec = os.fspath(spec)
    return isinstance(spec, str) and (spec.endswith(".json") or (Path(spec) / "config.json").is_file())


def fit_model(model: object, dtype: str | None, sizes: Mapping[str, int] | None = None) -> FitModel:
    """Return the model on ``meta``.

    Args:
        model: a path of a configuration, a configuration, a module, an example's name or ``place:factory``.
        dtype: one of `DTYPES` or `NARROW`; ``None``: the dtype that the configuration names, or the factory makes.
        sizes: arguments of the example or factory.

    Raises:
        PolicyError: SK302 for an unknown dtype.
        CaptureError: SK401 if the model cannot be made, SK402 or SK403 as for `splitkit.testing.models.load`.
        FileError: SK504 if the configuration cannot be read.
    """
    if dtype is not None and dtype not in DTYPES and dtype not in NARROW:
        raise PolicyError("SK302", f"fit: dtype is {dtype!r}", f"Use one of {', '.join((*DTYPES, *NARROW))}.")
    bits = None if dtype is None else NARROW.get(dtype)
    if isinstance(model, nn.Module):
        return FitModel(type(model).__name__, _cast(model, dtype), getattr(model, "config", None), None, bits)
    if is_config(model):
        path, model = str(model), config_at(str(model))
        return _from_config(path, model, dtype)
    if hasattr(model, "model_type"):
        return _from_config(str(model.model_type), model, dtype)
    if not isinstance(model, str):
        raise PolicyError(
            "SK302", f"fit: the model is a {type(model).__name__}", "Give a path of a config.json, or place:factory."
        )
    with torch.device("meta"), torch.random.fork_rng():
        made = models.load(model, **(sizes or {}))
    found = _cast(made.model, dtype)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda one: one.to("meta"), (made.args, made.kwargs))
    return FitModel(model, found, getattr(found, "config", None), (args, kwargs), bits)


def _cast(model: nn.Module, dtype: str | None) -> nn.Module:
    return model.to("meta", DTYPES[dtype]) if dtype in DTYPES else model.to("meta")


def config_at(path: str) -> Any:
    """Return the transformers configuration in a ``config.json`` or in its folder.

    Raises:
        FileError: SK504 if it cannot be read.
        CaptureError: SK401 if transformers does not know such a model, SK402 if transformers is missing.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError("SK504", f"{file} cannot be read: {error}", "Give the path of a config.json.") from error
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise CaptureError("SK402", "a configuration needs the package transformers", "pip install transformers") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise FileError("SK504", f"{file} is no configuration: it has no model_type", "Give a transformers config.json.")
    try:
        return type(AutoConfig.for_model(data["model_type"])).from_dict(data)
    except ValueError as error:
        raise CaptureError(
            "SK401", f"transformers does not know the model of {file}: {error}", "Install a newer transformers."
        ) from error


def _from_config(name: str, config: Any, dtype: str | None) -> FitModel:
    bits = NARROW.get(dtype or "") or (_stored_bits(name, config) if dtype is None else None)
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    own = own if isinstance(own, torch.dtype) else DTYPES.get(str(own), torch.float32)
    if own == torch.float32 and bits is not None:
        own = torch.bfloat16
    return FitModel(name, config_model(config, DTYPES.get(dtype or "", own)), config, None, bits)


def _stored_bits(name: str, config: Any) -> int | None:
    """Return the bits a value of a quantized checkpoint, ``None`` for one that is not.

    Raises:
        CaptureError: SK401 for a format that is not known here.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    read = stored if isinstance(stored, dict) else stored.to_dict()
    method, bits = str(read.get("quant_method")), read.get("bits")
    if method == "fp8":
        return 8
    if method in ("gptq", "awq") and bits in (4, 8):
        return int(bits)
    raise CaptureError(
        "SK401",
        f"the bytes of weights that are stored as {method!r}, as {name} says, are not known",
        f"Give --dtype: {', '.join((*DTYPES, *NARROW))}.",
    )


def config_model(config: Any, dtype: torch.dtype, device: str = "meta") -> nn.Module:
    """Return the model of a configuration, with new weights on a device.

    Raises:
        CaptureError: SK401 if its class is not known, or cannot be made.
    """
    import transformers

    names = getattr(config, "architectures", None) or ()
    kind = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    if kind is None and names:
        raise CaptureError("SK401", f"transformers has no model {names[0]}", "Install a newer transformers.")
    if kind is None:
        auto = import_module("transformers.models.auto.modeling_auto")
        known = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING]
        known = known if config.is_encoder_decoder else [auto.MODEL_FOR_CAUSAL_LM_MAPPING]
        kind = next((mapping[type(config)] for mapping in known if type(config) in mapping), None)
    if kind is None:
        raise CaptureError("SK401", "the configuration names no architecture", 'Add "architectures": ["ClassName"].')
    with torch.device(device), _default_dtype(dtype):
        made: nn.Module = kind(config)
    return made.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
