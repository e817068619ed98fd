"""Whoever reads a plan says the same: report, stages, explanation, comparison, export, page, file and command line."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace

import pytest
import torch
from campaigns import these_first
from trainingnets import random_training_graph

import splitkit as sk
from splitkit.cli import main
from splitkit.cli.commands.plan_training import stage_rows
from splitkit.hardware.device_specs import find_device
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.policies import Budget, ByName, Devices, MemoryBudget, Pipeline, RoundRobin, SplitBackward, Stages
from splitkit.runtime import decoder_memory
from splitkit.search.plan_figures import StagePricing
from splitkit.testing.models import build
from splitkit.units import duration, size
from splitkit.view.renderers import pictured


@functools.cache
def graph():
    example = build("llama", layers=3, batch=2, seq=32)
    return sk.capture(example.model, **example.kwargs)


UNEQUAL = ["h100", "l4"]
FAST, SLOW = (replace(find_device(name), name="mine") for name in UNEQUAL)
OWN_CPU = replace(find_device("cpu"), name="my host")
PLANS = {
    "unequal devices": Devices(UNEQUAL, links="pcie4"),
    "unequal devices, training": Devices(UNEQUAL, links="pcie4", optimizer="adam"),
    "a CPU among GPUs": Devices(["l4", "cpu"], links="pcie4"),
    "devices that differ under one name": Devices([FAST, SLOW], links="pcie4", optimizer="sgd", memory="250MB"),
    "a CPU with a limit": Devices({"cuda:0": "l4", "cpu": "cpu"}, links="pcie4", optimizer="adam", memory="415MB"),
    "devices by name": Devices({"cuda:0": "h100", "cuda:1": "l4"}, links="pcie4"),
    "devices of one kind": Devices(["l4", "l4"], memory=["20GiB", "16GiB"], links="pcie4"),
    "a matrix of links": Devices(UNEQUAL, links=sk.costs.Links.matrix([[0, 1e9], [2e9, 0]], 1e-5)),
    "pieces of a device": Devices(UNEQUAL, links="nvlink4", pieces=None),
    "stages": Stages(3),
    "inference": Stages(3, memory="20GiB", links="pcie4"),
    "a cache": Stages(2, objective="tokens", memory="2GiB"),
    "training": Stages(3, "1f1b", 6, links="nvlink4"),
    "an optimizer": Stages(3, optimizer="sgd", memory="20GiB", links="pcie4"),
    "two stages a rank": Stages(4, "interleaved-1f1b", 4, links="nvlink4"),
    "replicas": Stages(4, "1f1b", 8, replicas=(1, 2), links="nvlink4"),
    "a policy without a purpose": RoundRobin(3),
    "patterns": ByName({"model.layers.0*": 0, "*": 1}),
}


@functools.cache
def planned(name):
    gm = graph()
    return sk.plan(gm, PLANS[name], sk.costs.roofline(gm, "l4"), on_cycle="refine")


def renumbered(plan):
    """The plan with other keys of parts."""
    new = {key: f"part {i}" for i, key in enumerate(plan.parts)}
    places = {node: tuple(new.get(key) for key in keys) for node, keys in plan.items()}
    parts = {new[key]: replace(part, key=new[key]) for key, part in plan.parts.items()}
    return replace(plan, places=places, parts=parts)


def truth(plan):
    flow = sk.analyze(graph())
    return StagePricing.of(flow, plan, costs_of_plan(plan, flow))


LONG = ["pieces of a device", "two stages a rank", "devices that differ under one name"]


@pytest.mark.parametrize("name", these_first([name for name in PLANS if name not in LONG], LONG))
def test_readers_agree(name, tmp_path):
    gm, plan = graph(), planned(name)
    pricing = truth(plan)
    figures = pricing.figures(plan)
    keys = pricing.parts_of(plan)
    work = [stage.forward + stage.backward for stage in sk.stage_costs(gm, plan)]
    by_device = dict.fromkeys(figures.work, 0.0)
    for key, seconds in zip(keys, work, strict=True):
        by_device[pricing.row_of(pricing.device_of(key))] += seconds
    trains = plan.request.purpose != "inference"
    if pricing.request.training or not trains:  # without a schedule and a purpose, a load is forward alone
        assert by_device == pytest.approx(dict(figures.work), rel=1e-12)
    if plan.claim is not None and plan.claim.objective == "bottleneck" and len(figures.rank_loads) == len(keys):
        assert figures.value == pytest.approx(plan.claim.value, rel=1e-9)
    # the report: shares are those of the work
    shares = {row.part: row.share for row in sk.report(gm, plan).parts}
    if plan.request.purpose:
        total = sum(work)
        assert [shares[" ".join(map(str, k)) if isinstance(k, tuple) else str(k)] for k in keys] == pytest.approx(
            [seconds / total for seconds in work], rel=1e-9
        )
    # the explanation, and the same of the file
    again = sk.Plan.from_dict(gm.graph, json.loads(json.dumps(plan.to_dict())))
    assert again == plan and again.request == plan.request and again.policy == plan.policy
    for one in (plan, again):
        assert one.explain(again=False).to_dict()["figures"] == figures.to_dict()
    # the page
    page = pictured(plan).ladder().to_dict()
    stages = sk.stage_costs(gm, plan)
    assert page["stages"]["forward"] == [stage.forward for stage in stages]
    assert page["stages"]["backward"] == [stage.backward for stage in stages]
    kept = [held.cache for held in figures.held] if plan.request.tokens else [0] * len(stages)
    assert page["stages"]["fixed"] == [stage.fixed_bytes + cache for stage, cache in zip(stages, kept, strict=True)]
    assert page["memory"] == (plan.request.memory if isinstance(plan.request.memory, int) else None)
    for column in ("forward", "backward"):
        rows = [0.0] * len(keys)
        for row, seconds in zip(page["rows"], page["times"][column], strict=True):
            rows[row["part"]] += seconds
        if all(len(places) == 1 for places in plan.places.values()) and name != "replicas":
            assert rows == pytest.approx(page["stages"][column], rel=1e-9)
    # an export that can name any cut of one stage for each rank, for the schedule of the plan
    others = ("replicas", "pieces of a device", "patterns", "a policy without a purpose", "two stages a rank")
    if name not in others and len(keys) > 1:
        found = sk.export(plan, to="onnx").rounding
        assert (found.before.traffic, found.before.step) == (figures.traffic, figures.step or 0.0)
        assert found.before.load == pytest.approx(figures.value, rel=1e-12)
        same = found.before.peak == max(figures.peaks)
        assert same if plan.request.purpose else "for inference (assumed" in str(found)
    # a comparison with itself
    same = sk.compare_plans(plan, plan)
    assert same.equal and not same.moved
    slowest = next(one for one in same.figures if one.name == "slowest stage")
    assert slowest.first == slowest.second == figures.value


@pytest.mark.parametrize("name", ["unequal devices, training", "training", "replicas"])
def test_what_backward_runs_again_counts_in_loads_too(name):
    plan = sk.extend.checkpointed(planned(name))
    stages, figures = sk.stage_costs(graph(), plan), truth(plan).figures(plan)
    assert sorted(stage.forward + stage.backward for stage in stages) == pytest.approx(sorted(figures.work.values()))
    plain = truth(planned(name)).figures(planned(name))
    more = [figures.loads[key] - plain.loads[key] for key in figures.loads]
    assert sorted(more) == pytest.approx(sorted(stage.forward for stage in stages))
    assert plan.explain(again=False).to_dict()["figures"] == figures.to_dict()
    work = [stage.forward + stage.backward for stage in stages]
    shares = {row.part: row.share for row in sk.report(graph(), plan).parts}
    keys = map(str, truth(plan).parts_of(plan))
    assert [shares[key] for key in keys] == pytest.approx([one / sum(work) for one in work], rel=1e-9)
    assert sum(shares.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["unequal devices", "unequal devices, training"])
def test_a_copy_costs_what_it_takes_on_the_device_of_its_part(name):
    plan = planned(name)
    node = next(n for n in plan if n.name == "cos")
    home, other = plan.home(node), 1 - plan.home(node)
    more = plan.place({node: (home, other)})
    alone, figures = truth(plan).figures(plan), truth(more).figures(more)
    assert figures.work[other] > alone.work[other] and figures.work[home] == alone.work[home]
    keys, stages = truth(more).parts_of(more), sk.stage_costs(graph(), more)
    work = {key: stage.forward + stage.backward for key, stage in zip(keys, stages, strict=True)}
    assert work == pytest.approx(dict(figures.work), rel=1e-12)


def test_a_report_counts_one_replica_of_each_part():
    plan = planned("replicas")
    parts = {key: replace(part, replicas=1 + key % 2) for key, part in plan.parts.items()}
    plan = replace(plan, parts=parts, claim=None)
    work = [stage.forward + stage.backward for stage in sk.stage_costs(graph(), plan)]
    shares = [row.share for row in sk.report(graph(), plan).parts]
    assert shares == pytest.approx([one / sum(work) for one in work], rel=1e-9)
    assert shares == pytest.approx([one / sum(work) for one in truth(plan).figures(plan).work.values()], rel=1e-9)


BUDGETS = ({"optimizer": "adam"}, {"parts": 3, "optimizer": "sgd"}, {"schedule": "1f1b", "microbatches": 4}, {})


@pytest.mark.parametrize("words", these_first([BUDGETS[1]], [BUDGETS[0], *BUDGETS[2:]]), ids=str)
def test_notes_of_memory_budgets_say_what_other_readers_say(words):
    plan = sk.plan(graph(), MemoryBudget("350MiB" if words else "80MiB", **words))
    figures = truth(plan).figures(plan)
    told = {one.name: one.first for one in sk.compare_plans(plan, plan).figures}
    assert len(plan.parts) > 1 and figures.held[plan.claim.limiting].told in plan.note
    assert f"{size(figures.traffic)} cross" in plan.note and told["bytes that cross"] == figures.traffic


@pytest.mark.parametrize("name", ["unequal devices", "devices by name", "unequal devices, training"])
def test_other_keys_keep_the_devices(name):
    plan = planned(name)
    other = renumbered(plan)
    one, two = truth(plan).figures(plan), truth(other).figures(other)
    assert sorted(one.loads.values()) == sorted(two.loads.values()) and one.value == two.value
    assert sorted(one.peaks) == sorted(two.peaks)
    of_keys = [sorted((s.forward, s.backward) for s in sk.stage_costs(graph(), each)) for each in (plan, other)]
    assert of_keys[0] == of_keys[1]
    told = other.explain(again=False)
    assert told.to_dict()["figures"]["limiting"].startswith("part ")
    assert sorted(row.share for row in sk.report(graph(), other).parts) == pytest.approx(
        sorted(row.share for row in sk.report(graph(), plan).parts)
    )


def test_a_cpu_of_ones_own_is_a_host():
    gm = graph()
    flow = sk.analyze(gm)
    known, own = (Devices([cpu, "l4"], links="pcie4", only={"model.layers.0*": [0]}) for cpu in ("cpu", OWN_CPU))
    one, two = (sk.plan(gm, policy) for policy in (known, own))
    assert dict(one.items()) == dict(two.items()) and one.claim.value == two.claim.value
    assert own.request(flow, costs_of_plan(two, flow)).capacities[0] is None
    assert '"cpu"' in sk.export(two, to="transformers").text and "cuda:1" not in sk.export(two, to="transformers").text


@pytest.mark.campaign
def test_where_nodes_may_be_is_known_without_the_policy():
    gm = graph()
    bounds = {"together": ["model.layers.0*"], "only": {"lm_head": [1]}}
    plan = sk.plan(gm, Devices(UNEQUAL, links="pcie4", **bounds))
    request = truth(sk.Plan.from_dict(gm.graph, json.loads(json.dumps(plan.to_dict())))).request
    assert (list(request.together), request.only) == (bounds["together"], {"lm_head": (1,)})


def test_export_of_a_plan_that_leaves_nodes_out_is_refused():
    plan = planned("unequal devices, training")
    unread = next(node for node in plan if plan.home(node) is not None)
    pruned = replace(plan, places={**dict(plan.items()), unread: ()})
    with pytest.raises(sk.errors.PlanError, match=unread.name):
        sk.export(pruned, to="transformers")


@pytest.mark.parametrize("name", these_first(["training", "unequal devices"], [n for n in PLANS if "devices" not in n]))
def test_notes_profile_and_a_step_by_hand_say_the_same(name):
    gm, plan = graph(), planned(name)
    pricing = truth(plan)
    figures, keys, asked = pricing.figures(plan), pricing.parts_of(plan), plan.request
    stages = sk.stage_costs(gm, plan)
    if asked.schedule:
        run = sk.simulate_schedule(stages, asked.schedule, asked.microbatches, links=asked.links)
        drawn = pictured(plan).ladder().run
        assert (run.seconds, run.peaks) == (figures.step, figures.peaks) == (drawn.seconds, drawn.peaks)
        assert f"step {duration(run.seconds)}, " in plan.note
    if plan.claim is not None:
        value = plan.claim.value if plan.claim.objective == "tokens" else figures.value
        told = f"{value:,.0f}" if plan.claim.objective == "tokens" else duration(value)
        assert plan.claim.proof in plan.note or plan.claim.objective == "tokens"
        assert told in plan.note
        limiting = pricing.device_of(plan.claim.limiting)
        assert plan.claim.objective == "tokens" or figures.limiting in (limiting, plan.claim.limiting)
    if " peak " in f" {plan.note}":
        assert f"peak {size(max(figures.peaks))} on " in plan.note
    profile = sk.simulate_memory(sk.split(gm, plan))
    for key, stage in zip(keys, sk.stage_costs(gm, plan, optimizer=None), strict=True):
        if plan.parts[key].replicas == 1:  # the profile runs a part whole; temporaries of a stage are an upper bound
            alone = profile.parts[key].peak
            assert alone <= stage.parameter_bytes + stage.temporary_bytes < 1.01 * alone + 4096 or len(stages) > 8


@pytest.mark.parametrize(
    "words", these_first([{}], [{"memory": "420MiB"}, {"recompute": True}, {"links": None}]), ids=str
)
def test_the_plan_of_a_row_of_a_sweep_is_for_its_step(words):
    gm = graph()
    found = sk.sweep(
        gm,
        sk.costs.roofline(gm, "l4"),
        stages=(2,),
        microbatches=(4, 8),
        schedules=("1f1b", "gpipe", "zbv"),
        **{"links": "nvlink4", **words},
    )
    for row in found.rows:
        figures = truth(row.plan).figures(row.plan)
        assert (row.plan.request.schedule, row.plan.request.microbatches) == (row.schedule, row.microbatches)
        assert (figures.step, figures.peaks) == (row.run.seconds, row.run.peaks)
        assert f"schedule={row.schedule!r}" in row.plan.policy and f"{row.microbatches} microbatches" in row.plan.note
        if not words.get("recompute"):
            assert f"step {duration(row.run.seconds)}, " in row.plan.note


def decoder(family):
    """A decoder of two layers, as one step of generation for two sequences."""
    return sk.capture_decoder(build(family, layers=2, width=32, heads=4, vocab=200).model.eval(), batch=2)


CACHES = {"most": {"objective": "tokens", "chunk": 16}, "given": {"objective": "throughput", "tokens": 60, "chunk": 16}}


@pytest.mark.campaign
@pytest.mark.parametrize(("family", "cache"), [("llama", "most"), ("llama", "given"), ("gpt2", "most")])
def test_readers_of_a_decoder_count_the_step_that_was_planned(family, cache):
    gm = decoder(family)
    weights = sum(parameter.nbytes for parameter in gm.parameters())
    plan = sk.plan(gm, Stages(2, memory=weights + 300 * 1024, **CACHES[cache]), sk.costs.roofline(gm, "l4"))
    again, tokens = sk.Plan.from_dict(gm.graph, json.loads(json.dumps(plan.to_dict()))), plan.request.tokens
    assert (again.request, again.request.chunk) == (plan.request, 16)
    figures = StagePricing.of(sk.analyze(gm), again, costs_of_plan(again, gm)).figures(again)
    each = -(-tokens // 2)
    parts = decoder_memory(sk.split(gm, again), sequences=2, tokens=each, query=min(each, 8)).values()
    assert figures.peaks == tuple(part.peak for part in parts)
    assert [held.cache for held in figures.held] == [tokens * part.cache // (2 * each) for part in parts]
    fullest = max(figures.held, key=lambda held: held.total)
    assert fullest.told in plan.note or f"peak {size(fullest.total)} on rank" in plan.note
    assert size(fullest.total) in str(again.explain(again=False))
    page = pictured(again).ladder().to_dict()
    drawn = [sum(stage) for stage in zip(*(page["stages"][c] for c in ("fixed", "saved", "temporary")), strict=True)]
    assert (page["tokens"], page["memory"]) == (tokens, plan.request.memory) and tuple(drawn) == figures.peaks
    whole = page["stretches"]["fixed"][len(page["marks"]) - 2]  # all rows as one stage
    assert 0 <= whole - sum(held.cache for held in figures.held) - weights <= sum(one.nbytes for one in gm.buffers())


@functools.cache
def joint():
    return random_training_graph(5)[0]


JOINT = {
    "stages": Pipeline(2, "1f1b", 6, links="nvlink4"),
    "fewer ranks": Pipeline(4, "interleaved-1f1b", 4, ranks=1),
    "two stages a rank": Pipeline(4, "interleaved-1f1b", 4, links="nvlink4", optimizer="sgd"),
    "a limit": Pipeline(2, "gpipe", 8, memory="70KiB", links="pcie4"),
    "three parts a stage": SplitBackward(policy=Pipeline(4, "zbv", 4)),
}


@functools.cache
def planned_step(name):
    return joint().split(JOINT[name], sk.costs.roofline(joint().graph_module, "l4"))


@pytest.mark.parametrize("name", these_first(["stages"], list(JOINT)[1:]))
def test_readers_of_a_training_step_agree(name):
    step, gm = planned_step(name), joint().graph_module
    plan = sk.Plan.from_dict(gm.graph, json.loads(json.dumps(step.plan.to_dict())))
    asked, costs = plan.request, sk.costs.roofline(gm, "l4")
    stages = step.stage_costs(costs)
    assert stages == joint().split(plan).stage_costs(costs_of_plan(plan, gm))
    page = pictured(plan).ladder()
    assert page.stages == stages and page.optimizer == asked.optimizer
    told = page.to_dict()["stages"]
    assert told["forward"] == [stage.forward for stage in stages]
    assert told["saved"] == [stage.saved_bytes for stage in stages]
    assert told["fixed"] == [stage.fixed_bytes for stage in stages]
    work = [stage.forward + stage.backward for stage in stages]
    by_stage = [0.0] * len(stages)
    for row in sk.report(gm, plan).parts:
        by_stage[int(row.part.split()[1])] += row.share
    assert by_stage == pytest.approx([seconds / sum(work) for seconds in work], rel=1e-9)
    explained = plan.explain(again=False)
    compared = {one.name: one for one in sk.compare_plans(plan, plan).figures}
    if asked.schedule is None:
        assert page.run is None and explained.to_dict()["figures"] is None and "step" not in compared
        return
    assert page.run.ranks == (asked.ranks or page.run.ranks)
    assert explained.to_dict()["figures"] == {"step": page.run.seconds, "peaks": list(page.run.peaks)}
    assert compared["step"].first == compared["step"].second == page.run.seconds
    assert compared["fullest device"].first == max(page.run.peaks)
    assert page.run.told in str(explained) and size(max(page.run.peaks)) in str(explained)
    if plan.claim.objective == "step":  # not divided afterwards
        assert page.run.seconds == plan.claim.value
        assert page.run.told in plan.note and size(max(page.run.peaks)) in plan.note
        assert plan.claim.proof in plan.note
    by_hand = sk.simulate_schedule(stages, asked.schedule, asked.microbatches, ranks=asked.ranks, links=asked.links)
    assert (by_hand.seconds, by_hand.peaks) == (page.run.seconds, page.run.peaks)


@pytest.mark.parametrize("seed", these_first([19], [11, 13, 37]))
def test_readers_of_values_that_wait_on_the_host_count_their_copies(seed):
    joint = random_training_graph(seed)[0]
    gm, costs = joint.graph_module, sk.costs.roofline(joint.graph_module, "l4")
    memory = {11: 35840, 13: 20480, 19: 21796, 37: 20480}[seed]
    step = joint.split(Pipeline(2, "gpipe", 8, memory=memory, offload=1e9), costs)
    plan = sk.Plan.from_dict(gm.graph, json.loads(json.dumps(step.plan.to_dict())))
    assert plan.offloaded and plan.request == step.plan.request
    stages, page = step.stage_costs(costs), pictured(plan).ladder()
    moved = [graphs.host_bytes for graphs in step.stages]
    assert [0 if stage.copies is None else stage.copies.nbytes for stage in stages] == moved
    rows = stage_rows(joint.flow, step, costs)
    saved = [graphs.saved_bytes + graphs.host_bytes for graphs in step.stages]
    assert ([row["host"] for row in rows], [row["saved"] for row in rows]) == (moved, saved)
    assert f"{size(sum(saved))} saved, {size(sum(moved))} of it on the host" in pictured(plan).svg()
    assert page.stages == stages and page.run.seconds == plan.claim.value
    assert page.run.told in plan.note and size(max(page.run.host_peaks)) in plan.note
    told = plan.explain(again=False)
    assert told.to_dict()["figures"] == {"step": page.run.seconds, "peaks": list(page.run.peaks)}
    text = " ".join(str(told).split())
    assert told.to_dict()["saved"] == sum(saved) and f"{size(sum(moved))} of it wait on the host." in text
    assert sum(row["nbytes"] * len(row["nodes"]) for row in told.to_dict()["rows"] if row["on_host"]) == sum(moved)
    assert "it waits on the host" in text
    compared = {one.name: one.first for one in sk.compare_plans(plan, plan).figures}
    assert compared["saved for backward"] == sum(saved)
    assert compared["step"] == page.run.seconds and compared["fullest device"] == max(page.run.peaks)


def test_readers_of_a_pair_that_waits_for_copies_say_so():
    step = sk.capture_joint(Wide(), torch.randn(64, 16))
    gm, costs = step.graph_module, sk.costs.roofline(step.graph_module, "h100")
    point = sk.Frontier(step, costs, of="peak", budgets=2, offload=5e9).points[0]
    assert point.waits and point.host
    budget = step.split(Budget(point.peak, offload=5e9), costs).plan
    for plan in (point.plan, budget, sk.Plan.from_dict(gm.graph, json.loads(json.dumps(point.plan.to_dict())))):
        (choice,) = pictured(plan).ladder().to_dict()["choices"]
        told = plan.explain(again=False).to_dict()
        compared = {one.name: one.first for one in sk.compare_plans(plan, plan).figures}
        assert told["peak"] == choice["peak"] == compared["peak"] <= point.peak
        assert told["saved"] == choice["bytes"] == compared["saved for backward"]
        assert (
            choice["waits"] == pytest.approx(told["waits"], rel=1e-6)
            and told["waits"] == compared["waiting for copies"]
        )
        assert (
            duration(told["waits"]) in plan.note
            and size(told["saved"]) in plan.note
            and size(told["peak"]) in plan.note
        )
    assert (point.plan.explain(again=False).to_dict()["waits"], point.saved) == (point.waits, told["saved"])


class Wide(torch.nn.Module):
    """Layers whose activations are larger than their weights."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


