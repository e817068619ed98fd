"""Recognises configuration files of transformers; imports neither torch nor, unless asked to, transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from splitkit.errors import CaptureError, FileError


def require_transformers(who_needs: str) -> Any:
    """Return the package transformers; raise SK402 if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise CaptureError("SK402", f"{who_needs} the package transformers", "pip install 'transformers>=5'") from error
    return transformers


def is_config(spec: str) -> bool:
    """Return whether a text names a ``config.json``, a JSON file with a ``model_type``, or a folder with a config."""
    path = Path(spec)
    if (path / "config.json").is_file() or path.name == "config.json":
        return True
    try:
        return path.suffix == ".json" and path.is_file() and "model_type" in read_config(spec)
    except FileError:
        return False


def read_config(spec: str) -> dict[str, Any]:
    """Return the data of a configuration, from its file or its folder.

    Raises:
        FileError: SK504 if it cannot be read, or is not a configuration.
    """
    file = Path(spec) / "config.json" if Path(spec).is_dir() else Path(spec)
    try:
        data = json.loads(file.read_text(encoding="utf-8"), object_hook=_special_float)
    except (OSError, ValueError) as error:
        raise FileError("SK504", f"{file} cannot be read: {error}", "Give the path of a config.json.") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise FileError(
            "SK504", f"{file} is not a configuration: it has no model_type", "Give a transformers config.json."
        )
    return data


def checkpoint_beside(spec: str) -> str:
    """Return the folder of a configuration if it also holds weights in safetensors, otherwise an empty text."""
    folder = Path(spec) if Path(spec).is_dir() else Path(spec).parent
    return str(folder) if is_config(spec) and any(folder.glob("*.safetensors")) else ""


def _special_float(data: dict[str, Any]) -> Any:
    """Return the number for which transformers writes an object, as in Mamba-2's ``time_step_limit``; others as is."""
    written = data.get("__float__")
    return float(written) if len(data) == 1 and isinstance(written, str) else data
