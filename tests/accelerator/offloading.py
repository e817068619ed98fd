"""One process: a step on the simulated accelerator whose saved values wait on the host, without and with a race."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from typing import Any

import simgpu
import torch
from randomstageplans import all_on_host
from torch import nn

import splitkit as sk
from splitkit.engine.pair import Pair
from splitkit.engine.staged_step import HostValue, StagedStep
from splitkit.frontends.joint_capture import Joint
from splitkit.memory.kernels import kernel_results
from splitkit.memory.measurement import measure_memory
from splitkit.plans.parts import Offloaded
from splitkit.policies import Budget
from splitkit.training.flow import FORWARD, save_all_plan
from splitkit.training.stage_plan import stage_plan


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


def made(device: str) -> tuple[Joint, Pair, torch.Tensor]:
    """The step on a device, with its halves."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(64, 16).double()
    joint = sk.capture_joint(model.to(device), x.to(device))
    whole = joint.split(Budget(1.0))
    nodes = {node.name: node for node in joint.flow.nodes}
    first = next(nodes[node.name] for node in whole.backward.graph.nodes if node.op == "call_function")
    moved = [Offloaded(nodes[name], nodes["tanh_2"], first) for name in ("tanh", "tanh_1")]
    return joint, joint.split(replace(whole.plan, offloaded=tuple(moved))), x.to(device)


def staged(device: str) -> tuple[Joint, StagedStep, torch.Tensor]:
    """The step on a device in two stages, with all on the host that can wait there."""
    joint, _, x = made(device)
    forward = [n for n in joint.flow.nodes if FORWARD in save_all_plan(joint.flow)[n]]
    views_again = Budget(1.0).assign(joint.flow, sk.costs.roofline(joint.graph_module, "h100"))
    plan = stage_plan(joint.flow, {n: i * 2 // len(forward) for i, n in enumerate(forward)}, views_again)
    step = joint.split(all_on_host(joint.flow, plan))
    assert isinstance(step, StagedStep)
    return joint, step, x


def run_stages(case: str) -> dict[str, Any]:
    """Run stages on the CPU and on the device, and compare numbers and the bytes that wait on either side."""
    joint, step, x = staged("cpu")
    expected = step.run(joint.primals(x), joint.tangents())
    joint, step, x = staged("simgpu:0")
    plant(case)
    primals, tangents = joint.primals(x), joint.tangents()
    simgpu.races()

    def forward(*given: torch.Tensor) -> Any:
        return step.run_forward(given)[1]

    with torch.no_grad():
        held = forward(*primals)
        moved = [value for values in held for value in values.values() if isinstance(value, HostValue)]
        there = {"cpu": sum(value.host.nbytes for value in moved)}
        kept = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for values in held
            for tensor in values.values()
            if isinstance(tensor, torch.Tensor)
        }
        mine = {tensor.untyped_storage().data_ptr() for tensor in primals if isinstance(tensor, torch.Tensor)}
        device = sum(nbytes for key, nbytes in kept.items() if key not in mine)
        found = step.run_backward(held, tangents)
    races = simgpu.races()
    apart = max(
        float((a.detach() - b.detach().cpu()).abs().max())
        for a, b in zip(expected[1], found, strict=True)
        if isinstance(a, torch.Tensor)
    )
    crossing = sum(stage.sent_bytes for stage in step.stages if {*stage.sent} & {*stage.held})
    return {
        "case": case,
        "apart": apart,
        "races": races,
        "moved": len(moved),
        "devices": sorted({str(value.copy.device) for value in moved if value.copy is not None}),
        "host": [there["cpu"], sum(stage.host_bytes for stage in step.stages)],
        "device": [device, sum(stage.saved_bytes for stage in step.stages) - crossing],
    }


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
    if case.removesuffix(", in stages") == "a copy does not wait for its kernel":
        kernel_results._copied = eager_copy


def eager_copy(made: torch.Tensor, source: torch.Tensor, device: torch.device, back: bool) -> torch.Tensor:
    """Copy on a stream that waits for nothing."""
    stream = kernel_results._copy_stream(device, back)
    assert stream is not None
    with stream:
        made.copy_(source)
    setattr(made, kernel_results._DONE, stream.record_event())
    return made


def main() -> None:
    """Run the cases of the command line."""
    simgpu.register()
    for case in sys.argv[1:]:
        kept = copy.copy(vars(kernel_results))
        print(json.dumps((run_stages if case.endswith("in stages") else run)(case)), flush=True)
        vars(kernel_results).update(kept)
