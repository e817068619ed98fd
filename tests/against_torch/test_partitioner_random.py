"""CapabilityBasedPartitioner on random graphs: torch's partitions and code without effects, right results with them."""

from __future__ import annotations

import copy
import random
from collections import Counter

import pytest
from campaigns import every_third
from partitionergraphs import AS_IN_2_13, PARTITIONERS, Parts, Rule, inputs_for, listed, random_graph, runs, same, some

import splitkit as sk


def options_of(dice):
    return {
        "allows_single_node_partition": dice.random() < 0.6,
        "skip_horizontal_fusion": dice.random() < 0.4,
        "non_compute_ops": dice.choice([None, ["torch.sin"]]),
        "allowed_single_node_partition_ops": dice.choice([None, ["torch.cos"]]),
    }


needs_2_13 = pytest.mark.skipif(not AS_IN_2_13, reason="this torch divides otherwise")


@needs_2_13
@pytest.mark.parametrize("seed", every_third(range(120), 0))
def test_the_partitions_are_torchs_where_no_effect_orders_the_graph(seed):
    dice, gm = random.Random(seed), random_graph(seed)
    options, rule = options_of(dice), Rule(some(seed, dice.random()), every=True)
    torchs, ours = (listed(kind(gm, rule, **options).propose_partitions()) for kind in PARTITIONERS.values())
    assert ours == torchs


@needs_2_13
@pytest.mark.parametrize("seed", every_third(range(60), 1))
def test_the_fused_graphs_are_torchs(seed):
    """The same code, names, modules and meta in the parent and in each fused module."""
    gm = random_graph(seed)
    for node in gm.graph.nodes:
        node.meta["val"] = node.name
    dice = random.Random(seed)
    both = Parts(gm, Rule(some(seed, dice.random())), skip_horizontal_fusion=dice.random() < 0.5)
    torchs, ours = both.fused["torch"], both.fused["splitkit"]
    assert [*dict(ours.named_modules())] == [*dict(torchs.named_modules())]
    for (name, mine), theirs in zip(ours.named_modules(), torchs.modules(), strict=True):
        if hasattr(mine, "graph"):
            assert mine.code == theirs.code, name
            assert [n.meta for n in mine.graph.nodes] == [n.meta for n in theirs.graph.nodes]
    assert same(gm, ours, inputs_for(gm))


def outcome(seed):
    """How torch and splitkit do on a graph with effects; ``None`` if the graph itself does not run."""
    gm, dice = random_graph(seed, effects=True), random.Random(seed)
    inputs = inputs_for(gm)
    if not runs(gm, inputs):
        return None
    both = Parts(gm, Rule(some(seed, dice.random())), skip_horizontal_fusion=dice.random() < 0.4)
    both.fused["splitkit"].graph.lint()
    assert same(gm, both.fused["splitkit"], inputs), seed
    return same(gm, both.fused["torch"], inputs) if runs(both.fused["torch"], inputs) else False


def test_the_results_are_right_whatever_effects_there_are():
    """Torch's are wrong in a fifth of these graphs, without a word."""
    found = Counter(outcome(seed) for seed in range(24))
    assert found[True] > 5 and found[False] > 2


@pytest.mark.campaign
@pytest.mark.parametrize("start", range(1000, 3000, 100))
def test_the_results_are_right_on_many_graphs(start):
    assert Counter(outcome(seed) for seed in range(start, start + 100))[True] > 10


@pytest.mark.parametrize("seed", every_third(range(45), 2))
def test_limits_hold_on_random_graphs(seed):
    gm, dice = random_graph(seed, effects=True), random.Random(seed)
    most = dice.randint(1, 6)
    partitioner = sk.CapabilityBasedPartitioner(
        gm, Rule(some(seed, 0.7)), True, skip_horizontal_fusion=dice.random() < 0.3, max_nodes=most
    )
    inputs = inputs_for(gm)
    if not runs(gm, inputs):
        return
    partitions = partitioner.propose_partitions()
    assert all(p.size() <= most for p in partitions)
    assert partitioner.fewest_partitions(partitions) <= len(partitions)
    before = copy.deepcopy(gm)
    partitioner.fuse_partitions(partitions)
    assert same(before, gm, inputs)
