"""Grad modes of a captured model: what a block sets is the model's, what is outside of blocks is the caller's."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import splitkit as sk


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))


class Reentrant(Net):
    def forward(self, x):
        return checkpoint(self.b, checkpoint(self.a, x, use_reentrant=True), use_reentrant=True)


class Nested(Net):
    def forward(self, x):
        return checkpoint(lambda y: self.b(checkpoint(self.a, y, use_reentrant=True)), x, use_reentrant=True)


class OnInside(Net):
    """What a checkpoint returns takes no gradient where its caller takes none."""

    def body(self, y):
        with torch.no_grad():
            h = self.a(y)
        with torch.enable_grad():
            g = self.c(y)
        with torch.set_grad_enabled(True):
            return self.b(h) + y, g

    def forward(self, x):
        return *checkpoint(self.body, x, use_reentrant=True), self.c(x)


class OffInside(Net):
    """What a call sets in a checkpoint ends with the checkpoint."""

    def body(self, y):
        h = self.a(y)
        torch.set_grad_enabled(False)
        return h

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=True), self.c(x)


class WithoutGradient(Net):
    """No argument of the checkpoint requires grad, so that nothing inside gets one."""

    def body(self, y):
        with torch.enable_grad():
            return self.a(y)

    def forward(self, x):
        return checkpoint(self.body, x.detach(), use_reentrant=True), self.c(x)


class UnderNoGrad(Net):
    def forward(self, x):
        with torch.no_grad():
            h = checkpoint(self.a, x, use_reentrant=True)
        return h, self.b(h)


class UnderEnableGrad(Net):
    def forward(self, x):
        with torch.enable_grad():
            h = checkpoint(self.a, x, use_reentrant=True)
        return h, self.b(x)


class Blocks(Net):
    @torch.enable_grad()
    def on(self, x):
        return self.b(x)

    def forward(self, x):
        with torch.no_grad():
            h = self.a(x)
            g = self.on(x)
            k = self.c(x)
        with torch.set_grad_enabled(True):
            return h, g, k, self.c(x), self.on(h)


KINDS = [Reentrant, Nested, OnInside, OffInside, WithoutGradient, UnderNoGrad, UnderEnableGrad, Blocks]


def flags(run, x):
    """Which outputs require grad, and the grad mode that the call leaves."""
    made = run(x)
    made = made if isinstance(made, tuple) else (made,)
    return [t.requires_grad for t in made], torch.is_grad_enabled()


def saved_bytes(run, x):
    """Bytes that autograd keeps of a call for backward."""
    held = []
    with saved_tensors_hooks(lambda t: held.append(t.nbytes), lambda _: None):
        run(x)
    return sum(held)


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.__name__)
def runs(request):
    model, x = request.param(), torch.randn(2, 4, requires_grad=True)
    gm = sk.capture(model, x)
    return model, gm, sk.split(gm, sk.policies.RoundRobin(2), on_cycle="refine"), x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("caller", [nullcontext, torch.no_grad], ids=["grad", "no_grad"])
def test_a_captured_model_takes_the_gradients_that_the_model_takes(runs, caller):
    model, gm, split, x = runs
    with caller():
        assert flags(gm, x) == flags(split, x) == flags(model, x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_are_those_of_the_model(runs):
    model, gm, split, x = runs
    sk.compare(model, gm, x).raise_if_different()
    sk.compare(model, split, x).raise_if_different()


@pytest.mark.parametrize("kind", [Reentrant, Nested, OnInside])
def test_evaluation_of_a_checkpointed_model_keeps_nothing_for_backward(kind):
    model, x = kind(), torch.randn(2, 4, requires_grad=True)
    gm = sk.capture(model, x)
    split = sk.split(gm, sk.policies.RoundRobin(2), on_cycle="refine")
    assert saved_bytes(gm, x) > 0
    with torch.no_grad():
        assert saved_bytes(gm, x) == saved_bytes(split, x) == 0
