"""`Expert`: stages of whole blocks."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example
from torch import fx, nn

import splitkit as sk
from splitkit.errors import NoPlanError, PolicyError
from splitkit.graph.dataflow import module_path
from splitkit.policies import Expert
from splitkit.testing import assert_legal, assert_same, models
from splitkit.testing.models import Example


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x, mask):
        for layer in self.inner:
            x = layer(x) * mask
        return x


class Net(nn.Module):
    """A mask that all blocks read, an embedding before and a head after them."""

    def __init__(self, blocks):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.h = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        mask = torch.ones(4).cumsum(0)
        x = self.embed(x)
        for block in self.h:
            x = block(x, mask)
        return self.head(x).relu()


X = torch.randn(3, 4)


def planned(gm, policy):
    """Return the plan, checked, and the stages of each module path."""
    flow = sk.analyze(gm)
    plan = policy.assign(flow, sk.costs.default(gm))
    assert_legal(flow, plan)
    stages = {}
    for node in flow.nodes:
        (stage,) = plan[node]
        stages.setdefault(module_path(node), set()).add(stage)
    assert sorted(plan.parts) == list(range(len(plan.parts)))
    assert plan.claim is None, "a human claims nothing"
    return plan, stages


def of_blocks(stages, prefix="h."):
    """Return block -> its stage."""
    found = {}
    for path, numbers in stages.items():
        if path.startswith(prefix):
            found.setdefault(int(path.removeprefix(prefix).split(".")[0]), set()).update(numbers)
    return [number for block in sorted(found) for number in found[block]]


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
def test_equal_counts_the_first_stages_one_more(how):
    net = Net(5)
    gm = sk.capture(net, X, how=how)
    plan, stages = planned(gm, Expert(3))
    assert of_blocks(stages) == [0, 0, 1, 1, 2]
    assert stages["embed"] == {0} and stages["head"] == {2}
    assert "2, 2, 1 blocks (5 in h)" in plan.note
    assert_same(gm, sk.split(gm, Expert(3)), X)


def test_given_counts():
    gm = sk.capture(Net(5), X)
    plan, stages = planned(gm, Expert([1, 3, 1]))
    assert of_blocks(stages) == [0, 1, 1, 1, 2]
    assert "1, 3, 1 blocks" in plan.note
    assert planned(gm, Expert((5,)))[0].parts.keys() == {0}


def test_given_beginnings_as_torchs_pipelining_splits():
    gm = sk.capture(Net(4), X)
    plan, stages = planned(gm, Expert(["h.3", "h.1.inner.1"]))
    assert stages["h.1.inner.0"] == {0} and stages["h.1.inner.1"] == {1}, "paths of any depth, in any order"
    assert of_blocks(stages)[-2:] == [1, 2] and stages["embed"] == {0}
    assert plan.note == "3 stages by hand, from h.3, h.1.inner.1"
    assert planned(gm, Expert(["head"]))[1]["head"] == {1}
    assert of_blocks(planned(gm, Expert(["head"]))[1]) == [0] * 4


def test_a_module_begins_with_its_first_node_at_any_depth():
    stages = planned(sk.capture(Net(3), X), Expert(["h", "h.0.inner.1", "h.1.inner", "h.2.inner.0"]))[1]
    assert [stages[f"h.{i}.inner.{j}"] for i in range(3) for j in range(2)] == [{1}, {2}, {3}, {3}, {4}, {4}]
    assert [stages[f"h.{i}"] for i in range(3)] == [{1, 2}, {3}, {4}]


class Between(nn.Module):
    """Tables that are made early and read late."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        table = torch.arange(4.0).cos()
        x = self.h[1](self.h[0](x))
        return self.h[3](self.h[2](x) * table) * table


@pytest.mark.parametrize("policy", [Expert(2), Expert(["h.2"])])
def test_tables_go_with_their_first_reader(policy):
    gm = sk.capture(Between(), X)
    plan, _ = planned(gm, policy)
    table = next(n for n in gm.graph.nodes if "cos" in str(n.target))
    assert plan.home(table) == 1 and {plan.home(n) for n in gm.graph.nodes if "arange" in str(n.target)} == {1}


