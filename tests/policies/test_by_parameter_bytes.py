"""Bytes of parameters in consecutive parts: counted by hand, by what the parts hold, and by brute force."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from capturedmodels import captured_example
from policygraphs import graph, labels
from torch import fx, nn
from zoographs import specimens

import splitkit as sk
from splitkit.cli.syntax import policy_spec
from splitkit.policies import ByParameterBytes
from splitkit.testing import assert_same


class Layers(nn.Module):
    """Make a relu, then for each number in ``order`` a product with the weight of that number, and a sin."""

    def __init__(self, sizes, order=None):
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.ones(size // 4)) for size in sizes)
        self.order = range(len(sizes)) if order is None else order

    def forward(self, x):
        x = x.relu()
        for i in self.order:
            x = (x * self.w[i].sum()).sin()
        return x


def traced(*given):
    return fx.symbolic_trace(Layers(*given))


def plan_of(gm, limit):
    return sk.plan(gm, ByParameterBytes(limit))


def held(part):
    """Return the bytes of the storages of a module."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in (*part.parameters(), *part.buffers())}
    return sum(storage.nbytes() for storage in storages.values())


def test_parts_are_filled_along_the_order():
    """The nodes are relu, then three times sum, mul and sin."""
    gm = traced([8, 4, 4])
    assert labels(gm, ByParameterBytes(16)) == [0] * 10
    assert labels(gm, ByParameterBytes(15)) == labels(gm, ByParameterBytes(12)) == [0] * 7 + [1] * 3
    assert labels(gm, ByParameterBytes(11)) == labels(gm, ByParameterBytes(8)) == [0] * 4 + [1] * 6
    assert labels(gm, ByParameterBytes("8B")) == labels(gm, ByParameterBytes(8))


def test_a_graph_without_parameters_is_one_part_and_one_without_nodes_none():
    plan = plan_of(graph(torch.sin, torch.cos), 1)
    assert list(plan.parts) == [0] and plan.claim.value == 1
    assert not plan_of(graph(), 1).parts


def test_a_weight_that_is_read_again_counts_once_in_a_part_and_again_in_another():
    assert labels(traced([8, 8], [0, 0, 1, 0, 1]), ByParameterBytes(16)) == [0] * 16
    assert labels(traced([8, 8, 8], [0, 1, 2, 0, 1]), ByParameterBytes(16)) == [0] * 7 + [1] * 6 + [2] * 3


def test_tied_weights_and_views_of_one_storage_count_as_the_storage():
    model = Layers([16, 16, 16])
    model.w[1] = model.w[0]
    assert labels(fx.symbolic_trace(model), ByParameterBytes(16)) == [0] * 7 + [1] * 3
    model.w[1] = nn.Parameter(model.w[0].detach()[2:])  # of other names, size and start
    assert labels(fx.symbolic_trace(model), ByParameterBytes(16)) == [0] * 7 + [1] * 3


def test_buffers_and_called_modules_count():
    norms = fx.symbolic_trace(nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(3))))
    assert norms.graph.find_nodes(op="call_module", target="0") and held(norms.get_submodule("0")) == 4 * 8 + 8
    assert labels(norms, ByParameterBytes(80)) == [0, 0, 1]


def test_the_claim_and_the_note_say_how_many_and_which_is_fullest():
    plan = plan_of(traced([4, 8, 8, 4]), 12)
    assert plan.note == "2 parts along graph order; part 0 is fullest: 12 B of 12 B of parameters"
    assert str(plan.claim) == "Fullest: part 0. No plan has fewer parts" and plan.claim.value == plan.claim.bound == 2
    assert plan_of(traced([4]), 12).note.startswith("1 part along")


def test_a_node_that_reads_more_than_the_limit_is_named_and_the_remedy_is_the_least_that_works():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.Linear(4, 4), nn.Linear(3, 3)))
    with pytest.raises(sk.errors.NoPlanError) as raised:
        plan_of(gm, "32B")
    error = raised.value
    assert error.code == "SK303" and error.nodes == ("_1",)
    assert error.reason == "_1 in 1 alone reads 80 bytes of parameters (80 B), the limit is 32"
    assert error.remedy == "ByParameterBytes(80) is the smallest limit that has a plan."
    assert labels(gm, policy_spec.parse("ByParameterBytes('80B')").build()) == [0, 1, 2]
    with pytest.raises(sk.errors.NoPlanError, match=r"ByParameterBytes\(80\)"):
        plan_of(gm, 79)


@pytest.mark.parametrize("limit", [0, -5, 1.5, True, None, "much"])
def test_a_limit_that_makes_no_sense(limit):
    with pytest.raises(sk.errors.PolicyError, match=r"SK302: ByParameterBytes\(limit="):
        ByParameterBytes(limit)


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_of_consecutive_parts_has_fewer(seed):
    draw = random.Random(seed)
    sizes = [4 * draw.randint(1, 6) for _ in range(draw.randint(1, 5))]
    order = [draw.randrange(len(sizes)) for _ in range(draw.randint(1, 7))]
    limit = draw.randint(max(sizes[i] for i in order), sum(sizes))

    def fits(run):
        return sum(sizes[i] for i in set(run)) <= limit

    def runs(cuts):
        return [order[a:b] for a, b in itertools.pairwise((0, *cuts, len(order)))]

    fewest = next(
        n + 1
        for n in range(len(order))
        if any(all(map(fits, runs(cuts))) for cuts in itertools.combinations(range(1, len(order)), n))
    )
    gm = traced(sizes, order)
    assert len(plan_of(gm, limit).parts) == plan_of(gm, limit).claim.value == fewest


@pytest.mark.parametrize("specimen", specimens().values(), ids=lambda specimen: specimen.name)
def test_the_parts_of_a_split_hold_no_more(specimen):
    for limit in (1, 300, 600, 1344):
        try:
            plan = plan_of(specimen.graph, limit)
        except sk.errors.NoPlanError as error:
            assert limit < int(error.remedy.split("(")[1].split(")")[0]) <= 1344
            continue
        assert all(held(part) <= limit for part in sk.split(specimen.graph, plan).parts.values())


def test_the_size_of_a_weight_that_is_asked_again_brings_the_weight_along():
    """The engine computes ``w.size()`` where it is read, so that part needs ``w`` as well."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x):
            size = self.w.size()
            return (x * self.w * self.v).view(size)

    gm = fx.symbolic_trace(Model())
    assert labels(gm, ByParameterBytes(16)) == [0, 0, 1, 2]
    assert [held(part) for part in sk.split(gm, plan_of(gm, 16)).parts.values()] == [16, 16, 16]


def test_gpt2_in_parts_that_hold_no_more_and_run():
    example, gm = captured_example("gpt2", layers=3, width=32, heads=2, vocab=200, batch=2, seq=16)
    tokens, positions, norm, block = 4 * 200 * 32, 4 * 1024 * 32, 4 * 2 * 32, 4 * (12 * 32 * 32 + 13 * 32)
    plan = plan_of(gm, "160KiB")
    made = sk.split(gm, plan)
    holds = [held(part) for part in made.parts.values()]
    assert holds == [tokens + positions + norm, 3 * block, tokens], "the head is tied to the embedding of tokens"
    assert plan.note == "3 parts along graph order; part 0 is fullest: 153 KiB of 160 KiB of parameters"
    assert len(plan_of(gm, held(gm)).parts) == 1 < len(plan_of(gm, held(gm) - 1).parts)
    assert_same(gm, made, *example.args, **example.kwargs)
