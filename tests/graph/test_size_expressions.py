"""Symbolic sizes as data: what torch says of a size is what the data says, and what cannot be evaluated says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.graph.size_expressions import evaluated, expression_of, is_known, symbols_in, text_of
from splitkit.graph.storages import is_symbolic, value_of


class Sizes(nn.Module):
    """Sizes that are sums, products, quotients and remainders of those of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape
        x = torch.cat([x, x[:, : length // 2], x[:rows, : (length + 3) % 4 + 1]], 1)
        x = nn.functional.pad(x, (0, max(0, 9 - length)))
        return x.new_ones(rows * length, x.shape[1]).sum() + x.sum()


def test_every_size_of_a_graph_is_the_one_that_running_it_gives():
    gm = sk.capture(Sizes(), torch.randn(4, 10), dynamic=True)
    symbols = [str(size.node.expr) for size in value_of(next(iter(gm.graph.nodes))).shape]
    for shape in ((4, 10), (3, 21)):
        seen: dict[str, torch.Size] = {}

        class Runs(torch.fx.Interpreter):
            def run_node(self, node, seen=seen):
                found = super().run_node(node)
                if isinstance(found, torch.Tensor):
                    seen[node.name] = found.shape
                return found

        Runs(gm).run(torch.randn(shape), enable_io_processing=False)
        sizes = dict(zip(symbols, shape, strict=True))
        values = {node.name: value_of(node) for node in gm.graph.nodes if node.name in seen}
        assert sum(map(is_symbolic, values.values())) > 5
        for name, value in values.items():
            assert [evaluated(expression_of(size), sizes) for size in value.shape] == list(seen[name])


def test_functions_are_python_s():
    size = ("Add", ("FloorDiv", "s0", 4), ("Mod", "s0", 4), ("Mul", ("Rational", 1, 2), "s1"), ("Max", 1, "s0"))
    assert evaluated(size, {"s0": 11, "s1": 6}) == 2 + 3 + 3 + 11
    assert evaluated(("And", ("Equality", "s0", 3), ("Not", ("LessThan", "s0", 2))), {"s0": 3}) == 1
    assert sorted(set(symbols_in(size))) == ["s0", "s1"]
    assert text_of(("Equality", ("Mul", "s0", "s1"), 6), {"s0": "x.shape[0]"}) == "(x.shape[0] * s1) == 6"


def test_what_cannot_be_evaluated_is_named():
    with pytest.raises(LookupError, match="s9"):
        evaluated(("Add", "s9", 1), {"s0": 1})
    with pytest.raises(LookupError, match="Sin"):
        evaluated(("Sin", "s0"), {"s0": 1})
    with pytest.raises(LookupError, match="5/2"):
        evaluated(("Mul", ("Rational", 1, 2), "s0"), {"s0": 5})
    assert not is_known(("Add", 1, ("Sin", "s0"))) and is_known("s0") and is_known(3)