class Written(nn.Module):
    """A late block writes memory that no earlier block reads; the order of effects is kept."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        state = torch.zeros(4)
        x = self.h[1](self.h[0](x))
        state.add_(1)
        return self.h[3](self.h[2](x)) + state


def test_effects_keep_their_order():
    net = Written()
    gm = fx.symbolic_trace(net)
    plan, _ = planned(gm, Expert(2))
    assert_same(gm, sk.split(gm, plan), X)


def test_blocks_that_run_twice_are_cut_where_they_begin():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.h = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            for _ in range(2):
                for layer in self.h:
                    x = layer(x)
            return x

    gm = fx.symbolic_trace(Twice())
    plan, _ = planned(gm, Expert(3))
    assert [plan.home(n) for n in sk.analyze(gm).nodes] == [0, 1, 2, 2, 2, 2]
    assert_same(gm, sk.split(gm, Expert(3)), X)


SIZES = {"layers": 3, "width": 32, "heads": 4, "vocab": 50, "seq": 8}


class EncoderAndDecoder(nn.Module):
    """The blocks of a T5 with three layers, by their names."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Module(), nn.Module()
        self.encoder.embed_tokens, self.decoder.embed_tokens = nn.Linear(4, 4), nn.Linear(4, 4)
        for side in (self.encoder, self.decoder):
            side.block = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(4, 2)

    def forward(self, input_ids, labels):
        read = self.encoder.embed_tokens(input_ids)
        for block in self.encoder.block:
            read = block(read, input_ids)
        told = self.decoder.embed_tokens(labels)
        for block in self.decoder.block:
            told = block(told, read)
        return self.lm_head(told)


def encoder_and_decoder(name):
    return (
        models.build(name, **SIZES) if name == "t5" else Example(EncoderAndDecoder(), (), {"input_ids": X, "labels": X})
    )


@pytest.mark.parametrize("name", these_first(["small"], ["t5"]))
def test_an_encoder_and_its_decoder_are_one_list(name):
    example = encoder_and_decoder(name)
    gm = sk.capture(example.model, **example.kwargs)
    plan, stages = planned(gm, Expert(4))
    assert of_blocks(stages, "encoder.block.") == [0, 0, 1] and of_blocks(stages, "decoder.block.") == [1, 2, 3]
    assert "2, 2, 1, 1 blocks (3 in encoder.block, 3 in decoder.block)" in plan.note
    assert stages["lm_head"] == {3} and stages["encoder.embed_tokens"] == {0}
    late = planned(gm, Expert(["decoder.block.2"]))[1]
    assert late["encoder.embed_tokens"] == {0} and of_blocks(late, "decoder.block.") == [0, 0, 1]
    assert_same(gm, sk.split(gm, Expert(4)), **example.kwargs)


def test_the_experts_of_a_layer_are_no_blocks():
    gm = captured_example("mixtral", **{**SIZES, "layers": 2, "experts": 4}).graph
    assert "1, 1 blocks (2 in model.layers)" in planned(gm, Expert(2))[0].note


def test_a_backbone_in_a_sequential_is_looked_into():
    net = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), nn.Linear(4, 4))
    plan, stages = planned(fx.symbolic_trace(net), Expert(4))
    assert of_blocks(stages, "0.") == [0, 1, 2, 3] and stages["1"] == {3}
    assert "(4 in 0)" in plan.note


def test_stages_of_a_convolutional_net_are_lists_side_by_side():
    net = nn.Sequential()
    for name, blocks in (("layer1", 2), ("layer2", 3)):
        net.add_module(name, nn.Sequential(*(nn.Linear(4, 4) for _ in range(blocks))))
    assert "3, 2 blocks (2 in layer1, 3 in layer2)" in planned(fx.symbolic_trace(net), Expert(2))[0].note


@pytest.mark.parametrize("layers", [0, True, 1.5, "h.3", [], [1, 0], [2, True], [1, "h.3"], None, b"h"])
def test_what_makes_no_sense_is_refused(layers):
    with pytest.raises(PolicyError, match="SK302"):
        Expert(layers)


def test_what_does_not_go_with_the_model_is_refused():
    gm = sk.capture(Net(3), X)
    with pytest.raises(NoPlanError, match="SK303.*3 blocks") as many:
        planned(gm, Expert(4))
    assert "at most 3" in many.value.remedy
    with pytest.raises(PolicyError, match=r"SK302.*1 \+ 3 = 4 blocks, but the model has 3"):
        planned(gm, Expert([1, 3]))
    with pytest.raises(PolicyError, match=r"SK304.*'h\.7'") as unknown:
        planned(gm, Expert(["h.7"]))
    assert "h.0" in unknown.value.remedy or "h.1" in unknown.value.remedy
    with pytest.raises(PolicyError, match="SK302.*h.1.inner begins where h.1 does"):
        planned(gm, Expert(["h.1", "h.1.inner"]))
    without = fx.symbolic_trace(nn.Linear(4, 4))
    with pytest.raises(NoPlanError, match="SK303.*0 blocks"):
        planned(without, Expert(2))


def test_nothing_comes_before_the_first_module():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(PolicyError, match="SK302.*0 begins the graph"):
        planned(fx.symbolic_trace(net), Expert(["0"]))


@pytest.mark.parametrize(("stages", "counts"), [(1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (5, [2, 2, 1, 1, 1])])
def test_the_first_stages_have_the_blocks_that_are_left_over(stages, counts):
    assert Expert(stages)._counts([("h", i) for i in range(7)]) == counts
