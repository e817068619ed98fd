"""Values at a border: what is received, and the gradient that goes back."""

from __future__ import annotations

import torch

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