COMMANDED = ("unequal devices, training", "a CPU among GPUs", "inference", "training", "two stages a rank", "replicas")
SMALL = {"layers": 3, "width": 64, "heads": 4, "vocab": 300, "batch": 2, "seq": 32}


@pytest.mark.campaign
@pytest.mark.parametrize("name", COMMANDED)
def test_commands_say_what_python_says(name, tmp_path, capsys):
    """Of the plan's file: explain, compare, the page and an export, from the command line."""
    gm = sk.capture((example := build("llama", **SMALL)).model, **example.kwargs)
    plan = sk.plan(gm, PLANS[name], sk.costs.roofline(gm, "l4"), on_cycle="refine")
    figures = StagePricing.of(sk.analyze(gm), plan, costs_of_plan(plan, gm)).figures(plan)
    file, page = str(tmp_path / "plan.json"), tmp_path / "page.html"
    plan.save(file)
    model = ["--model", "llama", "--size", ",".join(f"{size}={value}" for size, value in SMALL.items()), "--json"]

    def said(command, *words):
        assert main([command, file, *words, *model]) == 0
        return json.loads(capsys.readouterr().out)

    assert said("explain")["explanation"]["figures"] == figures.to_dict()
    compared = {one["name"]: one["second"] for one in said("compare", file)["comparison"]["figures"]}
    assert (compared["slowest stage"], compared["bytes that cross"]) == (figures.value, figures.traffic)
    assert compared.get("step") == figures.step and compared["fullest device"] == max(figures.peaks)
    said("view", "-o", str(page))
    drawn = pictured(sk.Plan.load(file, gm.graph)).ladder().to_dict()["stages"]
    shown = re.search(r'id="splitkit-data">(.*?)</script>', page.read_text("utf-8"), re.DOTALL)
    assert json.loads(shown[1])["stages"] == drawn
    if name != "replicas":
        words = ["--schedule", plan.request.schedule] if plan.request.schedule else []
        before = said("export", "--to", "torch", *words)["rounding"]["before"]
        assert (before["traffic"], before["load"]) == (figures.traffic, pytest.approx(figures.value, rel=1e-12))
