"""Compare two modules on the same inputs, seed and state: outputs, gradients, buffers and side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from splitkit.engine.split import Split
from splitkit.errors import CheckError
from splitkit.short_repr import few
from splitkit.testing.compare_parts import PartComparison, compare_parts
from splitkit.testing.differences import (
    GRADIENT_TOLERANCE,
    NOISE,
    Difference,
    differences,
    is_rounding,
    measure_difference,
)
from splitkit.testing.trial import Trial, casting_anew, names_in, trial

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
