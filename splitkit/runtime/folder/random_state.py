"""Saves and restores the random number generators of a process, from which a training loop draws between steps.

The pipeline itself draws nothing from them: each microbatch has a seed of its own (`Pipeline.seed_of`). They matter to
what surrounds it, such as shuffling and augmentation.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from splitkit.runtime.devices.accelerators import DeviceRng


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of Python, numpy, torch on the CPU, and torch on a device."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (kind, torch.tensor(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = DeviceRng(device).state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `random_state` returned. The state of another kind of device is left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and device.type in state:
        DeviceRng(device).set_state(state[device.type])
