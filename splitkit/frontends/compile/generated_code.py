"""Load the code that Inductor generates for fake tensors: it allocates and frees as it would, and computes nothing.

Inductor writes a Python function that allocates buffers, calls compiled kernels and operators of torch, reuses a buffer
or frees it. Where each of these lines stands is Inductor's plan of memory, after fusion. The kernels allocate nothing:
they are left out, and the allocations, which bypass the dispatcher, are replaced by public functions, so that a fake
mode and a `splitkit.memory.storage_watch.StorageWatch` see them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch._functorch import config as functorch_config  # 2.11, 2.13, 2.15
from torch._inductor import async_compile, config  # AsyncCompile: 2.11, 2.13, 2.15
from torch._inductor.codecache import PyCodeCache  # load_by_key_path: 2.11, 2.13, 2.15


class _Nothing:
    """In the place of Inductor's compiler of kernels, and of the kernels: they leave the buffers as they are."""

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        return self


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let all graphs that Inductor compiles inside run on fake tensors; nothing of them stays in its caches."""
    with (
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
        mock.patch.object(PyCodeCache, "load_by_key_path", _load),
    ):
        yield


def _load(
    key: str, path: str, linemap: object = None, attrs: Mapping[str, Any] | None = None, **options: Any
) -> ModuleType:
    """Run a generated file, in the place of ``PyCodeCache.load_by_key_path``, which would keep the module."""
    module = ModuleType(f"splitkit_generated_{key}")
    module.__file__ = path
    with mock.patch.object(async_compile, "AsyncCompile", _Nothing):
        exec(compile(Path(path).read_text(encoding="utf-8"), path, "exec"), vars(module))
    vars(module).update(attrs or {})
    vars(module).update(_ON_FAKES)
    return module


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> torch.Tensor:
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


_ON_FAKES = {
    "empty_strided_cpu": _empty,
    "reinterpret_tensor": _reinterpret,
    "assert_alignment": _Nothing(),  # asserts addresses, which fakes do not have
}
