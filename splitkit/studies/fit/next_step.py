"""Writes the command that plans a model as it was fitted."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from splitkit.studies.fit.fit_result import FittedDevice
from splitkit.studies.fit.training_fit import TrainingFit
from splitkit.testing.config_files import is_config


def inference_command(model: object, devices: Sequence[FittedDevice], sizes: Mapping[str, int]) -> str:
    """Return ``splitkit plan`` for inference, within what the caches leave; empty for a model given as an object.

    Args:
        model: the model as the user gave it.
        devices: what each device holds.
        sizes: the sizes of its inputs: those of a step for a configuration.
    """
    used = [device for device in devices if device.names]
    room = [_memory(device.card.limit - device.held.cache) for device in used]
    if len(set(room)) == 1:
        words = ["--stages", str(len(used)), "--memory", room[0], "--optimizer", "none"]
    else:
        words = ["--policy", f"Stages({len(used)}, memory={room}, optimizer=None)"]
    return _plan(model, sizes, ["--eval", *words])


def training_command(
    model: object, found: TrainingFit, devices: Sequence[FittedDevice], sizes: Mapping[str, int]
) -> str:
    """Return ``splitkit plan`` for a step of the pipeline; empty for a model given as an object."""
    memory = _memory(min(device.card.limit for device in devices))
    words = ["--stages", str(len(devices)), "--schedule", found.schedule, "--microbatches", str(found.microbatches)]
    words += ["--memory", memory, "--optimizer", found.optimizer]
    return _plan(model, sizes, words + ["--recompute"] * found.recompute)


def _memory(nbytes: int) -> str:
    """Return bytes, rounded down, as ``--memory`` takes them."""
    return f"{nbytes >> 20}MiB" if nbytes >= 2**30 else f"{nbytes >> 10}KiB"


def _plan(model: object, sizes: Mapping[str, int], words: Sequence[str]) -> str:
    if not isinstance(model, str | os.PathLike):
        return ""
    given = ["--size", ",".join(f"{name}={value}" for name, value in sizes.items())] if sizes else []
    return shlex.join(["splitkit", "plan", os.fspath(model), *given, *words, "-o", "plan.json"])


def sizes_of_inputs(model: object, sizes: Mapping[str, int] | None, batch: int, tokens: int) -> Mapping[str, int]:
    """Return the sizes for a configuration: sequences and tokens; for other models those that the user gave."""
    if isinstance(model, str | os.PathLike) and is_config(os.fspath(model)):
        return {"batch": batch, "seq": tokens}
    return sizes or {}
