"""Checks of figures on a device: the bytes and seconds that plans predict, beside those that runs take."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from statistics import median
from time import perf_counter
from typing import Any

import torch

import splitkit as sk
from splitkit.cli.selftest.check_runs import FAILED, MEASURED, NOT_RUN, OK, Finding
from splitkit.cli.selftest.trial_models import large
from splitkit.engine.pair import Pair
from splitkit.frontends.joint_capture import Joint
from splitkit.graph.losses import loss_of
from splitkit.memory.measurement import MeasuredMemory, measure_memory
from splitkit.plans.policy import PolicyLike
from splitkit.policies import Budget, MinCut, Remat
from splitkit.testing.models import Example
from splitkit.testing.timing import TrainingRun, measure_training
from splitkit.training.flow import optimizer_memory
from splitkit.units import duration, size

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


def _forward_memory(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = "memory: forward"
    example = large(devices[0])
    gm = sk.capture(example.model, **example.kwargs)
    with torch.no_grad():
        gm(**example.kwargs)  # allocates the workspaces of libraries, which stay
        measured = measure_memory(partial(gm, **example.kwargs), allocator=True)
    planned = sk.simulate_memory(gm)
    yield from _bytes(check, "gpt2 without autograd", planned.peak, measured, devices[0])


def _budgets(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = "memory: budgets"
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


def _loop(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = "memory: a training loop"
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
    words = torch.cuda.get_device_name(device).lower().replace("-", " ")
    known = [name for name in sk.costs.devices() if all(word in words for word in name.split("-"))]
    return max(known, key=len, default="h100")


def _times(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check, device = "speed: prices", devices[0]
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


def _order(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = "speed: order of plans"
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
        alike = _rank_correlation(predicted, measured)
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


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic)


def _beside_torch(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check = "speed: torch's peak"
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


def _compiled(devices: Sequence[torch.device]) -> Iterator[Finding]:
    check, kind = "speed: compiled", devices[0].type
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


CHECKS: dict[str, Callable[[Sequence[torch.device]], Iterable[Finding]]] = {
    "memory: forward": _forward_memory,
    "memory: budgets": _budgets,
    "memory: a training loop": _loop,
    "speed: prices": _times,
    "speed: order of plans": _order,
    "speed: torch's peak": _beside_torch,
    "speed: compiled": _compiled,
}
"""Name of a check -> what runs it on devices, the first of which is tested."""
