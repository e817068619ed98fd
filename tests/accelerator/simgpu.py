"""Registers the simulated accelerator as the device type "simgpu": four devices, and `races` of their streams.

`register` renames PrivateUse1 for the whole process, so tests call it in processes of their own. The first one builds
the device with g++, for all later ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("simgpu.cpp")
TYPE = "simgpu"


def missing() -> str:
    """Say why the device cannot be built here; empty if it can."""
    return "" if shutil.which("g++") else "the simulated accelerator needs g++"


def races() -> list[str]:
    """Return the races since the last call."""
    return list(torch.ops.simgpu.races())


def waits() -> int:
    """Return how often this process has waited for a device: for a copy from or to the CPU, a number, an event."""
    return int(torch.ops.simgpu.waits())


def register() -> None:
    """Make "simgpu" the accelerator of this process."""
    torch.utils.rename_privateuse1_backend(TYPE)
    torch.ops.load_library(str(built()))
    torch._register_device_module(TYPE, _module())
    torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[torch.quint8])
    _add_kernels()


def built() -> Path:
    """Return the library, built once for this source and this torch. Processes that ask at once wait for the first."""
    given = f"{torch.__version__} {torch.version.git_version}".encode() + SOURCE.read_bytes()
    folder = Path(tempfile.gettempdir()) / f"splitkit-simgpu-{os.getuid()}-{hashlib.sha256(given).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True, mode=0o700)
    library = folder / "simgpu.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = folder / "made.so"
            includes = [f"-I{path}" for path in cpp_extension.include_paths()]
            libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
            words = ["g++", "-O0", "-w", "-std=c++20", "-fPIC", "-shared", *includes, str(SOURCE), "-o", str(made)]
            subprocess.run([*words, *libraries, "-ltorch", "-ltorch_cpu", "-lc10"], check=True)
            made.replace(library)
    return library


def _module() -> types.ModuleType:
    """Return what `torch.simgpu` is."""
    ops, module = torch.ops.simgpu, types.ModuleType(f"torch.{TYPE}")

    def index(device: Any = None) -> int:
        found = device if isinstance(device, int) else torch.device(device or TYPE).index
        return int(ops.current() if found is None else found)

    given: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": ops.count,
        "current_device": ops.current,
        "set_device": lambda device: ops.set_current(index(device)),
        "manual_seed": lambda seed: ops.seed(index(), seed),
        "manual_seed_all": lambda seed: [ops.seed(i, seed) for i in range(ops.count())],
        "get_rng_state": lambda device=TYPE: ops.state(index(device)),
        "set_rng_state": lambda state, device=TYPE: ops.set_state(state, index(device)),
        "current_stream": lambda device=None: torch.accelerator.current_stream(index(device)),
        "stream": lambda stream: stream,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, function in given.items():
        setattr(module, name, function)
    return module


_LIBRARIES: list[torch.library.Library] = []
"""Torch forgets kernels whose library is gone."""


def _add_kernels() -> None:
    """Add the ops that torch's fallback lacks: convolutions, batch norm in training, and autocast."""
    aten = torch.library.Library("aten", "IMPL")
    _LIBRARIES.append(aten)
    aten.impl("convolution_overrideable", _without_waits(_convolution), "PrivateUse1")
    aten.impl("convolution_backward_overrideable", _without_waits(_convolution_backward), "PrivateUse1")
    aten.impl("native_batch_norm", _without_waits(_batch_norm), "PrivateUse1")
    every = torch.library.Library("_", "IMPL")
    _LIBRARIES.append(every)
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ("linear", "mm", "bmm", "addmm", "matmul", "baddbmm", "conv2d", "scaled_dot_product_attention"):
        aten.impl(name, _cast(getattr(torch.ops.aten, name).default), "AutocastPrivateUse1")


def _without_waits(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that copies to the CPU, as no real one does; these copies do not count as waits."""

    def run(*args: Any) -> Any:
        before = waits()
        made = kernel(*args)
        torch.ops.simgpu.set_waits(before)
        return made

    return run


def _same(*tensors: torch.Tensor | None) -> torch.device:
    devices = [t.device for t in tensors if t is not None]
    if any(device != devices[0] for device in devices):
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices}")
    return devices[0]


def _cpu(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.cpu()


def _convolution(x: Any, weight: Any, bias: Any, *rest: Any) -> torch.Tensor:
    device = _same(x, weight, bias)
    found: torch.Tensor = torch.ops.aten.convolution(_cpu(x), _cpu(weight), _cpu(bias), *rest)
    return found.to(device)


def _convolution_backward(grad: Any, x: Any, weight: Any, *rest: Any) -> tuple[Any, ...]:
    device = _same(grad, x, weight)
    *settings, groups, mask = rest
    sizes = [weight.shape[1] * groups if settings[3] else weight.shape[0]] if mask[2] else None
    made = torch.ops.aten.convolution_backward(_cpu(grad), _cpu(x), _cpu(weight), sizes, *settings, groups, mask)
    return tuple(None if t is None else t.to(device) for t in made)


def _batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, train: bool, *rest: Any) -> tuple[Any, ...]:
    device = _same(x, weight, bias, mean, var)
    there = [_cpu(t) for t in (mean, var)]
    made = torch.ops.aten.native_batch_norm(_cpu(x), _cpu(weight), _cpu(bias), *there, train, *rest)
    for own, new in zip((mean, var), there, strict=True):
        if train and own is not None:
            own.copy_(new)
    return tuple(t.to(device) for t in made)


def _cast(op: Any) -> Callable[..., Any]:
    """Return the op as autocast runs it."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(TYPE)

        def cast(t: Any) -> Any:
            floats = isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype != torch.float64
            return t.to(dtype) if floats else t

        with torch._C._ExcludeDispatchKeyGuard(keys):
            return op(*map(cast, args), **kwargs)

    return run
