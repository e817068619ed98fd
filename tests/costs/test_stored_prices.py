"""All prices of each node of two small models, by all costs that are formulas, as they are stored."""

from __future__ import annotations

import pytest
import torch
from storedmodels import chain, joint
from storedtexts import assert_stored
from torch import nn

import splitkit as sk
from splitkit import costs
from splitkit.costs.recorded import costs_of, record_of
from splitkit.prices import price_name

DEVICE = costs.Device("mine", {"float32": 2e12, "float16": 1e13}, 1e11, 2**30, 3e-6)


def mixed():
    """A graph with products of two dtypes, ops of all kinds, a reduction, a view, a copy, random numbers."""

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.table = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Embedding(9, 4)
            self.drop = nn.Dropout(0.5)

        def forward(self, x, ids):
            h = torch.relu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
            y = nn.functional.scaled_dot_product_attention(h, h, self.table(ids))
            y = self.drop(torch.softmax(y, -1)).to(torch.float16) @ torch.ones(4, 4, dtype=torch.float16)
            return torch.cat([y, y.sort().values], -1).sum(1), y.max(-1).values.cumsum(-1)

    torch.manual_seed(0)
    return sk.capture(Mixed(), torch.randn(2, 3, 9, 9), torch.ones(2, 16, dtype=torch.long))


def priced(gm):
    return {
        "flops": costs.flops(gm),
        "unit": costs.unit(gm),
        "roofline": costs.roofline(gm, DEVICE),
        "tf32": costs.roofline(gm, "a100", tf32=True),
        "fused": costs.fused(gm, DEVICE),
    }


def lines_of(gm, found):
    """A line for each node and costs: seconds, FLOPs, bytes, bytes of parameters, backward."""
    for name, prices in found.items():
        yield f"{name}: {price_name(prices)}"
        for node in gm.graph.nodes:
            if node.op not in ("placeholder", "output", "get_attr"):
                told = [prices.seconds(node), prices.flops(node), prices.nbytes(node), prices.param_bytes(node)]
                told += [getattr(prices, what)(node) for what in ("backward", "moved") if hasattr(prices, what)]
                yield f"  {node.name}: {' '.join(f'{value:.6g}' for value in told)}"


@pytest.mark.parametrize("name", ["chain", "mixed"])
def test_prices_of_a_model(name):
    gm = chain()[0] if name == "chain" else mixed()
    found = priced(gm)
    found |= {
        f"{name} with backward": costs.training(prices)
        for name, prices in found.items()
        if name in ("roofline", "fused")
    }
    assert_stored(f"costs/{name}.txt", "\n".join(lines_of(gm, found)) + "\n")


def test_prices_of_a_training_step():
    gm = joint(32)[0].graph_module
    assert_stored("costs/joint.txt", "\n".join(lines_of(gm, priced(gm))) + "\n")


def test_prices_are_recorded_with_their_table():
    gm = chain()[0]
    lines = []
    for name, prices in priced(gm).items():
        for kind, given in (
            (name, prices),
            (f"{name} with backward", prices if name in ("unit", "tf32") else costs.training(prices)),
        ):
            record = record_of(given, gm)
            lines.append(
                f"{kind}: {record!r} {record.table and len(record.table)} {record.backward and len(record.backward)}"
            )
            again = costs_of(record, gm)
            for node in gm.graph.nodes:
                assert again.seconds(node) == pytest.approx(given.seconds(node), rel=1e-12), (kind, node)
    assert_stored("costs/records.txt", "\n".join(lines) + "\n")
