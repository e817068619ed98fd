"""Run random plans on random graphs against the oracle."""

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
from torch import fx

from splitkit import _torch
from splitkit.costs import unit
from splitkit.engine.split import Split, split
from splitkit.errors import CheckError, PlanError
from splitkit.graph.dataflow import Dataflow, analyze
from splitkit.plans.record import Plan
from splitkit.testing.compare import Comparison, compare
from splitkit.testing.oracle import assert_emitted_as_planned, assert_inlines, assert_same
from splitkit.testing.randoms import Choose, random_graph, random_inputs, random_plan
from splitkit.testing.sequential import runs_in_some_order
from splitkit.testing.trial import untouched
from splitkit.testing.visible import close_all


@dataclass
class FuzzReport:
    """What a fuzzing run met.

    Attributes:
        legal: plans that ran and gave the same as the whole.
        refused: error code -> plans that the engine refused.
        graphs: graphs that were tried; on some, gradients are off because autograd refuses them.
        shared: legal plans that did the same with one tensor as both inputs.
        shared_refused: those that refused such a call, or that cannot be compared in it.
        unusable: graphs that do not even run whole, and were passed over.
        judged: refusals that were put before the oracle (`splitkit.testing.sequential`).
        false: those of them whose parts would have run rightly in some order.
        undecided: those that have too many orders to try.
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
        """All plans that were tried."""
        return self.legal + self.refused.total()

    def __str__(self) -> str:
        refused = ", ".join(f"{count} {code}" for code, count in sorted(self.refused.items()))
        judged = self.judged and (
            f"; {self.false} of {self.judged} refusals would have run rightly in some order of the parts "
            f"({self.undecided} with too many orders to try)"
        )
        return (
            f"{self.plans} plans on {self.graphs} graphs: {self.legal} legal and the same as the whole, "
            f"{self.refused.total()} refused ({refused}); one tensor as both inputs: {self.shared} the same, "
            f"{self.shared_refused} refused or not compared; {self.unusable} graphs do not run whole"
            f"{judged or ''}"
        )


def try_plan(
    gm: fx.GraphModule, inputs: tuple[Any, ...], choose: Choose, report: FuzzReport, judge: bool = False
) -> None:
    """Draw one plan for a graph and hold it to the laws; perhaps judge a refusal.

    Raises:
        CheckError: SK701 when the engine ran a plan wrongly.
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


_JUDGED = ("SK203", "SK217", "SK218")


def _rounds_weights(gm: fx.GraphModule) -> bool:
    return any(n.target is _torch.ENTER_AUTOCAST for n in gm.graph.nodes)


def _judge(flow: Dataflow, plan: Plan, inputs: tuple[Any, ...], report: FuzzReport) -> None:
    """Ask the oracle whether a refused plan could have been run rightly."""
    tolerance = 5e-2 if _rounds_weights(flow.root) else 1e-4

    def is_right(module: fx.GraphModule) -> bool:
        try:
            assert_same_but_for_noise(compare(flow.root, module, *inputs, tolerance=tolerance))
        except Exception:  # it raises, or gives something else
            close_all()
            return False
        return True

    found = runs_in_some_order(flow, plan, is_right)
    report.judged += 1
    report.false += found is True
    report.undecided += found is None


def try_shared(gm: fx.GraphModule, made: Split, given: torch.Tensor, others: tuple[Any, ...] = ()) -> bool:
    """Give one tensor as both inputs: the split does what the whole does, or refuses the call (``False``).

    Raises:
        CheckError: SK701 when it does something else.
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
    except RuntimeError:  # the whole does not run so
        close_all()
        return False
    wrong = [i for i, (a, b) in enumerate(zip(whole, split_up, strict=True)) if not _alike(a, b)]
    if wrong:
        raise CheckError("SK701", f"one tensor given twice: the outputs {wrong} differ")
    return True


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.allclose(one.double(), other.double(), equal_nan=True)


def assert_same_but_for_noise(found: Comparison) -> None:
    """Random graphs cancel (``y - y``): all their gradients may be rounding. Backward begins with numbers of size 1.

    A normalisation of equal rows multiplies the rounding by ``1 / sqrt(eps)``, which is 316, and makes 3e-5 of it.
    """
    real = [d for d in found.failures if d not in found.gradients or not d.largest <= 1e-4]
    if real:
        found.raise_if_different()


def usable_inputs(gm: fx.GraphModule, seed: int = 0) -> tuple[Any, ...] | None:
    """Inputs on which the graph runs whole: with gradients, else (autograd refuses the graph's writes) without, with
    the parameters frozen. None if it does not run at all.
    """
    for with_gradients in (True, False):
        inputs = random_inputs(with_gradients, seed)
        for parameter in gm.parameters():
            parameter.requires_grad_(with_gradients)
        with suppress(RuntimeError), redirect_stderr(StringIO()):  # fx prints the traceback of what a graph raises
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
        plans: how many.
        seed: of the first graph; graph ``i`` is ``seed + i``, so a failure can be run again.
        plans_per_graph: plans for each graph.
        tick: called with the number of plans so far.
        judge: put each refusal before the oracle that runs the parts in every order.

    Raises:
        CheckError: SK701 when the engine ran a plan wrongly, with the seed in a note.
    """
    report = FuzzReport()
    while report.plans < plans:
        current = seed + report.graphs + report.unusable
        dice = random.Random(current)
        gm = random_graph(dice.randrange, 5 + dice.randrange(20), current)
        inputs = usable_inputs(gm, current)
        if inputs is None:
            report.unusable += 1
            continue
        report.graphs += 1
        for _ in range(plans_per_graph):
            try:
                try_plan(gm, inputs, dice.randrange, report, judge)
            except Exception as error:
                error.add_note(f"graph seed {current}:\n{gm.code}")
                raise
        tick(report.plans)
    return report
