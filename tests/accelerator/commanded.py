"""One rank of a command, with the simulated accelerator as the machine's: otherwise as ``cli/commanded.py``."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import simgpu
import staged_group

from splitkit.runtime.ranks import rank_device


def _other() -> Any:
    spec = importlib.util.spec_from_file_location("other", Path(__file__).parents[1] / "cli" / "commanded.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare() -> None:
    _other().prepare()
    simgpu.register()
    staged_group.register()


def main() -> None:
    devices, real = [], rank_device.device_of_rank
    rank_device.device_of_rank = lambda *args: devices.append(real(*args)) or devices[-1]  # type: ignore[func-returns-value]
    sys.modules["splitkit.runtime.ranks.pipeline"].device_of_rank = rank_device.device_of_rank  # type: ignore[attr-defined]
    _other().main()
    print(json.dumps({"own": int(os.environ["RANK"]), "device": str(devices[0]), "races": simgpu.races()}), flush=True)
