"""Run two modules on the same input, seed and state, and say whether values, gradients and buffers are the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from splitkit.errors import CheckError
from splitkit.testing.trial import Trial, bitwise, casting_anew, named_tensors, pieces, trial

GRADIENT_TOLERANCE = 1e-4
"""Largest difference of a gradient, relative to its own largest entry, that counts as rounding: sums of the same terms
in another order."""

NOISE = 3e-7
"""A gradient that is zero but for rounding (the key bias of an attention, a bias before a batch norm) has no scale of
its own to be compared on. Where the largest gradient of the model is 1, such a gradient is up to 6e-7 and differs by up
to 2e-7 (float32, seen on small batches), so one of at most ten times this may differ by this. Larger ones may not."""

CASTS = 2.0**-5
"""Autocast keeps the cast of a weight for later uses, whose gradients it then sums in bfloat16 (eight bits) before they
are cast back; a part casts anew, and the gradients are summed in float32. Larger differences have another reason."""

_MISSING = object()


@dataclass(frozen=True)
class Difference:
    """One tensor of the reference beside the same one of the candidate.

    Attributes:
        name: ``output[0]``, ``gradient of transformer.wte.weight``, ``buffer running_mean`` ...
        largest: largest absolute difference; ``inf`` where one is missing, has another shape, dtype or
            ``requires_grad``, or is infinite or NaN in other places.
        scale: largest absolute entry of the reference that is finite.
        bitwise: whether every bit is equal.
    """

    name: str
    largest: float
    scale: float
    bitwise: bool

    @property
    def relative(self) -> float:
        """``largest`` in units of ``scale``."""
        return self.largest / self.scale if self.scale else self.largest


@dataclass(frozen=True, repr=False)
class Comparison:
    """Two runs side by side; printed, a few lines.

    Attributes:
        outputs: every leaf of the output; and its structure and the memory it shares, where these differ.
        gradients: every parameter that has a gradient in either run, and every input that takes one.
        state: every buffer, parameter and input as the run leaves it, and the caller's random state, grad mode and
            autocast.
        loss: the loss of reference and candidate.
        loss_is_models: whether the loss is the model's own (`splitkit.losses`), or a weighted sum of its outputs.
        tolerance: what counts as rounding for a gradient, relative to its scale.
        steps: where a `Split` differs from a model, the same comparison of each step on the way: ``"model"`` (the model
            beside itself, run again), ``"capture"`` (the model beside the graph that was split) and ``"split"`` (that
            graph beside the split).
        no_backward: why gradients were not compared: backward from the weighted sum of the outputs does not run.
        recast: the gradients differed by the rounding that autocast's cache of casts makes, and are those of a second
            run of both without that cache.
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

    @property
    def same(self) -> bool:
        """Outputs, buffers and inputs bitwise, gradients to rounding."""
        return not self.failures

    @property
    def failures(self) -> tuple[Difference, ...]:
        """What is not the same."""
        exact = [d for d in (*self.outputs, *self.state) if not d.bitwise]
        noise = NOISE * max((d.scale for d in self.gradients), default=0.0)
        return (*exact, *(d for d in self.gradients if not self._is_rounding(d, noise)))

    def _is_rounding(self, d: Difference, noise: float) -> bool:
        return d.bitwise or d.largest <= max(self.tolerance * d.scale, noise if d.scale <= 10 * noise else 0.0)

    def worst(self, which: str) -> Difference | None:
        """The entry of ``outputs``, ``gradients`` or ``state`` with the largest relative difference."""
        entries: tuple[Difference, ...] = getattr(self, which)
        return max(entries, key=lambda d: (not d.bitwise, d.relative), default=None)

    @property
    def wrong_step(self) -> str:
        """The first step that differs: ``"model"``, ``"capture"`` or ``"split"``; nothing if that is not known."""
        return next((name for name, step in self.steps.items() if not step.same), "")

    def raise_if_different(self) -> None:
        """Raise CheckError naming the tensors that differ.

        SK701: the candidate is to blame, or it is not known which step is; SK702: the graph that was split differs from
        the model already; SK703: the model differs from itself when it runs again.
        """
        if self.failures:
            raise CheckError(_CODES.get(self.wrong_step, "SK701"), "\n".join(self._lines()), _REMEDIES[self.wrong_step])

    def __str__(self) -> str:
        """What differs, or how many tensors are the same."""
        if not self.same:
            return "\n".join(self._lines())
        counts = (f"{len(getattr(self, which))} {which}" for which in ("outputs", "gradients", "state"))
        worst = self.worst("gradients")
        rounding = f"; gradients to {worst.relative:.1g} of {worst.name}" if worst and not worst.bitwise else ""
        without = f"; no gradients, as backward of all outputs does not run: {self.no_backward}"
        casts = "; gradients compared without autocast's cache of casts" if self.recast else ""
        return f"same: {', '.join(counts)}{rounding}{casts}{without if self.no_backward else ''}"

    __repr__ = __str__

    def _lines(self) -> list[str]:
        lines = [_TITLES[self.wrong_step]]
        lines += [f"    {d.name}: differs by {d.largest:.3g} (scale {d.scale:.3g})" for d in self.failures[:8]]
        return lines + ([f"    and {len(self.failures) - 8} more"] if len(self.failures) > 8 else [])


