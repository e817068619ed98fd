"""Compare two modules on the same inputs, seed and state: outputs, gradients, buffers and side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit.engine.codegen.emit import Style, emit
from splitkit.engine.complete import check_plan, complete_plan
from splitkit.engine.split import Split
from splitkit.engine.subgraphs import extract_subgraphs
from splitkit.errors import CheckError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.part_order import part_order
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.short_repr import few
from splitkit.testing.differences import (
    GRADIENT_TOLERANCE,
    NOISE,
    Difference,
    Trial,
    TrialInputs,
    casting_anew,
    differences,
    flattened_output,
    is_rounding,
    measure_difference,
    names_in,
    snapshot,
    trial,
    untouched,
)

CASTS = 2.0**-5
"""Largest relative difference of a gradient that autocast's cache may explain. Autocast caches casts of weights, and
sums the gradients of its uses in bfloat16 (eight bits); parts cast separately, and their gradients are summed in
float32."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """The comparison of two runs; it prints as a few lines.

    Attributes:
        outputs: every leaf of the output, with its structure and shared memory where these differ.
        gradients: every parameter that has a gradient in either run, and every input that requires one.
        state: every buffer, parameter and input after the run, and the caller's RNG state, grad mode and autocast.
        loss: the loss of reference and candidate.
        loss_is_models: whether the loss is the model's own (`splitkit.graph.losses`), or a weighted sum of its outputs.
        tolerance: largest difference of a gradient that counts as rounding, relative to its scale.
        steps: if a `Split` differs from a model, comparisons of each step between them: ``"model"`` (two runs of the
            model), ``"capture"`` (the model and the graph that was split) and ``"split"`` (that graph and the split).
        no_backward: why gradients were not compared, if backward from the weighted sum of the outputs fails.
        recast: whether the gradients differed by the rounding of autocast's cache, and those shown are from a second
            run of both modules without the cache.
        parts: with ``parts=True``, each part of the split compared with the reference, in the order of execution.
    """

    outputs: tuple[Difference, ...]
    gradients: tuple[Difference, ...]
    state: tuple[Difference, ...]
    loss: tuple[float | None, float | None]
    loss_is_models: bool = False
    tolerance: float = GRADIENT_TOLERANCE
    steps: Mapping[str, Comparison] = field(default_factory=dict)
    no_backward: str = ""
    recast: bool = False
    parts: tuple[PartComparison, ...] = ()

    @property
    def same(self) -> bool:
        """Whether outputs, buffers and inputs are bitwise equal, and gradients equal up to rounding."""
        return not self.failures

    @property
    def failures(self) -> tuple[Difference, ...]:
        """The tensors that differ."""
        exact = [d for d in (*self.outputs, *self.state) if not d.bitwise]
        noise = NOISE * max((d.scale for d in self.gradients), default=0.0)
        return (*exact, *(d for d in self.gradients if not is_rounding(d, self.tolerance, noise)))

    def worst(self, which: str) -> Difference | None:
        """Return the entry of ``outputs``, ``gradients`` or ``state`` with the largest relative difference."""
        entries: tuple[Difference, ...] = getattr(self, which)
        return max(entries, key=lambda d: (not d.bitwise, d.relative), default=None)

    @property
    def wrong_step(self) -> str:
        """The first step that differs: ``"model"``, ``"capture"`` or ``"split"``; empty if that is not known."""
        return next((name for name, step in self.steps.items() if not step.same), "")

    @property
    def wrong_part(self) -> PartComparison | None:
        """The first part that departs from the reference by more than rounding, if the parts were compared."""
        return next((part for part in self.parts if not part.ok), None)

    def raise_if_different(self) -> None:
        """Raise a CheckError that names the tensors that differ, if there are any.

        The code is SK701 if the candidate is wrong or the wrong step is not known, SK702 if the graph that was split
        already differs from the model, and SK703 if two runs of the model differ.
        """
        if self.failures:
            remedy = "" if self.wrong_part and self.wrong_step == "split" else _REMEDIES[self.wrong_step]
            raise CheckError(_CODES.get(self.wrong_step, "SK701"), "\n".join(self._lines()), remedy)

    def __str__(self) -> str:
        """List the differences, or count the tensors that are the same."""
        if not self.same:
            return "\n".join(self._lines())
        counts = (f"{len(getattr(self, which))} {which}" for which in ("outputs", "gradients", "state"))
        worst = self.worst("gradients")
        rounding = f"; gradients to {worst.relative:.1g} of {worst.name}" if worst and not worst.bitwise else ""
        without = f"; no gradients, since backward from all outputs fails: {self.no_backward}"
        casts = "; gradients compared without autocast's cache of casts" if self.recast else ""
        head = f"same: {', '.join(counts)}{rounding}{casts}{without if self.no_backward else ''}"
        return "\n".join([head, *self._part_lines()])

    __repr__ = __str__

    def _lines(self) -> list[str]:
        lines = [_TITLES[self.wrong_step]]
        lines += [f"    {d.name}: differs by {d.largest:.3g} (scale {d.scale:.3g})" for d in self.failures[:8]]
        lines += [f"    and {len(self.failures) - 8} more"] if len(self.failures) > 8 else []
        return [*lines, *self._part_lines()]

    def _part_lines(self) -> list[str]:
        if not self.parts:
            return []
        wrong = self.wrong_part
        first = f": {wrong}" if wrong else ": none"
        head = f"first part that departs from the reference, given its inputs (tolerance {self.tolerance:.3g}){first}"
        return [head, *few(map(str, self.parts), "parts")]


_CODES = {"model": "SK703", "capture": "SK702"}
_TITLES = {
    "": "the candidate differs from the reference in",
    "model": "two runs of the model from the same seed and state differ; the split differs from the first in",
    "capture": "the graph that was split differs from the model (the capture changed it); the split differs from it in",
    "split": "the split differs from the graph that was split, which is the same as the model, in",
}
_REMEDIES = {
    "": "",
    "model": "Only a model that repeats its results can be compared: look for state outside of its buffers, and for "
    "random numbers that do not depend on torch's seed.",
    "capture": "Compare the model with the graph alone, splitkit.compare(model, gm, *inputs). torch.export fixes "
    "decisions of Python code, and an ExportedProgram that was made elsewhere has lost custom backwards and hooks.",
    "split": "If a part was replaced or edited, compare(model, split, *inputs, parts=True) names the first one that "
    "departs. If none was, this is a bug of splitkit: please report the plan.",
}


def compare(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *args: Any,
    seed: int = 0,
    loss: Callable[[Any], Tensor] | None = None,
    names: Mapping[str, str] | None = None,
    tolerance: float = GRADIENT_TOLERANCE,
    parts: bool = False,
    **kwargs: Any,
) -> Comparison:
    """Run two modules on the same inputs from the same RNG state, forward and backward, and compare all results.

    Both runs start from the same buffers; parameters, gradients, buffers, inputs, RNG state and grad mode are restored.
    This takes memory for one copy of all parameters and buffers, and for two sets of gradients.

    Args:
        reference: the original module.
        candidate: a module or a `Split` that shares the parameters of the reference or holds equal ones.
        args: inputs; each run gets copies, which share memory with each other where the inputs overlap.
        seed: random seed of both runs.
        loss: a function of the output that returns a scalar. The default is the ``loss`` of the output, else a
            weighted sum of all its tensors, so that every gradient is compared.
        names: name of a parameter or buffer of the candidate -> its name in the reference, if these are not the same
            objects; not needed for a `Split`.
        tolerance: largest difference of a gradient that counts as rounding, relative to its largest entry.
        parts: also compare each part of a `Split`, as it is now (replaced, compiled, quantised, edited), with the part
            as planned: `Comparison.parts`. This runs the graph that was split once more, and gives each part the inputs
            that it has in that run, so that no part is blamed for the error of an earlier one. ``tolerance`` then also
            holds for the outputs of parts, since compilers and quantisation round.
        kwargs: keyword inputs.

    Raises:
        TypeError: something is neither a module nor a split, or ``parts`` is set and ``candidate`` is no `Split`.
        GraphError: SK112 for tensors on ``meta``, or of a lazy module that was never called.

    If only gradients differ, by no more than the rounding of autocast's cache of casts, both modules run again without
    the cache, and the gradients of these runs are compared.

    If a `Split` differs, the graph that was split and the model run once more: ``steps`` and the error of
    ``raise_if_different`` say whether the model, the capture or the split is wrong.
    """
    original, other = _module(reference), _module(candidate)
    renamed = names if names is not None else getattr(candidate, "qualified_names", {})
    if parts:
        if not isinstance(candidate, Split):
            raise TypeError(f"parts=True takes a Split, which knows its parts, not {type(candidate).__name__}")
        whole = compare(reference, candidate, *args, seed=seed, loss=loss, names=names, tolerance=tolerance, **kwargs)
        return replace(whole, parts=compare_parts(candidate, args, kwargs, seed, tolerance, renamed))

    def run(module: nn.Module, renamed: Mapping[str, str]) -> Trial:
        return trial(module, args, kwargs, seed, loss, names_in(original, module, renamed))

    first, second = run(original, {}), run(other, renamed)
    found = _compare_trials(first, second, tolerance)
    if _may_be_casts(found):
        with casting_anew():
            again = _compare_trials(run(original, {}), run(other, renamed), tolerance)
        if again.same:
            return replace(found, gradients=again.gradients, recast=True)
    # a `Split` knows the graph that it was made of, so the wrong step can be found
    graph = getattr(getattr(candidate, "flow", None), "root", None)
    if found.same or graph is None or graph is original:
        return found
    steps = {"model": _compare_trials(first, run(original, {}), tolerance)}
    middle = run(graph, {})
    steps |= {"capture": _compare_trials(first, middle, tolerance), "split": _compare_trials(middle, second, tolerance)}
    return replace(found, steps=steps)


def _may_be_casts(found: Comparison) -> bool:
    """Return whether only gradients differ, by so little that autocast's cache may be the reason."""
    gradients = {id(d) for d in found.gradients}
    return bool(found.failures) and all(id(d) in gradients and d.largest <= CASTS * d.scale for d in found.failures)


