"""The layers of a graph at each level, and where cuts may fall."""

from __future__ import annotations

import pytest
import torch
from decodermodels import Decoder, Twice, TwoLists, captured, ids
from torch import nn

from splitkit.costs import unit
from splitkit.errors import PlanError
from splitkit.exports.carried_plan import layer_sequence
from splitkit.graph.dataflow import waits_for

LEVELS = ("nodes", "modules", "layers", "chain", "ends", "blocks")


@pytest.fixture(scope="module")
def decoder():
    return captured(Decoder(3), ids())


def names(flow, level):
    return ["+".join(layer.names) for layer in layer_sequence(flow, unit(flow), level).layers]


def test_the_levels_of_a_decoder(decoder):
    _, flow = decoder
    blocks = ["layers.0", "layers.1", "layers.2"]
    assert names(flow, "layers") == ["tok_embeddings", *blocks, "norm", "lm_head"]
    assert names(flow, "chain") == ["tok_embeddings", *blocks, "norm", "lm_head"]
    assert names(flow, "ends") == ["tok_embeddings", *blocks, "norm+lm_head"]
    assert names(flow, "blocks") == ["tok_embeddings+layers.0", "layers.1", "layers.2+norm+lm_head"]
    inner = names(flow, "modules")
    assert inner[:2] == ["tok_embeddings", "rotary"] and {"layers.1", "layers.2.down", "norm"} <= {*inner}


@pytest.fixture(scope="module", params=[Decoder, TwoLists, Twice], ids=lambda kind: kind.__name__)
def flow(request):
    return captured(request.param(), ids() if request.param is Decoder else torch.randn(2, 8))[1]


@pytest.mark.parametrize("level", LEVELS)
def test_every_node_is_in_one_layer_or_shared_and_borders_keep_the_order(flow, level):
    sequence = layer_sequence(flow, unit(flow), level)
    laid = [node for layer in sequence.layers for node in layer.nodes]
    assert len(laid) == len({*laid}) and {*laid, *sequence.shared} == {*flow.nodes}
    number = sequence.number
    for border in range(1, len(sequence.layers)):
        backwards = any(
            number[read] >= border > number[node] for node in number for read in waits_for(flow, node) if read in number
        )
        assert (border in sequence.borders) is not backwards


def test_rotary_tables_are_shared_and_named(decoder):
    _, flow = decoder
    sequence = layer_sequence(flow, unit(flow), "layers")
    assert sequence.shared_modules == {"rotary": frozenset({1, 2, 3})}
    assert all("rotary" not in name for layer in sequence.layers for name in layer.names)


def test_a_value_of_no_layer_goes_with_its_first_reader():
    """Else the first layer would wait for a later one, and no cut could fall between them."""

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x):
            x = self.layers[0](x)
            twice = x * 2
            return self.layers[2](self.layers[1](twice) + twice)

    _, flow = captured(Skips(), torch.randn(2, 8))
    sequence = layer_sequence(flow, unit(flow), "layers")
    node = next(node for node in flow.nodes if "mul" in node.name)
    assert sequence.number[node] == 1 and sequence.borders == (1, 2)


def test_a_module_that_runs_twice_is_no_place_for_a_cut():
    _, flow = captured(Twice(), torch.randn(2, 8))
    assert "shared" not in names(flow, "modules")[1:]
    whole = layer_sequence(flow, unit(flow), "layers")
    assert whole.layers[0].names == ("shared",) and whole.borders == ()


def test_nodes_that_write_one_memory_stay_together():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

        def forward(self, x):
            first = self.layers[0](x)
            second = self.layers[1](first)
            first.add_(1)
            return self.layers[3](self.layers[2](second + first))

    _, flow = captured(Writes(), torch.randn(2, 8))
    sequence = layer_sequence(flow, unit(flow), "layers")
    assert 1 not in sequence.borders and 3 in sequence.borders


def test_a_model_without_blocks_is_refused():
    _, flow = captured(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(PlanError, match="SK522.*no list of blocks"):
        layer_sequence(flow, unit(flow), "layers")
    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    from splitkit.graph.dataflow import analyze

    with pytest.raises(PlanError, match="SK522.*no module paths"):
        layer_sequence(analyze(gm), unit(gm), "modules")


def test_cuts_of_a_plan(decoder):
    """Only of parts that run in this order, one after another, each with layers of its own."""
    _, flow = decoder
    sequence = layer_sequence(flow, unit(flow), "layers")
    plan = sequence.plan((2, 4), "")
    assert sequence.cuts_of(plan, [0, 1, 2]) == (2, 4)
    for keys in ([0, 2, 1], [2, 1, 0], [0, 1], [0, 1, 2, 3]):
        assert sequence.cuts_of(plan, keys) is None
    inside = plan.place(dict.fromkeys(sequence.layers[1].nodes[1:], (1,)))
    assert sequence.cuts_of(inside, [0, 1, 2]) is None