_CODES = {"model": "SK703", "capture": "SK702"}
_TITLES = {
    "": "the candidate differs from the reference in",
    "model": "the model, run twice from the same seed and state, differs from itself; and the split differs from it in",
    "capture": "the graph that was split already differs from the model (the capture changed it); the split differs in",
    "split": "the split differs from the graph that was split, which gives what the model gives, in",
}
_REMEDIES = {
    "": "",
    "model": "Only a model that gives the same twice can be compared: look for state outside of its buffers, and for "
    "random numbers that torch's seed does not decide.",
    "capture": "Compare the model with the graph alone, splitkit.compare(model, gm, *inputs). torch.export fixes what "
    "Python code decides, and an ExportedProgram that was made elsewhere has lost custom backwards and hooks.",
    "split": "This is a bug of splitkit: please report the plan.",
}


def compare(
    reference: Callable[..., Any],
    candidate: Callable[..., Any],
    *args: Any,
    seed: int = 0,
    loss: Callable[[Any], Tensor] | None = None,
    names: Mapping[str, str] | None = None,
    tolerance: float = GRADIENT_TOLERANCE,
    **kwargs: Any,
) -> Comparison:
    """Run both on the same inputs from the same random state, forward and backward, and compare everything.

    Both runs start from the same buffers, and leave parameters, gradients, buffers, inputs, random state and grad mode
    as they were. Memory: one copy of all parameters and buffers, and two sets of gradients.

    Args:
        reference: the original: a module.
        candidate: a module or a `Split`, sharing the parameters of the reference or holding equal ones.
        args: inputs, each run gets copies.
        seed: random seed of both runs.
        loss: from the output to a scalar. By default gradients are those of what the output calls ``loss``, else of a
            weighted sum of its tensors, so that none goes unseen.
        names: names of the candidate's parameters and buffers -> the reference's, where they are not the same objects;
            taken from a `Split` by itself.
        tolerance: what counts as rounding for gradients, relative to the largest entry of the gradient.
        kwargs: keyword inputs.

    Where only gradients differ, and by no more than the rounding of a weight's cast that autocast keeps for later uses,
    both run again with each cast made anew, and the gradients of these runs are compared.

    Where a `Split` differs, the graph that was split is run as well, and the model once more: ``steps`` and the error
    of ``raise_if_different`` tell whether the model, the capture or the split is to blame.
    """
    original, other = _module(reference), _module(candidate)
    renamed = names if names is not None else getattr(candidate, "qualified_names", {})

    def run(module: nn.Module, renamed: Mapping[str, str]) -> Trial:
        return trial(module, args, kwargs, seed, loss, _names(original, module, renamed))

    first, second = run(original, {}), run(other, renamed)
    found = _beside(first, second, tolerance)
    if _may_be_casts(found):
        with casting_anew():
            again = _beside(run(original, {}), run(other, renamed), tolerance)
        if again.same:
            return replace(found, gradients=again.gradients, recast=True)
    graph = getattr(getattr(candidate, "flow", None), "root", None)
    if found.same or graph is None or graph is original:
        return found
    steps = {"model": _beside(first, run(original, {}), tolerance)}
    middle = run(graph, {})
    steps |= {"capture": _beside(first, middle, tolerance), "split": _beside(middle, second, tolerance)}
    return replace(found, steps=steps)


