"""An autocast around capture is part of the graph, or the capture is refused."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import CaptureError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.last(self.first(x).relu() * scale)


def test_it_is_recorded_and_holds_wherever_the_graph_runs():
    model, x = Net(), torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        gm = sk.capture(model, x, scale=2.0)
        expected = model(x, scale=2.0)
    assert expected.dtype == torch.bfloat16
    for found in (gm(x, scale=2.0), sk.split(gm, sk.policies.Stages(2))(x, scale=2.0)):
        assert found.dtype == torch.bfloat16 and torch.equal(found, expected)
    assert model(x).dtype == torch.float32 and set(gm.state_dict()) == set(model.state_dict())


def test_gradients_are_those_of_eager_autocast():
    model, x = Net(), torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        gm = sk.capture(model, x)
        model(x).float().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    gm(x).float().sum().backward()
    assert all(map(torch.equal, expected, [p.grad for p in model.parameters()]))


def test_no_autocast_leaves_the_graph_as_it_was():
    model, x = Net(), torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        gm = sk.capture(model, x)
    assert not [node for node in gm.graph.nodes if "autocast" in node.name]


@pytest.mark.parametrize("patched", [False, True])
def test_forward_is_put_back(patched):
    model, x = Net(), torch.randn(2, 8)
    if patched:
        model.forward = lambda x: model.last(x)
    before = model.forward
    with torch.autocast("cpu", torch.bfloat16):
        gm = sk.capture(model, x)
        assert torch.equal(gm(x), model(x))
    assert ("forward" in vars(model)) == patched and model.forward == before
    assert inspect.signature(model.forward) == inspect.signature(before)


def test_a_model_that_cannot_be_captured_gets_its_forward_back():
    class Branches(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) if x.sum() > 0 else x

    model = Branches()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(CaptureError, match="SK401"):
        sk.capture(model, torch.randn(2, 8))
    assert "forward" not in vars(model)


def test_what_would_lose_it_is_refused():
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(CaptureError, match="SK401: autocast is active around capture, and symbolic_trace loses it"):
            sk.capture(Net(), torch.randn(2, 8), how="symbolic_trace")
        with pytest.raises(CaptureError, match="SK401: autocast is active around capture, and the joint graph"):
            sk.capture_joint(Net(), torch.randn(2, 8), loss=torch.sum)


class Updated(nn.Module):
    """Uses a weight under autocast, writes it, and uses it again; ``leaves``: after it has left the autocast."""

    def __init__(self, leaves: bool = False) -> None:
        super().__init__()
        self.layer, self.norm, self.leaves = nn.Linear(4, 4), nn.BatchNorm1d(4), leaves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.layer(self.norm(x))
            if not self.leaves:
                self.update()
                y = self.layer(self.norm(y.float()))
        if self.leaves:
            self.update()
            with torch.autocast("cpu", torch.bfloat16):
                y = self.layer(self.norm(y.float()))
        return y.float().square().mean()

    def update(self) -> None:
        with torch.no_grad():
            self.layer.weight.mul_(3)


DOORS = {
    "capture": lambda model, x: sk.capture(model, x),
    "capture_joint": lambda model, x: sk.capture_joint(model, x),
    "apply": lambda model, x: sk.apply(model, 0.5, x),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_weight_that_is_written_while_its_cast_is_kept_is_refused_and_the_remedy_works(door):
    x = torch.randn(8, 4)
    with pytest.raises(
        CaptureError, match="SK401: the model writes a weight inside an autocast: mul_ may write"
    ) as why:
        DOORS[door](Updated(), x)
    assert "Leave the autocast before the weight is written" in str(why.value)
    made = DOORS[door](Updated(leaves=True), x)
    if door == "capture":
        model = Updated(leaves=True)
        sk.compare(model, sk.capture(model, x), x).raise_if_different()
    assert made is not None
