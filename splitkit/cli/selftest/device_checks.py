"""The checks of ``splitkit doctor --device``: of numbers, of figures, and of pipelines on ranks.

As a program it is one process of the command, which prints what its checks find, a JSON line each.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter
from typing import Any, cast

import torch
from torch import nn

import splitkit as sk
from splitkit.cli.selftest.check_runs import FAILED, MEASURED, NOT_RUN, OK, SECONDS, Finding, worker
from splitkit.costs.named import known_device
from splitkit.engine.pair import Pair
from splitkit.frontends.joint_capture import Joint
from splitkit.graph.losses import loss_of
from splitkit.memory.measurement import MeasuredMemory, measure_memory
from splitkit.plans.policy import PolicyLike
from splitkit.policies import Budget, Devices, MinCut, Remat, RoundRobin, Stages
from splitkit.runtime import to_devices
from splitkit.runtime.devices.accelerators import move_tensors
from splitkit.testing import models
from splitkit.testing.models import Example
from splitkit.testing.pipeline_check import relative_difference
from splitkit.testing.timing import TrainingRun, measure_training
from splitkit.training.flow import optimizer_memory
from splitkit.units import duration, size

# Models that ``splitkit doctor --device`` tries: small ones for numbers, larger ones for figures.


_SMALL = {"layers": 4, "width": 64, "heads": 4, "batch": 2, "vocab": 256, "seq": 16}
_LARGE = {"layers": 6, "width": 1024, "heads": 16, "batch": 8, "vocab": 8000, "seq": 512}
_MIDDLE = {"layers": 4, "width": 256, "heads": 4, "batch": 4, "vocab": 2000, "seq": 128}


class ConvNet(nn.Module):
    """Residual blocks of convolutions with batch norm, whose statistics each step of training writes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        x = self.stem(image)
        for block in self.blocks:
            x = x + block(x)
        out: torch.Tensor = self.head(nn.functional.dropout(x.mean((2, 3)), 0.1, self.training))
        return out.square().mean()


class InAutocast(nn.Module):
    """A model whose forward runs under autocast."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        super().__init__()
        self.model, self.kind = model, kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns."""
        with torch.autocast(self.kind, torch.bfloat16):
            return self.model(*args, **kwargs)


def small(name: str, device: torch.device, precision: str = "float32") -> Example:
    """Return a small model in training mode and its inputs, on a device.

    Args:
        name: ``"conv net"`` or an example of `splitkit.testing.models`.
        device: the device.
        precision: ``"float32"``, ``"float16"`` for the weights, or ``"bfloat16"`` for autocast.
    """
    model: nn.Module
    if name == "conv net":
        torch.manual_seed(0)
        model, kwargs = ConvNet(), {"image": torch.randn(2, 3, 16, 16)}
    else:
        made = models.build(name, **_SMALL)
        model, kwargs = made.model, dict(made.kwargs)
    model = _moved(model.train(), device)
    if precision == "float16":
        model, kwargs = model.half(), {k: t.half() if t.is_floating_point() else t for k, t in kwargs.items()}
    if precision == "bfloat16":
        model = InAutocast(model, device.type)
    return Example(model, (), {name: t.to(device) for name, t in kwargs.items()})


