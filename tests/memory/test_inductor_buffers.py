"""Buffers that Inductor's code allocates, past the dispatcher, are in the memory of a run."""

from __future__ import annotations

import types

import pytest
import torch
from torch._inductor import codecache

from splitkit import measure_memory


@pytest.fixture
def generated(monkeypatch):
    """A module as Inductor generates it: it allocates past the dispatcher, reuses a buffer, and calls kernels."""
    code = """
def call(x):
    buf0 = empty_strided_cpu((1000,), (1,), torch.float32)
    kernel(x, buf0)
    buf1 = empty_strided_cpu((2000,), (1,), torch.float32)
    kernel(buf0, buf1)
    del buf0
    buf2 = empty_strided_cpu((1000,), (1,), torch.float32)
    kernel(buf1, buf2)
    del buf1
    buf3 = buf2; del buf2
    torch.mul(buf3, 2, out=buf3)
    return buf3
"""
    module = types.ModuleType("generated")
    allocate = torch._C._dynamo.guards._empty_strided_cpu
    vars(module).update(torch=torch, kernel=lambda *buffers: None, empty_strided_cpu=allocate)
    exec(code, vars(module))
    monkeypatch.setattr(codecache.PyCodeCache, "modules", [module])
    return module


def test_buffers_of_inductors_code_live_from_their_allocation(generated):
    allocate, x = generated.empty_strided_cpu, torch.ones(1000)
    memory = measure_memory(lambda x: generated.call(x), x, allocator=True)
    assert memory.timeline == (8000, 16000, 16000, 8000)
    assert memory.ops == (*["inductor.empty_strided_cpu"] * 3, "aten.mul.out")
    assert (memory.baseline, memory.peak, memory.end) == (4000, 16000, 8000)
    assert memory.allocator_peak == memory.peak
    assert generated.empty_strided_cpu is allocate is torch._C._dynamo.guards._empty_strided_cpu


def test_a_measurement_inside_another_sees_the_same_buffers(generated):
    allocate, inner = generated.empty_strided_cpu, []

    def run(x):
        inner.append(measure_memory(lambda x: generated.call(x), x))
        return generated.call(x)

    outer = measure_memory(run, torch.ones(1000))
    assert inner[0].timeline == (8000, 16000, 16000, 8000)
    assert outer.timeline == (8000, 16000, 16000, 8000) * 2
    assert generated.empty_strided_cpu is allocate
    with pytest.raises(ZeroDivisionError):
        measure_memory(lambda: 1 / 0)
    assert generated.empty_strided_cpu is allocate
