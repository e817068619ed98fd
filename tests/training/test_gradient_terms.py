"""Terms of the gradient of a tied parameter, and sums that stay whole."""

from __future__ import annotations

import pytest
import torch
from jointgraphs import Hand, aten

from splitkit.training.stage_plan import GradientTerm, gradient_terms, tied_parameters


def tied(gradients="total", stages=(1, 0), alpha=None):
    """A parameter that two stages read, and the sum of its gradients."""
    h = Hand().inputs(w=1).op("early", 1, "w").op("late", 1, "early", "w").gradients(t=1)
    h.back("a", 1, "t", "late").back("b", 1, "a", "early").back("total", 1, "a", "b", target=aten.add.Tensor)
    if alpha is not None:
        h["total"].kwargs = {"alpha": alpha}
    flow = h.flow("late", gradients)
    places = {h[name]: (("backward", stage),) for name, stage in zip("ab", stages, strict=True)}
    return h, flow, places | {h["total"]: (("backward", stages[1]),)}


def test_each_stage_returns_its_own_term_the_last_one_first():
    h, flow, places = tied()
    terms = gradient_terms(flow, places)
    assert terms == [GradientTerm(0, (h["a"],), 1), GradientTerm(0, (h["b"],), 0)]
    assert places[h["total"]] == () and tied_parameters(terms) == {0: (1, 0)}


@pytest.mark.parametrize("options", [{"stages": (0, 0)}, {"alpha": 2}, {"gradients": "total total"}])
def test_sums_of_one_stage_with_a_factor_or_with_other_readers_stay_whole(options):
    h, flow, places = tied(**options)
    terms = gradient_terms(flow, places)
    assert {term.nodes for term in terms} == {(h["total"],)} and places[h["total"]] and not tied_parameters(terms)


def test_a_sum_of_another_shape_or_type_stays_whole():
    """A sum that is wider than its terms: neither of them can be the gradient."""
    for shape, dtype in (((1,), torch.float32), ((2,), torch.float64)):
        h, flow, places = tied()
        h["a"].meta["val"] = h["a"].meta["val"].new_empty(shape, dtype=dtype)
        terms = gradient_terms(flow, places)
        assert {term.nodes for term in terms} == {(h["total"],)} and places[h["total"]]