def large(device: torch.device) -> Example:
    """Return a GPT-2 on a device: large enough for a GPU to be busy, smaller where the CPU runs it."""
    made = models.build("gpt2", **(_LARGE if device.type == "cuda" else _MIDDLE))
    model = _moved(made.model.eval(), device)
    return Example(model, (), {name: t.to(device) for name, t in made.kwargs.items()})


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a model on a device; its ``to`` would break ties on devices of other vendors than NVIDIA."""
    move_tensors(model, nn.Module(), {id(tensor): device for tensor in (*model.parameters(), *model.buffers())})
    return model


@contextmanager
def exact_products() -> Iterator[None]:
    """Let products of float32 be computed in float32: TF32 rounds them to 10 bits."""
    flags = torch.backends.cudnn
    kept = {"enabled": flags.enabled, "benchmark": flags.benchmark, "deterministic": flags.deterministic}
    with flags.flags(**kept, allow_tf32=False):
        yield


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


def _equal(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    model = check.removeprefix("equal: ")
    for precision in ("float32", "bfloat16", "float16"):
        example = small(model, devices[0], precision)
        gm = sk.capture(example.model, **example.kwargs)
        for policy in (Stages(2), RoundRobin(3)):
            with exact_products():
                split, rounding = sk.split(gm, policy), _ADDED * torch.finfo(getattr(torch, precision)).eps
                found = sk.compare(example.model, split, tolerance=rounding, **example.kwargs)
            figure = str(found).splitlines()[0]
            yield _same(check, f"{precision}, {type(policy).__name__}", found.same, figure, "the model's numbers")


def _two_devices(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    other = devices[1] if len(devices) > 1 else torch.device("cpu")
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


def _on_meta(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
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


def _cuda_graphs(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
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


def _offload(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
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
    words = [tool, "--tool", "racecheck", "--error-exitcode", "9", *worker([str(device)], [check])]
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


# Checks of figures on a device: the bytes and seconds that plans predict, beside those that runs take.


_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25, 0.1, 0.0)
"""Budgets whose order by predicted and by measured time is compared."""
_IN_ORDER = 0.7
"""The least rank correlation of eight plans: with one pair of neighbours swapped it is 0.98, at random 0 on average."""
_OF_CARD, _RESERVE = 0.9, 0.05
"""A card holds this share of eager mode's peak, the optimizer's state, and a reserve as large as `Budget`'s own."""
_REPEATS = 5  # of which the median counts
_CLOCKS = ("cpu", "cuda")
"""Devices whose kernels `costs.measured` can time."""
_CLASSES = 6
"""The most kinds of ops that are shown: those that take longest."""


# Memory: what the allocator's peak is beside the plan's.


