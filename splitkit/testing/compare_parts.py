"""Compare each part of a split, as it is now, with the part as planned, on the inputs that it has in the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.codegen.emit import Emitted, emit
from splitkit.engine.module_names import Style
from splitkit.engine.split import Split
from splitkit.engine.subgraphs import extract_subgraphs
from splitkit.plans.parts import PartKey
from splitkit.testing.differences import NOISE, Difference, difference, is_rounding
from splitkit.testing.trial import Trial, TrialInputs, flattened_output, names_in, snapshot, trial, untouched

_MISSING = object()


@dataclass(frozen=True)
class PartComparison:
    """One part compared with the reference, on the same inputs.

    Attributes:
        part: the key of the part.
        worst: the output that differs most, or what the part writes (an input, a buffer, the RNG state). If these are
            the same up to rounding, a gradient that is not.
        ok: whether everything is the same up to rounding.
        node: if the part departs and still is the graph that was planned, up to single nodes that were edited,
            inserted or erased: the first node whose value differs from the value of the node of that name in the reference.
    """

    part: PartKey
    worst: Difference
    ok: bool
    node: Difference | None = None

    @property
    def error(self) -> float:
        """The largest absolute difference."""
        return self.worst.largest

    @property
    def relative(self) -> float:
        """The largest difference relative to the largest entry of the reference."""
        return self.worst.relative

    def __str__(self) -> str:
        """Return a line."""
        if self.worst.bitwise:
            return f"part {self.part}: the same"
        where = f"; first at node {_amount(self.node)}" if self.node else ""
        return f"part {self.part}: {'rounding: ' if self.ok else ''}{_amount(self.worst)}{where}"


def _amount(d: Difference) -> str:
    return f"{d.name} differs by {d.largest:.3g} ({d.relative:.2g} of its scale {d.scale:.3g})"


def compare_parts(
    split: Split,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    seed: int,
    tolerance: float,
    renamed: Mapping[str, str],
) -> tuple[PartComparison, ...]:
    """Run the graph that was split part by part; before each part runs, compare it with the part in its place now.

    Args:
        split: the split; its parts may have been replaced or edited.
        args: inputs.
        kwargs: keyword inputs.
        seed: random seed of the reference, and of each run of a part.
        tolerance: largest difference that counts as rounding, relative to the largest entry.
        renamed: name of a parameter or buffer of the split -> its name in the reference.
    """
    reference = _as_planned(split)
    rows: list[PartComparison] = []

    def compared(key: PartKey, part: nn.Module, given: tuple[Any, ...]) -> None:
        name = split.names[key]
        own = {n.removeprefix(f"{name}."): to for n, to in renamed.items() if n.startswith(f"{name}.")}
        modules = (part, split.module.get_submodule(name))
        runs = [trial(m, given, {}, seed, None, names_in(split.flow.root, m, own)) for m in modules]
        values = [v.name for v in split.subgraphs[key].outputs]
        worst, ok = _compared_runs(runs[0], runs[1], values, tolerance)
        rows.append(PartComparison(key, worst, ok, None if ok else _first_node(*modules, given, seed, tolerance)))

    for key, part in reference.parts.items():
        _before_its_call(part, lambda given, key=key, part=part: compared(key, part, given))
    inputs = TrialInputs((args, kwargs))
    with untouched(reference.module), torch.random.fork_rng():
        torch.manual_seed(seed)
        reference.module(*inputs.rebuilt[0], **inputs.rebuilt[1])
    return tuple(rows)


def _as_planned(split: Split) -> Emitted:
    """Return the split anew. Its parts are called plainly: a checkpoint would run them with hooks on saved tensors."""
    plain = {key: replace(part, call="plain") for key, part in split.plan.parts.items()}
    plan = replace(split.plan, parts=plain)
    return emit(split.flow, plan, extract_subgraphs(split.flow, plan), Style())


def _before_its_call(part: nn.Module, act: Any) -> None:
    """Call ``act`` with the inputs of a part before its first call; it may call the part itself."""

    def once(_: nn.Module, given: tuple[Any, ...]) -> None:
        handle.remove()
        act(given)

    handle = part.register_forward_pre_hook(once)


def _compared_runs(first: Trial, second: Trial, values: list[str], tolerance: float) -> tuple[Difference, bool]:
    """Return the worst difference of two runs of a part with outputs of these names, and whether it is rounding."""
    names = values if len(values) == len(first.outputs) else [f"output{path}" for path in first.outputs]
    titles = dict(zip(first.outputs, names, strict=True))
    written = sorted(first.changed.keys() | second.changed.keys())
    wrote, writes = ({name: run.state[name] for name in written if name in run.state} for run in (first, second))
    forward = [
        *_pairs(first.outputs, second.outputs, lambda path: titles.get(path, f"output{path}")),
        *_pairs(wrote, writes),
        *_pairs(first.ambient, second.ambient, "{} afterwards".format),
    ]
    worst, ok = _worst([_measured(name, a, b, tolerance) for name, a, b in forward])
    if not ok or first.no_backward:
        return worst, ok
    # a replaced part may hold other parameters: only gradients of tensors that both hold can be compared
    held = [{name.removeprefix("value of ") for name in run.state} for run in (first, second)]
    mine, theirs = ({n: g for n, g in run.gradients.items() if n in held[0] & held[1]} for run in (first, second))
    gradients = list(_pairs(mine, theirs, "gradient of {}".format))
    noise = NOISE * max((difference(n, a, b).scale for n, a, b in gradients), default=0.0)
    back = _worst([_measured(name, a, b, tolerance, noise) for name, a, b in gradients])
    return (worst, True) if back[1] else back


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any], title: Any = str) -> Iterable[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*first, *second]):
        yield title(name), first.get(name, _MISSING), second.get(name, _MISSING)


def _worst(found: list[tuple[Difference, bool]]) -> tuple[Difference, bool]:
    return max(found, key=lambda d: (not d[1], d[0].relative), default=(Difference("", 0.0, 0.0, True), True))


def _measured(name: str, a: Any, b: Any, tolerance: float, noise: float = 0.0) -> tuple[Difference, bool]:
    """Return a difference, and whether it is rounding. Entries of other dtypes or devices are measured all the same."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        found = difference(name, a, b)
        return found, found.bitwise
    pairs = zip(_kind(a), _kind(b), strict=True)
    other = ", ".join(f"{y} instead of {x}" for x, y in pairs if x != y)
    if other and a.shape == b.shape:
        a, b = a.detach(), b.detach().to(a)
    found = difference(f"{name} ({other})" if other else name, a, b)
    if other:
        return replace(found, bitwise=False), False
    rounds = a.is_floating_point() or a.is_complex()
    return found, is_rounding(found, tolerance if rounds else 0.0, noise)


