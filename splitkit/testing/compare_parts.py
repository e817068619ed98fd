"""Compare each part of a split, as it is now, with the part as planned, on the inputs that it has in the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.codegen.emit import emit
from splitkit.engine.module_names import Style
from splitkit.engine.split import Split
from splitkit.engine.subgraphs import extract_subgraphs
from splitkit.plans.parts import PartKey
from splitkit.testing.differences import NOISE, Difference, is_rounding, measure_difference
from splitkit.testing.trial import Trial, TrialInputs, flattened_output, names_in, snapshot, trial, untouched


@dataclass(frozen=True)
class PartComparison:
    """One part compared with the reference, on the same inputs.

    Attributes:
        part: the key of the part.
        worst: the output that differs most, or what the part writes (an input, a buffer, the RNG state). If these are
            the same up to rounding, a gradient that is not.
        ok: whether everything is the same up to rounding.
        node: if the part departs and still is the graph that was planned, up to single nodes that were edited,
            inserted or erased: the first node whose value is not the value of the node of its name in the reference.
    """

    part: PartKey
    worst: Difference
    ok: bool
    node: Difference | None = None

    @property
    def error(self) -> float:
        """The largest absolute difference; ``worst.relative`` is relative to the largest entry of the reference."""
        return self.worst.largest

    def __str__(self) -> str:
        """Return a line."""
        if self.worst.bitwise:
            return f"part {self.part}: the same"
        where = f"; first at node {_amount(self.node)}" if self.node else ""
        return f"part {self.part}: {'rounding: ' if self.ok else ''}{_amount(self.worst)}{where}"


def _amount(d: Difference) -> str:
    return f"{d.name} differs by {d.largest:.3g} ({d.relative:.2g} of its scale {d.scale:.3g})"


def compare_parts(
    split: Split, args: Any, kwargs: Any, seed: int, tolerance: float, renamed: Mapping[str, str]
) -> tuple[PartComparison, ...]:
    """Run the graph that was split part by part; before a part runs, compare it with the module in its place now.

    ``renamed`` maps names of parameters and buffers of the split to names in the reference; see `compare` for the rest.
    """
    # called plainly: a checkpoint would compare the parts with hooks on saved tensors
    plan = replace(split.plan, parts={key: replace(part, call="plain") for key, part in split.plan.parts.items()})
    reference = emit(split.flow, plan, extract_subgraphs(split.flow, plan), Style())
    rows: list[PartComparison] = []

    def compared(key: PartKey, _: nn.Module, given: tuple[Any, ...]) -> None:
        hooks[key].remove()
        prefix = f"{split.names[key]}."
        own = {name.removeprefix(prefix): to for name, to in renamed.items() if name.startswith(prefix)}
        modules = (reference.parts[key], split.module.get_submodule(split.names[key]))
        runs = [trial(m, given, {}, seed, None, names_in(split.flow.root, m, own)) for m in modules]
        worst, ok = _compared_runs(runs[0], runs[1], [v.name for v in split.subgraphs[key].outputs], tolerance)
        rows.append(PartComparison(key, worst, ok, None if ok else _first_node(*modules, given, seed, tolerance)))

    hooks = {key: part.register_forward_pre_hook(partial(compared, key)) for key, part in reference.parts.items()}
    inputs = TrialInputs((args, kwargs))
    with untouched(reference.module), torch.random.fork_rng():
        torch.manual_seed(seed)
        reference.module(*inputs.rebuilt[0], **inputs.rebuilt[1])
    return tuple(rows)


def _compared_runs(first: Trial, second: Trial, values: list[str], tolerance: float) -> tuple[Difference, bool]:
    """Return the worst difference of two runs of a part with outputs of these names, and whether it is rounding."""
    runs, written = (first, second), sorted(first.changed.keys() | second.changed.keys())
    sides = [dict[str, Any](zip(values, run.outputs.values(), strict=False)) for run in runs]
    if any(len(run.outputs) != len(values) for run in runs):
        sides = [{f"output{path}": value for path, value in run.outputs.items()} for run in runs]
    for side, run in zip(sides, runs, strict=True):
        side |= {name: run.state[name] for name in written if name in run.state}
    # a replaced part may hold other parameters: only gradients of tensors that both hold can be compared
    held = set() if first.no_backward else first.state.keys() & second.state.keys()
    both = [{n: g for n, g in run.gradients.items() if held & {n, f"value of {n}"}} for run in runs]
    noise = NOISE * max((measure_difference("", g, g).scale for g in both[0].values()), default=0.0)
    ambient = [{f"{name} afterwards": value for name, value in run.ambient.items()} for run in runs]
    gradients = [{f"gradient of {name}": value for name, value in side.items()} for side in both]
    found = (_worst(sides, tolerance), _worst(ambient, 0.0), _worst(gradients, tolerance, noise))
    return next((worst for worst in found if not worst[1]), found[0])


def _worst(sides: Iterable[Mapping[str, Any]], tolerance: float, noise: float = 0.0) -> tuple[Difference, bool]:
    first, second = sides
    found = [_measured(n, first.get(n), second.get(n), tolerance, noise) for n in dict.fromkeys([*first, *second])]
    return max(found, key=lambda d: (not d[1], d[0].relative), default=(Difference("", 0.0, 0.0, True), True))


def _measured(name: str, a: Any, b: Any, tolerance: float, noise: float) -> tuple[Difference, bool]:
    """Return a difference, and whether it is rounding. Entries of other dtypes or devices are measured all the same."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        found = measure_difference(name, a, b)
        return found, found.bitwise
    kinds = [
        ("" if t.is_nested else str(tuple(t.shape)), str(t.dtype), str(t.device), f"requires_grad={t.requires_grad}")
        for t in (a, b)
    ]
    other = ", ".join(f"{is_now} instead of {was}" for was, is_now in zip(*kinds, strict=True) if was != is_now)
    if other:
        found = measure_difference(f"{name} ({other})", a.detach(), b.detach().to(a))
        return replace(found, bitwise=False), False
    rounds = a.is_floating_point() or a.is_complex()
    found = measure_difference(name, a, b)
    return found, is_rounding(found, tolerance if rounds else 0.0, noise)


def _first_node(
    reference: fx.GraphModule, actual: nn.Module, given: tuple[Any, ...], seed: int, tolerance: float
) -> Difference | None:
    """Return the first node whose value differs from the reference, if both modules are the same graph."""
    if not isinstance(actual, fx.GraphModule) or not _is_edited(reference.graph, actual.graph):
        return None
    first, second = (_values(module, given, seed) for module in (reference, actual))
    compared = (_worst((first[name], second[name]), tolerance) for name in second if name in first)
    return next((worst for worst, ok in compared if not ok), None)


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
            self.values[n.name] = {
                n.name + path: snapshot(v) for path, v in leaves if isinstance(v, (Tensor, int, float))
            }
        return value
