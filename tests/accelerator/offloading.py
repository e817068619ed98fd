"""One process: a step on the simulated accelerator whose saved values wait on the host, without and with a race."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from typing import Any

import simgpu
import torch
from torch import nn

import splitkit as sk
from splitkit.memory.kernels import host_copies
from splitkit.memory.measurement import measure_memory
from splitkit.plans.offloaded import Offloaded
from splitkit.policies import Budget


class Net(nn.Module):
    """Layers with a pointwise op between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def made(device: str) -> tuple[sk.Joint, sk.Pair, torch.Tensor]:
    """The step on a device, with its halves."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(64, 16).double()
    joint = sk.capture_joint(model.to(device), x.to(device))
    whole = joint.split(Budget(1.0))
    nodes = {node.name: node for node in joint.flow.nodes}
    first = next(nodes[node.name] for node in whole.backward.graph.nodes if node.op == "call_function")
    moved = [Offloaded(nodes[name], nodes["tanh_2"], first) for name in ("tanh", "tanh_1")]
    return joint, joint.split(replace(whole.plan, offloaded=tuple(moved))), x.to(device)


def run(case: str) -> dict[str, Any]:
    """Run both halves on the CPU and on the device, and compare numbers and bytes."""
    joint, pair, x = made("cpu")
    expected = pair.run(list(joint.primals(x)), joint.tangents())
    joint, pair, x = made("simgpu:0")
    plant(case)
    primals, tangents = joint.primals(x), joint.tangents()
    simgpu.races()

    def step(*given: torch.Tensor) -> Any:
        return pair.run(list(given[: len(primals)]), given[len(primals) :])

    measured = measure_memory(step, *primals, *tangents)
    races = simgpu.races()
    found = pair.run(list(primals), tangents)
    apart = max(
        float((a.detach() - b.detach().cpu()).abs().max())
        for halves in zip(expected, found, strict=True)
        for a, b in zip(*halves, strict=True)
        if isinstance(a, torch.Tensor)
    )
    simulated = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
    return {
        "case": case,
        "apart": apart,
        "races": races,
        "moved": len(pair.offloaded),
        "device": [measured.by_device["simgpu:0"], simulated.peak],
        "host": [measured.by_device.get("cpu", 0), pair.host_bytes],
    }


def plant(case: str) -> None:
    """Leave out a wait."""
    if case == "a copy does not wait for its kernel":
        host_copies._copied = eager_copy


def eager_copy(made: torch.Tensor, source: torch.Tensor, device: torch.device, back: bool) -> torch.Tensor:
    """Copy on a stream that waits for nothing."""
    stream = host_copies._copy_stream(device, back)
    assert stream is not None
    with stream:
        made.copy_(source)
    setattr(made, host_copies._DONE, stream.record_event())
    return made


def main() -> None:
    """Run the cases of the command line."""
    simgpu.register()
    for case in sys.argv[1:]:
        kept = copy.copy(vars(host_copies))
        print(json.dumps(run(case)), flush=True)
        vars(host_copies).update(kept)