def _kind(tensor: Tensor) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor.shape)) or "a scalar"
    return shape, str(tensor.dtype), str(tensor.device), f"requires_grad={tensor.requires_grad}"


def _first_node(
    reference: nn.Module, actual: nn.Module, given: tuple[Any, ...], seed: int, tolerance: float
) -> Difference | None:
    """Return the first node whose value is not the one of the reference, if both modules are the same graph."""
    if not isinstance(actual, fx.GraphModule) or not isinstance(reference, fx.GraphModule):
        return None
    if not _is_edited(reference.graph, actual.graph):
        return None
    first, second = (_values(module, given, seed) for module in (reference, actual))
    for name in (n for n in second if n in first):
        worst, ok = _worst([_measured(name, a, b, tolerance) for _, a, b in _pairs(first[name], second[name])])
        if not ok:
            return worst
    return None


def _is_edited(reference: fx.Graph, actual: fx.Graph) -> bool:
    """Return whether names stand for the same nodes: nodes were inserted, or erased, or others put in their places.

    In a graph that was traced anew, a name such as ``add_1`` may stand for another node.
    """
    names = [[n.name for n in g.nodes if n.op.startswith(("placeholder", "call_"))] for g in (reference, actual)]
    both = set(names[0]) & set(names[1])
    one, other = ([(i, n) for i, n in enumerate(side) if n in both] for side in names)
    fewest = min(map(len, names))
    return one == other or (len(both) == fewest and [n for _, n in one] == [n for _, n in other])


def _values(module: fx.GraphModule, given: tuple[Any, ...], seed: int) -> dict[str, Mapping[str, Any]]:
    with untouched(module), torch.random.fork_rng():
        torch.manual_seed(seed)
        run = _RecordedRun(module)
        run.run(*TrialInputs(given).rebuilt)
    return run.values


class _RecordedRun(fx.Interpreter):
    """Runs a graph and keeps a copy of each value from the time when it was computed, as path -> leaf."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, Mapping[str, Any]] = {}

    def run_node(self, n: Node) -> Any:
        """Run a node and keep its value."""
        value = super().run_node(n)
        if n.op.startswith("call_") and not _torch.functorch_depth():  # a tensor of a vmap does not outlive it
            if isinstance(value, Tensor) and "empty" in _torch.target_name(n):
                value.detach().zero_()  # whatever is in its memory is no difference
            leaves = flattened_output(value)[0].items()
            self.values[n.name] = {path: snapshot(v) for path, v in leaves if isinstance(v, (Tensor, int, float))}
        return value