def _compare_trials(first: Trial, second: Trial, tolerance: float) -> Comparison:
    # A split need not hold buffers that its graph never reads, but what either run changed must be the same in both.
    both = first.state.keys() & second.state.keys()
    state = sorted(both | first.changed.keys() | second.changed.keys())
    return Comparison(
        (*differences(first.outputs, second.outputs, "output{}"), *_other_shapes(first, second, both)),
        _difference_of_gradients(first, second),
        (
            *differences(_only(first.state, state), _only(second.state, state), "{}"),
            *differences(first.ambient, second.ambient, "{} afterwards"),
        ),
        (first.loss, second.loss),
        first.loss_is_models,
        tolerance,
        no_backward=first.no_backward,
    )


def _difference_of_gradients(first: Trial, second: Trial) -> tuple[Difference, ...]:
    if first.no_backward or second.no_backward:
        runs = measure_difference("whether backward runs", not first.no_backward, not second.no_backward)
        return () if runs.bitwise else (runs,)
    return differences(first.gradients, second.gradients, "gradient of {}")


def _module(model: Any) -> nn.Module:
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if not isinstance(module, nn.Module):
        raise TypeError(f"compare takes modules and splits, not {type(model).__name__}")
    return module


def _only(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _other_shapes(first: Trial, second: Trial, both: AbstractSet[str]) -> tuple[Difference, ...]:
    """Return differences in the containers of the outputs, and in the tensors with which outputs share memory."""
    known = both | {f"output{name}" for name in first.outputs.keys() & second.outputs.keys()}
    one, other = ({name: held & known for name, held in run.shared.items()} for run in (first, second))
    found = (
        measure_difference("structure of the output", first.structure, second.structure),
        *differences(one, other, "memory that output{} shares"),
    )
    return tuple(d for d in found if not d.bitwise)


# Compare each part of a split, as it is now, with the part as planned, on the inputs that it has in the reference.


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
            An inserted node is compared with the one that its reader read before.
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
    before = {node.name: node for node in reference.graph.nodes}
    read = [(before[n.name].all_input_nodes, n.all_input_nodes) for n in actual.graph.nodes if n.name in before]
    pairs = [pair for both in read for pair in zip(*both, strict=False)]
    # A node that reads others that are not known may belong to a graph that was traced anew.
    known = {b.name: a.name for a, b in pairs if a.name in second or {n.name for n in b.all_input_nodes} <= {*before}}
    same_as = known | {name: name for name in before}
    for name, value in second.items():
        if (one := same_as.get(name)) in first:
            sides = ({name + path: leaf for path, leaf in each.items()} for each in (first[one], value))
            worst, ok = _worst(sides, tolerance)
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


# Assert that a split computes what the whole computes, and that a plan can be carried out.


def assert_same(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *inputs: Any,
    seed: int = 0,
    tolerance: float = GRADIENT_TOLERANCE,
    **kwargs: Any,
) -> None:
    """Assert law 1: outputs, buffers and inputs are bitwise equal, gradients up to rounding. See `splitkit.compare`.

    Raises:
        CheckError: SK701, naming the tensors that differ.
    """
    compare(reference, candidate, *inputs, seed=seed, tolerance=tolerance, **kwargs).raise_if_different()


def assert_legal(flow: Dataflow, plan: Plan) -> None:
    """Assert law 4: raise a PlanError if the plan cannot be carried out correctly."""
    whole = complete_plan(flow, plan)
    check_plan(flow, whole)
    part_order(flow, whole)
