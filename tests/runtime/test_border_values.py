"""Values at a border: what is received, and the gradient that goes back."""

from __future__ import annotations

import pytest
import torch

from splitkit.errors import PipelineError
from splitkit.runtime.ranks.border_values import BorderValue


def test_the_gradient_of_a_value_that_is_read_transposed_can_be_sent():
    """gloo refuses a gradient that is not contiguous, as a divided backward would give it."""
    for written in (False, True):
        received = torch.randn(2, 3, requires_grad=True)
        value = BorderValue("x", torch.empty(2, 3, device="meta", requires_grad=True), written=written).unpacked(
            received
        )
        (gradient,) = torch.autograd.grad((value.t() * torch.arange(6.0).reshape(3, 2)).sum(), received)
        assert gradient.is_contiguous() and torch.equal(gradient, torch.arange(6.0).reshape(3, 2).t())


def test_what_has_no_gradient_is_read_as_it_came():
    received = torch.arange(3)
    assert BorderValue("x", torch.empty(3, dtype=torch.int64, device="meta")).unpacked(received) is received


CPU = torch.device("cpu")


def border(requires_grad=True, **more):
    return BorderValue("x", torch.empty(2, 3, device="meta", requires_grad=requires_grad), **more)


def test_what_is_sent_is_contiguous_and_has_a_gradient_where_one_comes_back():
    leaf = torch.randn(2, 3, requires_grad=True)
    sent = border().packed(leaf * 2, CPU, "after stage 0")
    assert sent.requires_grad and not sent._is_view() and torch.equal(sent, leaf * 2)
    plain = border(requires_grad=False).packed((leaf * 2).t().contiguous().t(), CPU, "after stage 0")
    assert not plain.requires_grad and plain.is_contiguous()
    number = BorderValue("n", torch.empty((), dtype=torch.float64, device="meta"), scalar=float)
    assert number.packed(0.5, CPU, "").item() == 0.5 and number.unpacked(number.packed(0.5, CPU, "")) == 0.5


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            torch.ones(2, 4, requires_grad=True),
            r"float32\[2, 4\] after stage 0; the next stage expects float32\[2, 3\]",
        ),
        (torch.ones(2, 3, dtype=torch.float64, requires_grad=True), r"x is float64\[2, 3\] after stage 0"),
        (torch.ones(2, 3), "without gradient after stage 0; the next stage expects .*, with a gradient"),
        (None, "x is "),
    ],
)
def test_what_does_not_fit_the_next_stage_is_refused(value, said):
    with pytest.raises(PipelineError, match=f"SK803: .*{said}") as caught:
        border().packed(value, CPU, "after stage 0")
    assert caught.value.nodes == ("x",)
