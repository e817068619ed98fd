"""Makes models from configurations of transformers: on ``meta``, or with random weights if they are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splitkit.errors import CaptureError
from splitkit.testing.config_files import read_config, require_transformers
from splitkit.testing.factory import Example

_SMALL = 2**30
"""The most bytes of weights that a model of a configuration gets; a larger one is made on ``meta``."""
SIZES = {"batch": 1, "seq": 64}
"""The sizes of the inputs of a model from a configuration."""
_NEWER_OR_FACTORY = "Install a newer transformers, or give a factory that returns the model and its inputs."


def config_example(path: str, seed: int = 0, **sizes: int) -> Example:
    """Return the model of a configuration in training mode, and inputs with which it returns its loss.

    It has random weights and inputs if the weights take at most 1 GiB, and is on ``meta`` otherwise, to be planned.

    Args:
        path: the configuration or its folder.
        seed: the seed of weights and inputs.
        sizes: ``batch`` and ``seq``, the sequences and the tokens of each.

    Raises:
        CaptureError: SK401 or SK402 as `config_at` and `config_model`, SK403 for another size.
        FileError: SK504 if the configuration cannot be read.
    """
    if unknown := [name for name in sizes if name not in SIZES]:
        raise CaptureError("SK403", f"{path} has no size {unknown[0]}", f"Its sizes are {', '.join(SIZES)}.")
    config, wanted = config_at(path), SIZES | sizes
    dtype = config_dtype(config)
    model = config_model(config, dtype)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    device = "cpu" if nbytes <= _SMALL else "meta"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = config_model(config, dtype, device) if device == "cpu" else model
        with torch.device(device):
            inputs = loss_inputs(model, config, wanted["batch"], wanted["seq"])
    config.use_cache = False
    _read_settings(model, path)
    return Example(model.train(), (), inputs)


def _read_settings(model: Any, path: str) -> None:
    """Give a model the settings of generation that lie beside its configuration, such as the tokens that end a text."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    if hasattr(model, "generation_config") and (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(folder)


def loss_inputs(model: Any, config: Any, batch: int, seq: int) -> dict[str, Any]:
    """Return random inputs with which a model returns its loss, on torch's current device.

    Raises:
        CaptureError: SK401 if the size of its main input does not follow from the configuration.
    """
    main = main_input(model, config, batch, seq)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        return {"pixel_values": main, "labels": torch.zeros(batch, dtype=torch.long)}
    labels = torch.randint(0, config.get_text_config(decoder=True).vocab_size, (batch, seq))
    return {getattr(model, "main_input_name", "input_ids"): main, "labels": labels}


def main_input(model: Any, config: Any, batch: int, seq: int) -> torch.Tensor:
    """Return the input that a model names its main one: tokens, the features of speech, or an image."""
    name = getattr(model, "main_input_name", "input_ids")
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.float32)
    if name == "input_ids":
        return torch.randint(0, config.get_text_config().vocab_size, (batch, seq))
    if name == "input_features" and hasattr(config, "max_source_positions"):
        return torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions, dtype=dtype)
    if name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        return torch.randn(batch, config.num_channels, config.image_size, config.image_size, dtype=dtype)
    raise CaptureError(
        "SK401",
        f"a {type(model).__name__} takes {name}, whose size does not follow from its configuration",
        "Give a factory that returns the model and its inputs.",
    )


def config_dtype(config: Any) -> torch.dtype:
    """Return the dtype that a configuration names, float32 if it names none."""
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    found = own if isinstance(own, torch.dtype) else getattr(torch, str(own), None)
    return found if isinstance(found, torch.dtype) else torch.float32


def config_at(path: str) -> Any:
    """Return the transformers configuration in a ``config.json`` or in its folder.

    Raises:
        FileError: SK504 if it cannot be read.
        CaptureError: SK401 if transformers does not know the model or refuses a field; SK402 if a package is missing.
    """
    data, transformers = read_config(path), require_transformers("a configuration needs")
    try:
        return type(transformers.AutoConfig.for_model(data["model_type"])).from_dict(data)
    except ValueError as error:
        # transformers goes on with a list of all that it knows
        reason = f"transformers does not know the model of {path}: {str(error).partition('. Should contain')[0]}"
        raise CaptureError("SK401", reason, _NEWER_OR_FACTORY) from error
    except Exception as error:  # such as a StrictDataclassError, which is no ValueError
        raise _refused(f"the configuration of {path}", error) from error


def _refused(what: str, error: Exception) -> CaptureError:
    reason = f"transformers refuses {what}: {' '.join(str(error).split())}"
    if isinstance(error, ImportError):
        return CaptureError("SK402", reason, "Install the package that it names.")
    return CaptureError("SK401", reason, "Correct it.")


def config_model(config: Any, dtype: torch.dtype, device: str = "meta") -> nn.Module:
    """Return the model of a configuration, with new weights on a device.

    Raises:
        CaptureError: SK401 if its class is not known, or refuses the configuration; SK402 if it needs another package.
    """
    import transformers

    names = getattr(config, "architectures", None) or ()
    kind = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    if kind is None and names:
        raise CaptureError("SK401", f"transformers has no model {names[0]}", _NEWER_OR_FACTORY)
    if kind is None:
        auto = import_module("transformers.models.auto.modeling_auto")
        known = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING]
        known = known if config.is_encoder_decoder else [auto.MODEL_FOR_CAUSAL_LM_MAPPING]
        kind = next((mapping[type(config)] for mapping in known if type(config) in mapping), None)
    if kind is None:
        raise CaptureError("SK401", "the configuration names no architecture", 'Add "architectures": ["ClassName"].')
    with torch.device(device), _default_dtype(dtype):
        try:
            made: nn.Module = kind(config)
        except (ValueError, TypeError, AttributeError, LookupError, ImportError) as error:
            raise _refused(f"the configuration of a {kind.__name__}", error) from error
    return made.eval()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
