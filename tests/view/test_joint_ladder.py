"""The picture of forward and backward: what it says is what the pair, the frontier and the simulation say."""

from __future__ import annotations

import re
from functools import cache
from itertools import accumulate

import pytest
import torch
from campaigns import these_first
from capturedmodels import joint_graph
from jointmodels import wide
from smallnets import UNet, loss_or_sum
from steeredpages import STEP
from torch import nn

import splitkit as sk
from splitkit.graph.joint_marks import backward_nodes, forward_outputs
from splitkit.policies import Budget, RecomputeAll, SaveAll
from splitkit.units import size
from splitkit.view.data.joint_ladder import HalvesView
from splitkit.view.svg.ladder_svg import BOX, LEFT, RIBBONS, halves_svg


@cache
def gpt2():
    joint = joint_graph("gpt2", **STEP)
    return joint, sk.costs.roofline(joint.graph_module, "a100")


@cache
def pair_of(policy):
    joint, costs = gpt2()
    return joint.split(policy, costs)


@pytest.fixture(scope="module", params=these_first(["gpt2"], ["t5"]))
def view(request):
    if request.param == "gpt2":
        joint, costs = gpt2()
        return HalvesView(joint.flow, [pair_of(RecomputeAll()), pair_of(SaveAll())], costs, chosen=1)
    joint, _ = wide(request.param)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    return HalvesView(
        joint.flow, [joint.split(policy, costs) for policy in (RecomputeAll(), SaveAll())], costs, chosen=1
    )


@pytest.fixture(scope="module")
def data(view):
    return view.to_dict()


def test_each_choice_is_its_pair(view, data):
    for pair, choice in zip(view.pairs, data["choices"], strict=True):
        profile = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
        assert (choice["peak"], choice["bytes"]) == (profile.peak, profile.saved)
        assert sum(nbytes for _, _, nbytes in choice["saved"]) == sum(value.nbytes for value in pair.saved_values)
        again = {n.name for n in pair.forward.graph.nodes if n.op != "placeholder"}
        again &= {n.name for n in pair.backward.graph.nodes if n.op != "placeholder"}
        assert [data["ops"]["name"][op] for op in choice["again"]] == [n for n in data["ops"]["name"] if n in again]
    assert data["choices"][0]["bytes"] < data["choices"][1]["bytes"]
    assert data["choices"][0]["seconds"] > data["choices"][1]["seconds"] == 0


def test_memory_unfolds_to_the_profile(view, data):
    for pair, choice in zip(view.pairs, data["choices"], strict=True):
        profile = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs)
        changes = [
            c for told in choice["memory"]["bytes"] for c in ([0] * int(told) if isinstance(told, str) else [told])
        ]
        assert tuple(accumulate(changes)) == profile.timeline
        told = choice["memory"]["steps"]
        ops = [op + k if op >= 0 else -1 for op, count in zip(told[::2], told[1::2], strict=True) for k in range(count)]
        names = [data["ops"]["name"][op] if op >= 0 else None for op in ops]
        assert len(names) == len(profile.steps)
        assert all(name in (None, step.name) for name, step in zip(names, profile.steps, strict=True))
        assert {step.name for step in profile.steps}.intersection(data["ops"]["name"]) == {*names} - {None}


def test_forward_goes_down_and_backward_stands_behind_it(view, data):
    ops, late = data["ops"], data["late"]
    assert len(ops["name"]) == len(view.flow.nodes) and 0 < late < len(ops["name"])
    for op, steps in enumerate(ops["reads"]):
        for read in (op - step for step in steps):
            assert read < op and (op >= late or (read < late and ops["row"][read] <= ops["row"][op]))
    assert sum(row["ops"] for row in data["rows"]) == len(ops["name"])