def _forward_memory(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    example = large(devices[0])
    gm = sk.capture(example.model, **example.kwargs)
    with torch.no_grad():
        gm(**example.kwargs)  # allocates the workspaces of libraries, which stay
        measured = measure_memory(partial(gm, **example.kwargs), allocator=True)
    planned = sk.simulate_memory(gm)
    yield from _bytes(check, "gpt2 without autograd", planned.peak, measured, devices[0])


def _budgets(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    example = large(devices[0])
    joint = sk.capture_joint(example.model, **example.kwargs)
    peak = TrainingRun(joint, _pair(joint, Budget(1.0))).profile.peak
    for budget in ("least", 0.5, int(peak * 0.9)):
        asked: Any = budget
        plan = Budget(asked).assign(joint.flow, _prices(joint, devices[0]))
        step = TrainingRun(joint, _pair(joint, plan))
        planned = step.profile.peak
        measure_training(step, example, 0)  # allocates the workspaces of libraries, which stay
        measured = measure_training(step, example, 0)
        limit = budget if isinstance(budget, int) else planned
        what = f"gpt2, a budget of {size(limit)}" if isinstance(budget, int) else f"gpt2, Budget({budget!r})"
        yield from _bytes(check, what, limit, measured, devices[0], exact=not isinstance(budget, int))
    reserved = torch.cuda.max_memory_reserved(devices[0]) if devices[0].type == "cuda" else None
    if reserved is not None:
        yield Finding(check, "the most that torch reserved", size(reserved), "", MEASURED)


def _loop(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    example = large(devices[0])
    planned = sk.dry_run(example.model, **example.kwargs).peak
    step = partial(_step, example.model, example)
    step()  # allocates the workspaces of libraries, which stay
    yield from _bytes(check, "a step of gpt2", planned, measure_memory(step, allocator=True), devices[0])
    run = TrainingRun.of(example)
    state = optimizer_memory(run.joint.flow, "adamw").state
    card = int((_OF_CARD * run.profile.peak + state) / (1 - _RESERVE))
    policy = Budget(card=card, optimizer="adamw", accumulate=False, reserve=_RESERVE)
    applied = torch.compile(example.model, backend=sk.backend(policy))
    step = partial(_step, applied, example, torch.optim.AdamW(example.model.parameters()))
    with _card_of(card, devices[0]):
        step()  # makes the optimizer's state
        measured = measure_memory(step, allocator=True)
    what = f"gpt2 with AdamW on a card of {size(card)}"
    yield from _bytes(check, what, card, measured, devices[0], exact=False)


@contextmanager
def _card_of(nbytes: int, device: torch.device) -> Iterator[None]:
    """Let torch reserve no more than some bytes of a GPU inside the block."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(device).total_memory, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _pair(joint: Joint, plan: PolicyLike) -> Pair:
    pair = joint.split(plan)
    assert isinstance(pair, Pair)
    return pair


def _bytes(
    check: str, what: str, planned: int, measured: MeasuredMemory, device: torch.device, exact: bool = True
) -> Iterator[Finding]:
    """Yield the tensors' peak, which must be the plan's, and the allocator's, which a limit should hold too."""
    peak, allocated = measured.by_device.get(str(device), 0), measured.allocator_peaks.get(str(device))
    good = peak == planned if exact else peak <= planned
    figure = f"{size(peak)} of tensors, planned {size(planned)}"
    yield Finding(check, what, figure, "equal" if exact else "at most", OK if good else FAILED)
    if allocated is None:
        yield Finding(check, f"{what}: allocator", f"{device.type} has no statistics of its allocator", "", NOT_RUN)
        return
    more = allocated / max(1, planned) - 1
    figure = f"{size(allocated)} allocated, {more:+.1%} of the plan"
    limit, good = ("", True) if device.type == "cpu" else ("at most the plan", allocated <= planned)
    yield Finding(check, f"{what}: allocator", figure, limit, (OK if good else FAILED) if limit else MEASURED)


# Speed: prices beside measured times, the order of plans, and compiled steps.


def _prices(joint: Any, device: torch.device) -> Any:
    return sk.costs.roofline(joint.graph_module, _card(device))


def _card(device: torch.device) -> str:
    """Return the device's entry among those that splitkit knows; ``h100`` for an unknown accelerator."""
    if device.type != "cuda":
        return "cpu" if device.type == "cpu" else "h100"
    return known_device(torch.cuda.get_device_name(device)) or "h100"


def _times(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    device = devices[0]
    if device.type not in _CLOCKS:
        yield Finding(check, "ops of gpt2", f"{device.type} has no clock of its kernels", "", NOT_RUN)
        return
    example = large(device)
    gm = sk.capture(example.model, **example.kwargs)
    roofline = sk.costs.roofline(gm, _card(device))
    measured = sk.costs.measured(gm, tuple(example.kwargs.values()), device)
    seconds: dict[str, Counter[str]] = {"predicted": Counter(), "measured": Counter()}
    for node in gm.graph.nodes:
        if node.op == "call_function":
            kind = str(node.target)
            seconds["predicted"][kind] += roofline.seconds(node)  # type: ignore[assignment]
            seconds["measured"][kind] += measured.seconds(node)  # type: ignore[assignment]
    for kind, took in seconds["measured"].most_common(_CLASSES):
        figure = f"{duration(took)}, predicted {duration(seconds['predicted'][kind])} for {_card(device)}"
        yield Finding(check, f"all {kind} of gpt2", figure, "", MEASURED)
    with torch.no_grad():
        (whole,) = _seconds([lambda: gm(**example.kwargs)], device)
    predicted = {name: sum(one.values()) for name, one in seconds.items()}
    figure = f"{duration(whole)}; ops add up to {duration(predicted['measured'])}, "
    yield Finding(check, "forward of gpt2", f"{figure}roofline {duration(predicted['predicted'])}", "", MEASURED)


def _order(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    from scipy.stats import spearmanr

    example = large(devices[0])
    joint = sk.capture_joint(example.model, **example.kwargs)
    primals, tangents = joint.primals(**example.kwargs), joint.tangents()
    prices = {"the roofline": _prices(joint, devices[0])}
    if devices[0].type in _CLOCKS:
        prices["measured ops"] = sk.costs.measured(joint.graph_module, (*primals, *tangents), devices[0])
    pairs = [_pair(joint, Budget(share).assign(joint.flow, prices["the roofline"])) for share in _SHARES]
    measured = _seconds([partial(lambda pair: pair.run(list(primals), tangents), one) for one in pairs], devices[0])
    for name, costs in prices.items():
        predicted = [_predicted(joint, pair, costs) for pair in pairs]
        alike = float(spearmanr(predicted, measured).statistic)
        figure = (
            f"rank correlation {alike:.2f}; {duration(min(measured))} to {duration(max(measured))}, "
            f"predicted {duration(min(predicted))} to {duration(max(predicted))}"
        )
        what = f"steps of {len(_SHARES)} budgets of gpt2 by {name}"
        if devices[0].type != "cuda":  # other work on the cores moves a step by more than a budget does
            yield Finding(check, what, figure, "", MEASURED)
        else:
            yield Finding(check, what, figure, f"at least {_IN_ORDER}", OK if alike >= _IN_ORDER else FAILED)


def _predicted(joint: Joint, pair: Pair, costs: Any) -> float:
    """Return the seconds that the nodes of both halves take, one after the other."""
    nodes = {node.name: node for node in joint.flow.nodes}
    run = [nodes[n.name] for half in (pair.forward, pair.backward) for n in half.graph.nodes if n.name in nodes]
    return float(sum(map(costs.seconds, run)))


def _beside_torch(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    run, budget = _budget_of_torch(devices[0])
    example = large(devices[0])
    runs = {"torch's partitioner": run, "a budget of its peak": TrainingRun(run.joint, _pair(run.joint, budget))}
    primals, tangents = run.joint.primals(**example.kwargs), run.joint.tangents()
    steps = [partial(lambda pair: pair.run(list(primals), tangents), one.pair) for one in runs.values()]
    theirs = run.profile.peak
    for (name, one), took in zip(runs.items(), _seconds(steps, devices[0]), strict=True):
        peak = measure_training(one, example, 0).by_device[str(devices[0])]
        what = f"a step of gpt2 by {name}, op by op"
        good = OK if peak <= theirs else FAILED
        yield Finding(check, what, f"{duration(took)}, peak {size(peak)}", f"at most {size(theirs)}", good)


def _budget_of_torch(device: torch.device) -> tuple[TrainingRun, Budget]:
    """Return a step of the large model as torch's min-cut partitioner divides it, and a budget of the same peak."""
    from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]

    example = large(device)
    joint = sk.capture_joint(example.model, **example.kwargs)
    theirs = TrainingRun(joint, joint.partition(min_cut_rematerialization_partition))
    kept = frozenset(theirs.pair.saved)
    return theirs, Budget(theirs.profile.peak, candidates=(Remat(lambda node: node.name in kept),))


def _compiled(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    kind = devices[0].type
    if not {"cpu": shutil.which("g++"), "cuda": find_spec("triton")}.get(kind):
        needs = "needs g++" if kind == "cpu" else "needs triton" if kind == "cuda" else f"is not tried on {kind}"
        yield Finding(check, "a step of gpt2", f"Inductor {needs}", "", NOT_RUN)
        return
    backends: dict[str, Any] = {
        "torch's own partitioner": "inductor",
        "MinCut": sk.backend(MinCut(), "inductor"),
        "a budget of torch's peak": sk.backend(_budget_of_torch(devices[0])[1], "inductor"),
        "Budget(0.5)": sk.backend(0.5, "inductor"),
    }
    steps: dict[str, Callable[[], None]] = {}
    for name, backend in backends.items():
        example = large(devices[0])
        steps[name] = partial(_step, torch.compile(example.model, backend=backend), example)
        steps[name]()
    for (name, step), took in zip(steps.items(), _seconds([*steps.values()], devices[0]), strict=True):
        peak = measure_memory(step, allocator=True)
        held = peak.peak if peak.allocator_peak is None else peak.allocator_peak
        yield Finding(check, f"a step of gpt2 by {name}", f"{duration(took)}, peak {size(held)}", "", MEASURED)


def _step(model: Any, example: Example, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Run forward and backward, update the weights if there is an optimizer, and leave no gradients."""
    loss = loss_of(model(**example.kwargs))
    assert loss is not None
    loss.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
    example.model.zero_grad(set_to_none=True)


def _seconds(works: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Return the median of some runs of each, one after the other in turn, after one that warms up."""
    took: list[list[float]] = [[] for _ in works]
    for _ in range(_REPEATS + 1):
        for work, times in zip(works, took, strict=True):
            _wait(device)
            start = perf_counter()
            work()
            _wait(device)
            times.append(perf_counter() - start)
    return [median(times[1:]) for times in took]


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# Checks of pipelines on ranks: equal to the unsplit model, over NCCL or the host, and what a killed rank leaves.


_RANKS_APART = 1e-5
"""The most that losses, gradients and weights may differ by, as for ``train --check``: sums run in another order."""
_BOUND = 30.0
"""Seconds in which the other ranks must have ended after one is killed."""


def _trials(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    (backend, placed), kind = _on(devices), check.removeprefix("ranks: ")
    for schedule in ("", ", ZBV"):
        yield _trial(check, f"{kind}{schedule}", backend, placed)


def _trial(check: str, kind: str, backend: str, devices: Sequence[str]) -> Finding:
    codes, said, _ = _launch(kind, backend, devices)
    lines = [json.loads(line) for line in said if line.startswith("{")]
    what = f"{kind}, ranks on {' and '.join(devices)} over {backend}"
    if any(codes) or len(lines) != len(devices):
        return Finding(check, what, f"ranks ended with {codes}", "equal", FAILED, "\n".join(said))
    most = max(lines, key=lambda line: line["apart"])
    figure = f"{most['apart']:.1e} apart, most in {most['worst']}"
    return Finding(check, what, figure, f"at most {_RANKS_APART:.0e}", OK if most["apart"] <= _RANKS_APART else FAILED)


def _on(devices: Sequence[torch.device]) -> tuple[str, list[str]]:
    """Return the backend and the devices of two ranks: the two that are given, or both on the first."""
    first = str(devices[0])
    if devices[0].type == "cpu":
        return "gloo", [first, first]
    if devices[0].type == "cuda" and len(devices) > 1 and devices[1].type == "cuda":
        return "nccl", [first, str(devices[1])]
    return "host", [first, first]


def _nccl(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    if devices[0].type != "cuda":
        yield Finding(check, "a pipeline of one rank", f"{devices[0]} has no NCCL", "", NOT_RUN)
        return
    yield _trial(check, "forward plan", "nccl", [str(devices[0])])


def _killed(check: str, devices: Sequence[torch.device]) -> Iterator[Finding]:
    backend, placed = _on(devices)
    codes, said, seconds = _launch("killed rank", backend, placed)
    named = any("rank 1" in line for line in said)
    good = named and codes[0] not in (0, None) and seconds <= _BOUND
    figure = f"rank 0 {'named rank 1 and ' if named else ''}ended with {codes[0]} after {seconds:.1f} s"
    limit = f"named, within {_BOUND:.0f} s"
    yield Finding(check, f"1f1b over {backend}", figure, limit, OK if good else FAILED, "" if good else "\n".join(said))


def _launch(kind: str, backend: str, devices: Sequence[str]) -> tuple[list[int | None], list[str], float]:
    """Run a trial on ranks; return their exit codes, all that they printed, and the seconds after the first ended."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(devices))}
    env |= {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "splitkit.cli.selftest.rank_trial", kind, backend, device],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, device in enumerate(devices)
    ]
    said = [*started[-1].communicate()[0].splitlines()]
    first = monotonic()
    for process in started[:-1]:
        try:
            said += process.communicate(timeout=_BOUND)[0].splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            said += process.communicate()[0].splitlines()
    return [process.returncode for process in started], said, monotonic() - first


# One process of ``splitkit doctor --device``: runs checks on devices and prints what they find, a JSON line each.


CHECKS: dict[str, Callable[[str, Sequence[torch.device]], Iterable[Finding]]] = {
    **dict.fromkeys(("equal: gpt2", "equal: llama", "equal: t5", "equal: conv net"), _equal),
    "equal: two devices": _two_devices,
    "capture: on meta": _on_meta,
    "capture: CUDA graphs": _cuda_graphs,
    "streams: offload": _offload,
    "memory: forward": _forward_memory,
    "memory: budgets": _budgets,
    "memory: a training loop": _loop,
    "speed: prices": _times,
    "speed: order of plans": _order,
    "speed: torch's peak": _beside_torch,
    "speed: compiled": _compiled,
    **dict.fromkeys(("ranks: forward plan", "ranks: joint plan"), _trials),
    "ranks: one rank of NCCL": _nccl,
    "ranks: a killed rank": _killed,
}
"""Name of a check -> what runs it on devices, the first of which is tested; with the names of `SECONDS`."""


def run(name: str, devices: Sequence[torch.device]) -> bool:
    """Run a check and print its findings; return whether it raised an exception."""
    try:
        for finding in CHECKS[name](name, devices):
            print(json.dumps(asdict(finding)), flush=True)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        line = Finding(name, "the whole check", said, "no error", FAILED, traceback.format_exc(limit=-8))
        print(json.dumps(asdict(line)), flush=True)
        return True
    finally:
        print(json.dumps({"end": name}), flush=True)
    return False


def main() -> None:
    """Run the checks of the command line until one raises: what follows would run on what it left behind."""
    devices = [torch.device(device) for device in json.loads(sys.argv[1])]
    if devices[0].type != "cpu":
        torch.accelerator.set_device_index(devices[0])
    for name in json.loads(sys.argv[2]):
        if run(name, devices):
            break


assert CHECKS.keys() == SECONDS.keys()

if __name__ == "__main__":
    main()