def _may_be_casts(found: Comparison) -> bool:
    """Whether nothing differs but gradients, by so little that autocast's cache of casts may be the reason."""
    gradients = {id(d) for d in found.gradients}
    return bool(found.failures) and all(id(d) in gradients and d.largest <= CASTS * d.scale for d in found.failures)


def _beside(first: Trial, second: Trial, tolerance: float) -> Comparison:
    # A split need not hold buffers that its graph never reads; what either run changed must be in both.
    both = first.state.keys() & second.state.keys()
    state = sorted(both | first.changed.keys() | second.changed.keys())
    return Comparison(
        (*_differences(first.outputs, second.outputs, "output{}"), *_other_shapes(first, second, both)),
        _difference_of_gradients(first, second),
        (
            *_differences(_only(first.state, state), _only(second.state, state), "{}"),
            *_differences(first.ambient, second.ambient, "{} afterwards"),
        ),
        (first.loss, second.loss),
        first.loss_is_models,
        tolerance,
        no_backward=first.no_backward,
    )


def _difference_of_gradients(first: Trial, second: Trial) -> tuple[Difference, ...]:
    if first.no_backward or second.no_backward:
        runs = _difference("whether backward runs", not first.no_backward, not second.no_backward)
        return () if runs.bitwise else (runs,)
    return _differences(first.gradients, second.gradients, "gradient of {}")


def _module(model: Any) -> nn.Module:
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    if not isinstance(module, nn.Module):
        raise TypeError(f"compare takes modules and splits, not {type(model).__name__}")
    return module


def _names(original: nn.Module, other: nn.Module, renamed: Mapping[str, str]) -> dict[str, str]:
    """Names in ``other`` -> one name each in ``original``: of the same tensor, else of the same or the renamed name.

    A tensor with several names (tied weights) goes by the first.
    """
    first: dict[Tensor, str] = {}
    canonical: dict[str, str] = {}
    for name, tensor in named_tensors(original):
        canonical[name] = first.setdefault(tensor, name)
    return {n: first.get(t) or canonical.get(renamed.get(n, n), renamed.get(n, n)) for n, t in named_tensors(other)}


def _only(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _other_shapes(first: Trial, second: Trial, both: AbstractSet[str]) -> tuple[Difference, ...]:
    """Where the outputs sit in other containers, or share memory with other tensors of those that both runs have."""
    known = both | {f"output{name}" for name in first.outputs.keys() & second.outputs.keys()}
    one, other = ({name: held & known for name, held in run.shared.items()} for run in (first, second))
    found = (
        _difference("structure of the output", first.structure, second.structure),
        *_differences(one, other, "memory that output{} shares"),
    )
    return tuple(d for d in found if not d.bitwise)


def _differences(first: Mapping[str, Any], second: Mapping[str, Any], title: str) -> tuple[Difference, ...]:
    names = dict.fromkeys([*first, *second])
    return tuple(_difference(title.format(n), first.get(n, _MISSING), second.get(n, _MISSING)) for n in names)


def _difference(name: str, a: Any, b: Any) -> Difference:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        equal = _equal(a, b)
        return Difference(name, 0.0 if equal else math.inf, 0.0, equal)
    (where, x), (elsewhere, y) = pieces(a.detach()), pieces(b.detach())
    kinds = [(t.layout, t.dtype, t.device, t.requires_grad) for t in (a, b)]
    if kinds[0] != kinds[1] or where != elsewhere:
        return Difference(name, math.inf, 0.0, False)
    wide = torch.complex128 if x.is_complex() else torch.float64
    x, y = x.to(wide), y.to(wide)
    equal = bitwise(a, b)
    same = (x == y) | (x.isnan() & y.isnan())
    apart = (x - y).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0.0)
    scale = x.abs().masked_fill(~x.isfinite(), 0.0)
    return Difference(name, _largest(apart) if not equal else 0.0, _largest(scale), equal)


def _largest(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def _equal(a: Any, b: Any) -> bool:
    """Whether two objects are equal; a NaN equals itself, and what cannot be compared is another object."""
    if a is b or type(a) is not type(b):
        return a is b
    try:
        if isinstance(a, np.ndarray):
            same = np.array_equal(a, b) if a.dtype.hasobject else a.tobytes() == b.tobytes()
            return bool(same and a.dtype == b.dtype and a.shape == b.shape)
        return bool(a == b or (a != a and b != b))
    except Exception:
        return False