def test_ops_of_backward_stand_behind_those_of_forward():
    torch.manual_seed(0)
    nets = UNet(width=4, levels=2), nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    for net, x in zip(nets, (torch.randn(1, 3, 16, 16), torch.randn(2, 4)), strict=True):
        joint = sk.capture_joint(net, x, loss=loss_or_sum)
        data = HalvesView(joint.flow, [joint.split(SaveAll())], sk.costs.flops(joint.graph_module)).to_dict()
        assert forward_outputs(joint.graph_module.graph) == joint.signature.forward_outputs
        late = {node.name for node in backward_nodes(joint.graph_module.graph)}
        names = data["ops"]["name"]
        assert 0 < data["late"] < len(names) and late.isdisjoint(names[: data["late"]])
        assert late.issuperset(names[data["late"] :])


def test_time_is_that_of_the_prices(view, data):
    whole = sum(view.costs.seconds(node) for node in view.flow.nodes)
    choice = data["choices"][1]
    assert sum(choice["forward"]) + sum(choice["backward"]) == pytest.approx(whole, rel=1e-5)


def test_recompute_and_waiting_for_the_host_are_those_of_the_claim():
    net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU())))
    joint = sk.capture_joint(net, torch.randn(512, 64), loss=loss_or_sum)
    costs = sk.costs.roofline(joint.graph_module, "h100")
    pairs = [joint.split(Budget(0.0, offload=1e10), costs), joint.split(Budget(0.0), costs)]
    moved, again = HalvesView(joint.flow, pairs, costs).to_dict()["choices"]
    assert moved["waits"] > 0 == again["waits"]
    assert moved["waits"] + moved["seconds"] == pytest.approx(pairs[0].plan.claim.value, rel=1e-5)


def test_the_still_picture_is_the_ladder_of_the_page():
    """What is saved, what is computed again and what each row takes are those of the page's chosen plan."""
    joint, costs = gpt2()
    for policy in (SaveAll(), RecomputeAll(), Budget(0.5)):
        pair = pair_of(policy)
        view = HalvesView(joint.flow, [pair], costs)
        still, data = view.still(), view.to_dict()
        choice = data["choices"][0]
        assert still["saved"] == choice["saved"] and still["bytes"] == choice["bytes"]
        assert (still["times"]["forward"], still["times"]["backward"]) == (choice["forward"], choice["backward"])
        assert still["again"] == [data["ops"]["name"][op] for op in choice["again"]]
        assert sum(still["times"]["again"]) == pytest.approx(choice["seconds"])
        assert (still["rows"], still["edges"]) == (data["rows"], data["edges"])
        picture = halves_svg(view)
        assert f"{size(choice['bytes'])} saved for backward" in picture
        assert ("hatched" in picture) == bool(choice["again"])
        # equal layers are one box, whose hatched share is the time of what is computed again
        wide = [
            float(d.split("L")[-1].split(",")[0])
            for d in re.findall(r'd="([^"]*)" fill="none" stroke="#ffffff"', picture)
        ]
        last = max((data["ops"]["row"][op] for op in choice["again"]), default=None)
        if last is not None and still["times"]["again"][last]:
            share = still["times"]["again"][last] / still["times"]["backward"][last]
            assert wide[-1] - (LEFT + BOX + RIBBONS) == pytest.approx(max(4, BOX * share), abs=0.01)
        assert all(name in picture for name in ("transformer.h.1 … 2 ×2", "∇ lm_head", "backward ↑ (time)"))


def test_edges_are_the_values_that_forward_ops_read():
    joint, costs = gpt2()
    view = HalvesView(joint.flow, [pair_of(SaveAll())], costs)
    data, found = view.to_dict(), {}
    ops, late = data["ops"], data["late"]
    for op in range(late):
        for steps in ops["reads"][op]:
            made = op - steps
            key = ops["row"][made], ops["row"][op]
            if key[0] != key[1]:
                found.setdefault(key, set()).add(made)
    told = {(a, b): nbytes for a, b, nbytes in data["edges"]}
    assert told == {key: sum(ops["sorts"][ops["sort"][op]][2] for op in made) for key, made in found.items()}
