"""Models under autocast that use a weight twice: compare tells rounding of kept casts from gradients that are lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk


class Twice(nn.Module):
    def __init__(self, cache=None, lose=False, stale=False):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4, bias=False)
        self.cache, self.lose, self.stale = cache, lose, stale

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=self.cache):
            a = self.linear(x)
            with torch.no_grad():
                target = self.linear(x)
                if self.stale:
                    self.linear.weight.mul_(1.5)
            b = nn.functional.linear(x + target, self.linear.weight.detach()) if self.lose else self.linear(x + target)
        return a.float().sum() + 10 * b.float().pow(2).sum()


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(2, 4)


def after_the_first(gm):
    names = [n.name for n in gm.graph.nodes]
    return lambda node: int(names.index(node.name) > names.index("linear"))


@pytest.mark.parametrize("cache", [None, True, False])
def test_a_split_that_casts_a_weight_anew_is_the_same(x, cache):
    model = Twice(cache)
    gm = sk.capture(model, x)
    found = sk.compare(model, sk.split(gm, after_the_first(gm)), x)
    assert found.same and found.recast == (cache is not False)
    assert ("without autocast's cache" in str(found)) == found.recast
    assert torch.is_autocast_cache_enabled()


def test_a_split_of_dynamos_graph_is_the_same(x):
    graphs = []
    torch._dynamo.reset()
    model = Twice()
    torch.compile(model, backend=lambda gm, example: graphs.append((gm, example)) or gm)(x)
    gm, example = graphs[0]
    names = [n.name for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    split = sk.split(gm, lambda node: int(names.index(node.name) > len(names) // 3))
    assert sk.compare(gm, split, *example).same


@pytest.mark.parametrize("wrong", ["lose", "stale"])
def test_a_gradient_that_is_lost_and_a_cast_that_is_stale_still_differ(x, wrong):
    with_cache = Twice(stale=wrong == "stale")
    other = Twice(cache=False, lose=wrong == "lose", stale=wrong == "stale")
    found = sk.compare(with_cache, other, x)
    assert not found.same and not found.recast


@pytest.mark.parametrize("region", [torch.no_grad, torch.inference_mode])
def test_a_cast_made_without_gradients_in_a_parts_region_takes_none_from_later_uses(x, region):
    """Torch keeps no cast that was made under no_grad (2.11, 2.13, 2.15); a part relies on that."""
    weight = torch.randn(4, 4, requires_grad=True)
    gradients = []
    for cache in (True, False):
        weight.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
            with region():
                (x @ weight).sum()
            y = x @ weight
        y.float().sum().backward()
        gradients.append(weight.grad)
    assert torch.equal(*gradients) and gradients[0].abs().min() > 0
