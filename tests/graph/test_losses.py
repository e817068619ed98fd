"""One rule for the loss at every entry point: what is called ``loss``, else the only number that requires grad."""

from __future__ import annotations

import collections
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import CaptureError, PipelineError
from splitkit.graph.losses import loss_of, no_loss
from splitkit.runtime.ranks.stage_chain import chain_of, last_stage_of, own_loss, require_loss
from splitkit.testing.models import Example
from splitkit.testing.timing import best_step


@dataclasses.dataclass
class Fields:
    logits: torch.Tensor
    loss: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slots:
    logits: torch.Tensor
    cost: torch.Tensor


class Attributes:
    def __init__(self, logits, cost):
        self.logits, self.cost = logits, cost


class Property:
    def __init__(self, logits, cost):
        self.logits, self.parts = logits, [cost, cost * 2]

    @property
    def loss(self):
        return self.parts[0]


class Named(NamedTuple):
    logits: torch.Tensor
    loss: torch.Tensor
    aux: torch.Tensor


FOUND = {
    "a key": lambda h, loss: {"logits": h, "aux": loss * 2, "loss": loss},
    "a key of another mapping": lambda h, loss: collections.UserDict(aux=loss * 2, loss=loss, logits=h),
    "a field of a tuple": lambda h, loss: Named(h, loss, loss * 2),
    "a field": Fields,
    "a property": Property,
    "the only number, with slots": Slots,
    "the only number, in an object": Attributes,
    "the only number, inside": lambda h, loss: ({"out": [h, {"cost": loss}]}, loss.detach()),
    "the number itself": lambda h, loss: loss,
    "one entry": lambda h, loss: (h, loss.reshape(1)),
    "twice the same": lambda h, loss: (loss, h, loss),
}
CLOSED = {"the only number, in an object"} if torch.__version__.startswith("2.11.") else set()
"""What Dynamo of torch 2.11 does not look into; a loss that is called so it finds there, too."""
REFUSED = {
    "two numbers": (lambda h, loss: (h, loss, loss * 2), "2 numbers require grad"),
    "no number": (lambda h, loss: {"logits": h, "cost": h * 2}, "none of its outputs is one number that requires grad"),
    "a number without gradient": (lambda h, loss: {"h": h, "n": loss.detach()}, "none of its outputs"),
    "no tensor": (lambda h, loss: 3.0, "the model returns a float without tensors"),
}


class Net(nn.Module):
    def __init__(self, gives):
        super().__init__()
        self.linear, self.gives = nn.Linear(4, 4), gives

    def forward(self, x):
        h = self.linear(x)
        return self.gives(h, h.square().mean())


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def net(gives):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(gives)


def expected(model):
    loss = model.linear(X).square().mean()
    return loss, torch.autograd.grad(loss, model.linear.weight)[0]


@pytest.mark.parametrize("name", FOUND)
def test_every_entry_point_finds_the_same_loss(name):
    model = net(FOUND[name])
    loss, gradient = expected(model)
    assert torch.equal(loss_of(model(X)), loss.reshape(loss_of(model(X)).shape))
    assert torch.equal(own_loss(model(X), None).reshape(()), loss)
    if name in CLOSED:
        with pytest.raises(CaptureError, match="SK401"):
            sk.capture_joint(model, X)
    else:
        step = sk.capture_joint(model, X).run(X)
        assert torch.allclose(step.loss, loss) and torch.allclose(step.gradients["linear.weight"], gradient)
    gm = sk.capture(model, X)
    same = sk.compare(model, gm, X)
    assert same.same and same.loss_is_models and same.loss == pytest.approx((float(loss.detach()),) * 2)
    timed = best_step(gm, (), Example(model, (X,), {}), 0, 1)
    assert timed.loss_is_models and timed.loss == pytest.approx(float(loss.detach())) and timed.backward is not None


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_loss_is_refused_with_its_outputs(name):
    gives, why = REFUSED[name]
    model = net(gives)
    assert loss_of(model(X)) is None and why in no_loss(model(X))
    with pytest.raises(CaptureError, match=rf"(?s)SK401: Net cannot be captured with its gradients: .*{why}.*loss="):
        sk.capture_joint(model, X)
    with pytest.raises(PipelineError, match=f"(?s)SK802: .*{why}"):
        own_loss(model(X), None)


def test_outputs_are_listed_by_name_shape_dtype_and_gradient():
    text = no_loss(net(lambda h, loss: {"h": Attributes(h, loss.detach()), "ids": [X.long()]})(X))
    assert "\n    output['h'].logits: float32[2, 4], requires grad" in text
    assert "\n    output['h'].cost: float32[]\n    output['ids'][0]: int64[2, 4]" in text
    assert "and 8 more" in no_loss([X] * 20)


def test_a_model_without_a_loss_takes_one():
    model = net(REFUSED["no number"][0])
    loss, gradient = expected(model)
    step = sk.capture_joint(model, X, loss=lambda out: out["logits"].square().mean()).run(X)
    assert torch.allclose(step.loss, loss) and torch.allclose(step.gradients["linear.weight"], gradient)


def chain(gives):
    gm = sk.capture(net(gives), X)
    nodes = sk.analyze(gm).nodes
    return chain_of(sk.split(gm, {n: int(i > 0) for i, n in enumerate(nodes)}))


def test_a_pipeline_waits_for_the_named_loss_alone():
    """Of several numbers it took none, whatever they were called."""
    found = chain(FOUND["a key"])
    ends = last_stage_of(found, None, True, False)
    assert ends.own is not None and ends.wanted == (ends.own,)
    output = found.split.module.graph.output_node()
    assert ends.own is dict(zip(["logits", "aux", "loss"], output.all_input_nodes, strict=True))["loss"]


def test_a_pipeline_without_a_loss_is_refused_before_it_runs():
    found = chain(REFUSED["no number"][0])
    with pytest.raises(PipelineError, match=r"SK802: .*none of its outputs(?s:.*)output\['logits'\]: float32\[2, 4\]"):
        require_loss(found, last_stage_of(found, None, True, False))


@pytest.mark.parametrize(("gives", "numbers"), [(FOUND["a key"], {1}), (REFUSED["two numbers"][0], {3})])
def test_backward_is_measured_from_the_loss_alone(monkeypatch, gives, numbers):
    """It began at all numbers, those too that only report something."""
    began, backward = set(), torch.autograd.backward

    def seen(tensors, *given, **options):
        began.add(len(tensors))
        return backward(tensors, *given, **options)

    monkeypatch.setattr(torch.autograd, "backward", seen)
    sk.costs.measured(sk.capture(net(gives), X), (X,), min_run_time=1e-6, backward=True)
    assert began == numbers


def test_why_there_is_no_loss_says_what_there_is():
    one, grad = torch.ones(()), torch.ones(2, requires_grad=True)
    assert no_loss({"a": 3}) == "the model returns a dict without tensors, and no loss"
    assert "none of its outputs is one number" in no_loss((one, grad))
    text = no_loss([grad.sum(), grad.sum(), *[one] * 12])
    assert "2 numbers require grad" in text and text.splitlines()[1] == "    output[0]: float32[], requires grad"
    assert text.splitlines()[-1] == "    and 2 more" and len(text.splitlines()) == 14
    assert "more" not in no_loss([one] * 12)
