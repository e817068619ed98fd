"""Checks of numbers on a device: a split computes what the model computes, however it was captured or placed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import nn

import splitkit as sk
from splitkit.cli.selftest.check_runs import FAILED, NOT_RUN, OK, Finding
from splitkit.cli.selftest.trial_models import exact_products, large, small
from splitkit.graph.losses import loss_of
from splitkit.policies import Budget, Devices, RoundRobin, Stages
from splitkit.runtime import to_devices
from splitkit.testing.models import Example
from splitkit.testing.pipeline_check import relative_difference

_APART = 1e-4
"""Two devices round differently: the most that float32 may differ by, relative to the largest entry of a tensor."""
_ADDED = 4
"""The terms of a gradient that layers share (T5's bias of attention), which a graph may add in another order."""
_INSIDE = "SPLITKIT_UNDER_SANITIZER"
"""Set in the process that compute-sanitizer watches."""
_STEPS = 200
"""Steps of training with values that wait on the host: enough for a copy that is too late to be seen."""


def _same(name: str, what: str, good: bool, figure: str, limit: str) -> Finding:
    return Finding(name, what, figure, limit, OK if good else FAILED)


# Equal to the unsplit model: outputs, gradients, buffers and random numbers.


def _equal(model: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = f"equal: {model}"
    for precision in ("float32", "bfloat16", "float16"):
        example = small(model, devices[0], precision)
        gm = sk.capture(example.model, **example.kwargs)
        for policy in (Stages(2), RoundRobin(3)):
            with exact_products():
                split, rounding = sk.split(gm, policy), _ADDED * torch.finfo(getattr(torch, precision)).eps
                found = sk.compare(example.model, split, tolerance=rounding, **example.kwargs)
            figure = str(found).splitlines()[0]
            yield _same(check, f"{precision}, {type(policy).__name__}", found.same, figure, "the model's numbers")


def _two_devices(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check, other = "equal: two devices", devices[1] if len(devices) > 1 else torch.device("cpu")
    for name in ("gpt2", "llama", "t5", "conv net"):
        for policy in (
            Stages(2),
            Devices({str(devices[0]): "h100", str(other): "cpu" if other.type == "cpu" else "h100"}),
        ):
            example, other_copy = small(name, devices[0]), small(name, devices[0])
            model, inputs = example.model.eval(), example.kwargs
            split = sk.split(sk.capture(other_copy.model.eval(), **inputs), policy)
            theirs = _results(model, inputs)
            placed = to_devices(split, None if isinstance(policy, Devices) else [devices[0], other])
            mine = _results(placed, inputs)
            worst = max(theirs, key=lambda key: relative_difference(mine[key], theirs[key]))
            apart, what = (
                relative_difference(mine[worst], theirs[worst]),
                f"{name} by {type(policy).__name__} on {devices[0]} and {other}",
            )
            figure = f"{worst} differs by {apart:.1e}"
            yield _same(check, what, mine.keys() == theirs.keys() and apart <= _APART, figure, f"at most {_APART:.0e}")


def _results(model: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return loss, gradients and buffers of a step, on the CPU."""
    with exact_products():
        output = model(**inputs)
        loss = loss_of(output)
        assert loss is not None
        loss.backward()  # type: ignore[no-untyped-call]
    gradients = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    held = {"loss": loss.detach(), **gradients, **dict(model.named_buffers())}
    return {name: tensor.detach().cpu() for name, tensor in held.items() if not tensor.is_meta}


# Captured elsewhere, and played again as a CUDA graph.


def _on_meta(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = "capture: on meta"
    for name in ("gpt2", "llama"):
        example = small(name, devices[0])
        model: Any = example.model.eval()
        there = {key: t.to("meta") for key, t in example.kwargs.items()}
        with torch.device("meta"):  # not model.to("meta"), which gives tied weights a tensor each
            empty = type(model)(model.config).eval()
        split = sk.split(sk.capture(empty, **there), Stages(2))
        with TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            loaded = sk.load(split, folder, devices[0])
        mine, theirs = _results(loaded, example.kwargs), _results(model, example.kwargs)
        apart = max(relative_difference(mine[key], theirs[key]) for key in theirs.keys() & mine.keys())
        figure = f"{apart:.1e} apart"
        yield _same(check, f"{name}, weights loaded later", apart <= _APART, figure, f"at most {_APART:.0e}")


def _cuda_graphs(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = "capture: CUDA graphs"
    if devices[0].type != "cuda":
        yield Finding(check, "a part as a CUDA graph", f"{devices[0]} has none", "", NOT_RUN)
        return
    example = small("gpt2", devices[0])
    split = sk.split(sk.capture(example.model.eval(), **example.kwargs), Stages(2))
    with torch.no_grad(), exact_products():
        expected = split(**example.kwargs)
        for key, part in [*split.parts.items()]:
            split.replace(key, cast(nn.Module, torch.compile(part, mode="reduce-overhead")))
        found = [split(**example.kwargs) for _ in range(4)][-1]
    apart = relative_difference(found.loss.cpu(), expected.loss.cpu())
    yield _same(check, "gpt2 in two parts, reduce-overhead", apart <= _APART, f"{apart:.1e} apart", f"at most {_APART}")


# Values that wait on the host meanwhile, by copies beside the computation.


def _offload(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = "streams: offload"
    losses: dict[bool, list[torch.Tensor]] = {}
    moved = 0
    for offload in (False, True):
        example = large(devices[0])
        joint = sk.capture_joint(example.model, **example.kwargs)
        costs = sk.costs.roofline(joint.graph_module, "h100")
        plan = Budget(0.1, offload="pcie5").assign(joint.flow, costs)
        moved = len(plan.offloaded)
        pair = joint.split(plan if offload else Budget(1.0))
        losses[offload] = _trained(joint, pair, example)
    same = all(torch.equal(a, b) for a, b in zip(losses[False], losses[True], strict=True))
    figure = "equal to the bit" if same else f"{sum(a != b for a, b in zip(*losses.values(), strict=True))} differ"
    what = f"losses of {len(losses[True])} steps with {moved} values on the host, against the run without"
    yield _same(check, what, same and moved > 0, figure, "equal to the bit")
    if _INSIDE not in os.environ:
        yield _races(check, devices[0])


def _races(check: str, device: torch.device) -> Finding:
    """Run the same check again under NVIDIA's tool, with fewer steps: it makes kernels many times slower."""
    what, tool = "compute-sanitizer --tool racecheck", shutil.which("compute-sanitizer")
    if tool is None or device.type != "cuda":
        reason = "compute-sanitizer is not installed" if tool is None else f"it watches CUDA only, not {device}"
        return Finding(check, what, reason, "", NOT_RUN)
    worker = [sys.executable, "-m", "splitkit.cli.selftest.worker", json.dumps([str(device)]), json.dumps([check])]
    words = [tool, "--tool", "racecheck", "--error-exitcode", "9", *worker]
    ended = subprocess.run(words, env=os.environ | {_INSIDE: "1"}, capture_output=True, text=True)
    if ended.returncode == 0:
        return Finding(check, what, "no race", "no race")
    return Finding(check, what, f"ended with {ended.returncode}", "no race", FAILED, ended.stdout + ended.stderr)


def _trained(joint: Any, pair: Any, example: Example) -> list[torch.Tensor]:
    """Return the losses of steps of SGD with the halves of a plan, each on other tokens."""
    losses = []
    quick = example.kwargs["input_ids"].device.type == "cuda" and _INSIDE not in os.environ
    count = _STEPS if quick else _STEPS // 20
    parameters = [p for p in joint.primals(**example.kwargs) if isinstance(p, nn.Parameter)]
    for step in range(count):
        batch = {name: t.roll(step, -1) for name, t in example.kwargs.items()}
        outputs, gradients = pair.run(list(joint.primals(**batch)), joint.tangents())
        losses.append(outputs[0].detach().clone())
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=False):
                if isinstance(gradient, torch.Tensor) and gradient.shape == parameter.shape:
                    parameter.sub_(gradient, alpha=1e-2)
    return losses


CHECKS: dict[str, Callable[[Sequence[torch.device]], Iterable[Finding]]] = {
    **{f"equal: {name}": partial(_equal, name) for name in ("gpt2", "llama", "t5", "conv net")},
    "equal: two devices": _two_devices,
    "capture: on meta": _on_meta,
    "capture: CUDA graphs": _cuda_graphs,
    "streams: offload": _offload,
}
"""Name of a check -> what runs it on devices, the first of which is tested."""
