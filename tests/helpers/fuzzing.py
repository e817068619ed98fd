"""Run random plans on random graphs, and check that each split is the same as the whole."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, Literal

import torch
from opaquecode import close_all
from randomgraphs import Choose, random_graph, random_inputs, random_plan
from sequentialorder import runs_in_some_order
from splitlaws import assert_emitted_as_planned, assert_inlines
from torch import fx

from splitkit import _torch
from splitkit.costs import unit
from splitkit.engine.split import Split, split
from splitkit.errors import CheckError, PlanError
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.plans.record import Plan
from splitkit.testing.compare import Comparison, assert_same, compare
from splitkit.testing.differences import untouched


@dataclass
class FuzzReport:
    """Counts of a fuzzing run.

    Attributes:
        legal: plans that ran and gave the same results as the whole.
        refused: error code -> plans that the engine refused.
        graphs: graphs that were tried, some without gradients because autograd refuses their writes.
        shared: legal plans that also gave the same results with one tensor as both inputs.
        shared_refused: legal plans that refused such a call, or whose results of it cannot be compared.
        unusable: graphs that do not run whole, and were skipped.
        judged: refusals that were checked by running the parts (`sequentialorder`).
        false: judged refusals of plans that would have run correctly in some order of the parts.
        undecided: judged refusals with too many orders to try.
    """

    legal: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    graphs: int = 0
    unusable: int = 0
    shared: int = 0
    shared_refused: int = 0
    judged: int = 0
    false: int = 0
    undecided: int = 0

    @property
    def plans(self) -> int:
        """Number of plans that were tried."""
        return self.legal + self.refused.total()

    def __str__(self) -> str:
        refused = ", ".join(f"{count} {code}" for code, count in sorted(self.refused.items()))
        judged = self.judged and (
            f"; {self.false} of {self.judged} refused plans would have run correctly in some order of the parts "
            f"({self.undecided} with too many orders to try)"
        )
        return (
            f"{self.plans} plans on {self.graphs} graphs: {self.legal} legal with the same results as the whole, "
            f"{self.refused.total()} refused ({refused}); one tensor as both inputs: {self.shared} the same, "
            f"{self.shared_refused} refused or not compared; {self.unusable} graphs do not run whole"
            f"{judged or ''}"
        )


def try_plan(
    gm: fx.GraphModule, inputs: tuple[Any, ...], choose: Choose, report: FuzzReport, judge: bool = False
) -> None:
    """Draw one random plan for a graph and check its split; if ``judge``, check refusals too.

    Raises:
        CheckError: SK701 if a split gives wrong results.
    """
    flow = analyze(gm)
    plan = random_plan(flow, choose)
    parameters: Literal["own", "hoist"] = "hoist" if choose(2) else "own"
    try:
        made = split(gm, plan, costs=unit(gm), parameters=parameters)
    except PlanError as error:
        report.refused[error.code] += 1
        if judge and error.code in _JUDGED:
            _judge(flow, plan, inputs, report)
        return
    assert_emitted_as_planned(made)
    assert_inlines(made)
    rounds_weights = _rounds_weights(gm)
    try:
        assert_same_but_for_noise(compare(gm, made, *inputs, tolerance=5e-2 if rounds_weights else 1e-4))
    except PlanError as error:
        if error.code != "SK219":
            raise
        report.refused[error.code] += 1
        return
    if rounds_weights or not try_shared(gm, made, inputs[0], inputs[2:]):
        report.shared_refused += not rounds_weights
    else:
        report.shared += 1
    report.legal += 1


# refusals that depend on the order of the parts: cycles, and what opaque code may change or rebind
_JUDGED = ("SK203", "SK217", "SK218")


def _rounds_weights(gm: fx.GraphModule) -> bool:
    return any(n.target is _torch.ENTER_AUTOCAST for n in gm.graph.nodes)


def _judge(flow: Dataflow, plan: Plan, inputs: tuple[Any, ...], report: FuzzReport) -> None:
    """Count whether a refused plan would have run correctly in some order of the parts."""
    tolerance = 5e-2 if _rounds_weights(flow.root) else 1e-4

    def is_right(module: fx.GraphModule) -> bool:
        try:
            assert_same_but_for_noise(compare(flow.root, module, *inputs, tolerance=tolerance))
        except Exception:  # any error means that the order is wrong
            close_all()
            return False
        return True

    found = runs_in_some_order(flow, plan, is_right)
    report.judged += 1
    report.false += found is True
    report.undecided += found is None


def try_shared(gm: fx.GraphModule, made: Split, given: torch.Tensor, others: tuple[Any, ...] = ()) -> bool:
    """Pass one tensor as both inputs; return whether the split accepted it and gave the same results as the whole.

    Raises:
        CheckError: SK701 if the results differ.
    """

    def run(module: fx.GraphModule) -> list[torch.Tensor]:
        with untouched(module), torch.random.fork_rng():
            torch.manual_seed(0)
            both = given.detach().clone()
            made = module(both, both, *copy.deepcopy(others))
            return [t.detach().clone() for t in (*made, both, *gm.state_dict().values())]

    try:
        with redirect_stderr(StringIO()):  # fx prints the traceback of what a graph raises
            whole, split_up = run(gm), run(made.module)
    except PlanError as error:
        if error.code != "SK212":
            raise
        return False
    except RuntimeError:  # the whole graph does not run with such inputs
        close_all()
        return False
    wrong = [i for i, (a, b) in enumerate(zip(whole, split_up, strict=True)) if not _alike(a, b)]
    if wrong:
        raise CheckError("SK701", f"one tensor given twice: the outputs {wrong} differ")
    return True


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.allclose(one.double(), other.double(), equal_nan=True)


def assert_same_but_for_noise(found: Comparison) -> None:
    """Raise if anything differs but gradients by at most 1e-4, where backward starts from values of size 1.

    In random graphs values cancel (``y - y``), so that all gradients may be rounding errors. Normalising equal rows
    multiplies rounding errors by ``1 / sqrt(eps)`` = 316, to about 3e-5.
    """
    real = [d for d in found.failures if d not in found.gradients or not d.largest <= 1e-4]
    if real:
        found.raise_if_different()


def usable_inputs(gm: fx.GraphModule, seed: int = 0) -> tuple[Any, ...] | None:
    """Return inputs on which the whole graph runs; ``None`` if there are none.

    If autograd refuses the graph's writes, the inputs require no grad and the parameters are frozen. A graph must give
    the same results twice, or no split of it could be judged.
    """
    for with_gradients in (True, False):
        inputs = random_inputs(with_gradients, seed)
        for parameter in gm.parameters():
            parameter.requires_grad_(with_gradients)
        # A graph may differ from itself: kernels give zeros of either sign, by how memory is aligned (seed 500283).
        with suppress(RuntimeError, CheckError), redirect_stderr(StringIO()):  # fx prints what a graph raises
            assert_same(gm, gm, *inputs)
            return inputs
        close_all()
    return None


def fuzz(
    plans: int,
    seed: int = 0,
    plans_per_graph: int = 5,
    tick: Callable[[int], object] = lambda done: None,
    judge: bool = False,
) -> FuzzReport:
    """Try ``plans`` random plans on random graphs.

    Args:
        plans: how many plans to try.
        seed: seed of the first graph; graph ``i`` is ``seed + i``, so a failure can be run again.
        plans_per_graph: plans for each graph.
        tick: called with the number of plans so far.
        judge: check each refusal by running the parts in every order.

    Raises:
        CheckError: SK701 if a split gives wrong results, with the seed in a note.
    """
    report = FuzzReport()
    while report.plans < plans:
        current = seed + report.graphs + report.unusable
        rng = random.Random(current)
        gm = random_graph(rng.randrange, 5 + rng.randrange(20), current)
        inputs = usable_inputs(gm, current)
        if inputs is None:
            report.unusable += 1
            continue
        report.graphs += 1
        for _ in range(plans_per_graph):
            try:
                try_plan(gm, inputs, rng.randrange, report, judge)
            except Exception as error:
                error.add_note(f"graph seed {current}:\n{gm.code}")
                raise
        tick(report.plans)
    return report
