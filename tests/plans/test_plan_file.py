from __future__ import annotations

import json
import stat
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

import splitkit as sk
from splitkit.costs.links import HostLink
from splitkit.errors import FileError, PlanError
from splitkit.hardware.device_specs import find_device
from splitkit.plans import plan_file
from splitkit.plans.parts import Part, PlanRequest
from splitkit.plans.record import Plan
from splitkit.policies import Stages

KEYS = st.recursive(
    st.integers() | st.text() | st.booleans() | st.just(torch.device("cuda:1")),
    lambda inner: st.tuples(inner, inner),
    max_leaves=4,
)


class Chain(nn.Module):
    def forward(self, x):
        return (x + 1) * 2 - 3


GRAPH = fx.symbolic_trace(Chain())


def some_plan():
    add, mul, sub = (n for n in GRAPH.graph.nodes if n.op == "call_function")
    parts = {("cuda:0", 1): Part(("cuda:0", 1), torch.device("cuda:0"), "checkpoint")}
    return Plan({add: (0,), mul: (("cuda:0", 1), 0), sub: (None, "b")}, parts, "a note")


def test_a_plan_survives_a_file(tmp_path):
    path = tmp_path / "plan.json"
    some_plan().save(path)
    assert Plan.load(path, GRAPH.graph) == some_plan()
    assert Plan.from_dict(GRAPH.graph, some_plan().to_dict()) == some_plan()
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@settings(deadline=None, derandomize=True)
@given(st.lists(KEYS, min_size=3, max_size=3))
def test_every_kind_of_key_survives(keys):
    plan = Plan.of(dict(zip([n for n in GRAPH.graph.nodes if n.op == "call_function"], keys, strict=True)))
    again = Plan.from_dict(GRAPH.graph, json.loads(json.dumps(plan.to_dict())))
    assert again == plan


def test_routing_and_dropped_nodes_survive(tmp_path):
    add, mul, sub = some_plan()
    plan = Plan({add: (0,), mul: (), sub: (1,)}, routing="relay")
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json", GRAPH.graph)
    assert again == plan and again.routing == "relay" and again[mul] == ()


def test_files_from_before_there_was_routing_are_direct():
    data = some_plan().to_dict()
    del data["routing"]
    assert Plan.from_dict(GRAPH.graph, data) == some_plan()


def test_files_from_before_nodes_were_described_load():
    data = some_plan().to_dict()
    del data["nodes"]
    assert Plan.from_dict(GRAPH.graph, data) == some_plan()


def test_the_empty_plan_survives():
    assert Plan.from_dict(GRAPH.graph, Plan({}).to_dict()) == Plan({})


def test_another_graph_is_refused_by_name(tmp_path):
    some_plan().save(tmp_path / "p.json")
    other = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(FileError, match=r"SK502.*'x' of the plan and 'input_1' of this graph"):
        Plan.load(tmp_path / "p.json", other.graph)
    before = {k: v for k, v in some_plan().to_dict().items() if k != "nodes"}
    with pytest.raises(FileError, match=r"SK502.*'add' and 2 more"):
        Plan.from_dict(other.graph, before)


def test_the_fingerprint_sees_structure_and_not_sizes():
    class Sized(nn.Module):
        def __init__(self, size, op):
            super().__init__()
            self.size, self.op = size, op

        def forward(self, x):
            return self.op(x.view(self.size))

    def print_of(size, op):
        return plan_file.fingerprint(fx.symbolic_trace(Sized(size, op)).graph)

    assert print_of(4, torch.sin) == print_of(8, torch.sin) != print_of(4, torch.cos)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"schema": 99}, "SK503"),
        ({"kind": "something"}, "SK501"),
        ({"parts": [{"key": 0}]}, "SK501"),
        ({"places": {"add": [7]}}, "SK501"),
        ({"routing": "by pigeon"}, "SK501"),
        ({"places": {"add": [0, 0]}}, "SK205"),
        ({"schema": True}, "SK503"),
        ({"graph": None, "places": {"nowhere": [0]}}, "SK502"),
        ({"nodes": "add"}, "SK501"),
        ({"nodes": ["add"]}, "SK501"),
        ({"nodes": ["add 12", "add 13"]}, "SK501"),
    ],
)
def test_damage_is_refused(change, code):
    data = {**some_plan().to_dict(), **change}
    with pytest.raises((FileError, PlanError), match=code):
        Plan.from_dict(GRAPH.graph, data)


def test_a_missing_field_is_named():
    data = some_plan().to_dict()
    del data["places"]
    with pytest.raises(FileError, match="SK501.*'places'"):
        Plan.from_dict(GRAPH.graph, data)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_files_that_are_no_json_objects(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(FileError, match="SK501"):
        Plan.load(tmp_path / "p.json", GRAPH.graph)


def test_files_that_cannot_be_read_or_written(tmp_path):
    with pytest.raises(FileError, match="SK504: cannot read"):
        Plan.load(tmp_path / "none.json", GRAPH.graph)
    with pytest.raises(FileError, match="SK504: cannot write"):
        some_plan().save(tmp_path / "no" / "folder.json")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "p.json"
    some_plan().save(path)
    before = path.read_text()
    with pytest.raises(TypeError):
        plan_file.write_json(path, {"not json": object()})
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_part_without_a_name_for_files():
    node = next(iter(some_plan()))
    with pytest.raises(PlanError, match="SK206.*frozenset"):
        Plan.of({node: frozenset([1])}).to_dict()


def part(**fields):
    return {"parts": [{"key": 0, "device": None, "call": "plain", **fields}]}


NESTED = "x"
for _ in range(100_000):
    NESTED = [NESTED]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"places": []}, r"places is \[\], not an object"),
        ({"places": {"add": 0}}, r"places\['add'\] is 0, not a list"),
        ({"places": {"add": [-1]}}, r"places\['add'\] is \[-1\]"),
        ({"places": {"add": [True]}}, r"places\['add'\] is \[True\]"),
        ({"places": {"add": [0.0]}}, r"places\['add'\] is \[0.0\]"),
        ({"parts": {}}, r"parts is \{\}, not a list"),
        ({"parts": [0]}, r"parts\[0\] is 0, not an object"),
        ({"parts": 2 * part()["parts"]}, r"parts\[1\].key is 0, not a name that differs"),
        ({"parts": part()["parts"] + part(key=False)["parts"]}, r"parts\[1\].key is False, not a name that differs"),
        ({"parts": part(key=[1])["parts"] + part(key=[1.0])["parts"]}, r"parts\[1\].key is \[1.0\]"),
        (part(key=None), r"parts\[0\].key is None"),
        (part(key=["a", None]), r"parts\[0\].key is \['a', None\]"),
        (part(key={"device": 0}), r"parts\[0\].key is \{'device': 0\}"),
        (part(key={"device": "abacus"}), r"parts\[0\].key is \{'device': 'abacus'\}"),
        (part(key={"name": "a"}), r"parts\[0\].key is \{'name': 'a'\}"),
        (part(key=NESTED), r"parts\[0\].key is "),
        (part(call="chekpoint"), r"parts\[0\].call is 'chekpoint'"),
        ({"routing": None}, r"routing is None, not 'direct' or 'relay'"),
        ({"routing": ["relay"]}, r"routing is \['relay'\]"),
        (part(call=[1]), r"parts\[0\].call is \[1\]"),
        (part(device=0), r"parts\[0\].device is 0"),
        (part(device=""), r"parts\[0\].device is ''"),
        (part(device="cuda:99999999999999999999"), r"parts\[0\].device is "),
    ],
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_damage_is_refused_by_the_name_of_the_field(change, reason):
    with pytest.raises(FileError, match=f"SK501: the plan is damaged: {reason}"):
        Plan.from_dict(GRAPH.graph, {**some_plan().to_dict(), **change})


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"a":' * 200_000, '{"a": 1, "a": 2}', '{"a": 1' + "0" * 5000 + "}", "\udcff"]
)
def test_files_that_json_cannot_read_are_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text, errors="surrogateescape")
    with pytest.raises(FileError, match="SK501.* is not JSON"):
        plan_file.read_json(tmp_path / "p.json")


def test_names_and_numbers_that_no_file_takes_are_refused(tmp_path):
    with pytest.raises(FileError, match="SK504: cannot write"):
        some_plan().save(str(tmp_path / "a\0b"))
    with pytest.raises(FileError, match="SK504: cannot read"):
        Plan.load(str(tmp_path / "a\0b"), GRAPH.graph)
    with pytest.raises(FileError, match="SK504: cannot write"):
        Plan.of({next(iter(some_plan())): 10**5000}).save(tmp_path / "p.json")
    assert not list(tmp_path.iterdir())


def test_two_parts_of_one_name_in_the_file_are_refused():
    class Name(str):
        __hash__ = object.__hash__

        def __eq__(self, other):
            return self is other

    add, mul, _ = some_plan()
    with pytest.raises(PlanError, match="SK206: two of the parts .* have the same name"):
        Plan.of({add: Name("a"), mul: "a"}).to_dict()


def test_replicas_are_written_only_where_there_are_some():
    plan = Plan.of({node: i % 2 for i, node in enumerate(n for n in GRAPH.graph.nodes if n.op == "call_function")})
    assert all("replicas" not in part for part in plan.to_dict()["parts"])
    several = replace(plan, parts={key: replace(part, replicas=1 + key) for key, part in plan.parts.items()})
    data = json.loads(json.dumps(several.to_dict()))
    assert [part.get("replicas") for part in data["parts"]] == [None, 2]
    assert Plan.from_dict(GRAPH.graph, data) == several
    assert "2 replicas" in str(several) and "replicas" not in str(plan)
    for wrong in (0, 1.5, True, "2", None):
        data["parts"][1]["replicas"] = wrong
        with pytest.raises(FileError, match="replicas"):
            Plan.from_dict(GRAPH.graph, data)


def test_a_failed_write_leaves_no_temporary_file(tmp_path):
    with pytest.raises(TypeError):
        plan_file.write_json(tmp_path / "plan.json", {"not json": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [10**400, float("nan"), -1.0, "1", True, None])
def test_a_claim_of_a_plan_file_that_makes_no_sense_is_refused(value):
    data = json.loads(json.dumps(sk.plan(GRAPH, Stages(2), sk.costs.unit(GRAPH)).to_dict()))
    data["claim"]["value"] = value
    with pytest.raises(FileError, match="SK501.*claim"):
        Plan.from_dict(GRAPH.graph, data)


def test_a_fingerprint_is_of_ops_names_targets_and_edges():
    def printed(op="call_method", name="a", target="sin", reads=0):
        graph = fx.Graph()
        inputs = [graph.placeholder("x"), graph.placeholder("y")]
        graph.output(graph.create_node(op, target, (inputs[reads],), name=name))
        return plan_file.fingerprint(graph)

    same = {printed(), printed()}
    others = {printed(op="call_module"), printed(name="b"), printed(target="cos"), printed(reads=1)}
    assert len(same) == 1 and len(others) == 4 and not same & others


PRICED = {
    "flops": {"name": "FLOPs", "kind": "flops", "unit": "TFLOP"},
    "roofline": {
        "name": "roofline of mine",
        "kind": "roofline",
        "unit": "s",
        "device": {
            "name": "mine",
            "peak": {"float32": 1e12},
            "bandwidth": 1e9,
            "memory": 8,
            "launch": 0.0,
            "source": "",
        },
        "tf32": True,
        "training": True,
    },
    "table": {
        "name": "own",
        "kind": "table",
        "unit": "s",
        "table": {"add": 1e-6, "mul": 0.25, "sub": 0},
        "backward": {"add": 2.0},
    },
}


@pytest.mark.parametrize("name", PRICED)
def test_prices_in_a_file_are_read_and_written_as_they_are(name):
    data = {**some_plan().to_dict(), "prices": PRICED[name]}
    found = Plan.from_dict(GRAPH.graph, data)
    assert found == some_plan() and found.prices.name == PRICED[name]["name"]
    assert json.loads(json.dumps(found.to_dict())) == data


def test_files_from_before_prices_were_recorded_have_none():
    assert "prices" not in some_plan().to_dict()
    assert Plan.from_dict(GRAPH.graph, some_plan().to_dict()).prices is None
    assert Plan.from_dict(GRAPH.graph, {**some_plan().to_dict(), "prices": None}).prices is None


def damaged(kind, path, value=...):
    """The prices of a kind with one field replaced, or removed."""
    made = json.loads(json.dumps(PRICED[kind]))
    *outer, last = path.split(".")
    inner = made
    for name in outer:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return made


@pytest.mark.parametrize(
    ("prices", "field"),
    [
        ([], "prices"),
        ("roofline", "prices"),
        (damaged("flops", "name"), "prices"),
        (damaged("flops", "unit"), "prices"),
        (damaged("flops", "more", 1), "prices"),
        (damaged("flops", "live", 1), "prices"),
        (damaged("flops", "name", 3), "prices.name"),
        (damaged("flops", "name", "x" * 201), "prices.name"),
        (damaged("flops", "name", "\x1b[2J"), "prices.name"),
        (damaged("flops", "unit", ["s"]), "prices.unit"),
        (damaged("flops", "kind", "guess"), "prices.kind"),
        (damaged("flops", "kind", ["flops"]), "prices.kind"),
        (damaged("flops", "kind", "table"), "prices"),
        (damaged("flops", "kind", "fused"), "prices"),
        (damaged("flops", "backward", {}), "prices.backward"),
        (damaged("flops", "table", {}), "prices"),
        (damaged("flops", "tf32", 1), "prices.tf32"),
        (damaged("flops", "training", "yes"), "prices.training"),
        (damaged("roofline", "device", "h100"), "prices.device"),
        (damaged("roofline", "device.bandwidth"), "prices.device"),
        (damaged("roofline", "device.more", 1), "prices.device"),
        (damaged("roofline", "device.name", None), "prices.device.name"),
        (damaged("roofline", "device.source", "\0"), "prices.device.source"),
        (damaged("roofline", "device.memory", 10**400), "prices.device"),
        (damaged("roofline", "device.launch", -1.0), "prices.device"),
        (damaged("roofline", "device.bandwidth", True), "prices.device"),
        (damaged("roofline", "device.peak", 1e12), "prices.device.peak"),
        (damaged("roofline", "device.peak.float32", "fast"), "prices.device.peak"),
        (damaged("table", "table", [1.0]), "prices.table"),
        (damaged("table", "table.add", float("nan")), "prices.table"),
        (damaged("table", "table.add", float("inf")), "prices.table"),
        (damaged("table", "table.add", 1e101), "prices.table"),
        (damaged("table", "table.add", -1e-9), "prices.table"),
        (damaged("table", "table.add", None), "prices.table"),
        (damaged("table", "table.nowhere", 1.0), "prices.table"),
        (damaged("table", "backward.nowhere", 1.0), "prices.backward"),
        (damaged("table", "backward.add", "2"), "prices.backward"),
        (damaged("table", "training", True), "prices.backward"),
    ],
)
def test_damaged_prices_are_refused_by_field(prices, field):
    with pytest.raises(FileError, match="SK501") as caught:
        Plan.from_dict(GRAPH.graph, {**some_plan().to_dict(), "prices": prices})
    assert f"damaged: {field}" in caught.value.reason and len(caught.value.reason) < 400


FREE = {"between": None, "inside": None, "size": 0, "pairs": []}
WIRE = {"bandwidth": 1e9, "latency": 0.0, "source": ""}
CARD = {"key": 0, "name": "mine", "peak": {"float32": 1e12}, "bandwidth": 1e9, "memory": 8, "launch": 0.0, "source": ""}


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ([], "request"),
        ({"more": 1}, "request"),
        ({"purpose": "fun"}, "request.purpose"),
        ({"purpose": "training", "optimizer": "lion"}, "request.optimizer"),
        ({"optimizer": "adam"}, "request.optimizer"),
        ({"schedule": 3}, "request.schedule"),
        ({"schedule": "2f2b"}, "request.schedule"),
        ({"schedule": {"own": 3}}, "request.schedule.own"),
        ({"schedule": {"other": "mine"}}, "request.schedule"),
        ({"ranks": 0}, "request.ranks"),
        ({"microbatches": 0}, "request.microbatches"),
        ({"tokens": -1}, "request.tokens"),
        ({"chunk": 0}, "request.chunk"),
        ({"offload": {"out": {}}}, "request.offload"),
        ({"offload": {"out": {}, "back": {}}}, "request.links"),
        ({"memory": "80GiB"}, "request.memory"),
        ({"memory": [1, -1]}, "request.memory"),
        ({"cache": {"add": "1"}}, "request.cache"),
        ({"tokens": 2**70}, "request.tokens"),
        ({"ranks": 2**70}, "request.ranks"),
        ({"memory": [1, 2**70 + 1]}, "request.memory"),
        ({"links": {**FREE, "size": 2**70}}, "request.links"),
        ({"links": 4}, "request.links"),
        ({"links": "nvlink9"}, "request.links"),
        ({"links": {**FREE, "more": 1}}, "request.links"),
        ({"links": {"between": None, "inside": None, "size": 0}}, "request.links"),
        ({"links": {**FREE, "size": -1}}, "request.links"),
        ({"links": {**FREE, "pairs": {}}}, "request.links"),
        ({"links": {**FREE, "between": {**WIRE, "bandwidth": 0}}}, "request.links"),
        (
            {"links": {"between": None, "inside": None, "size": 0, "pairs": [[0, 1, {**WIRE, "latency": -1}]]}},
            "request",
        ),
        ({"together": "layers.*"}, "request.together"),
        ({"together": ["\0"]}, "request.together"),
        ({"only": ["layers.*"]}, "request.only"),
        ({"only": {"layers.*": []}, "devices": [CARD]}, "request.only['layers.*']"),
        ({"only": {"layers.*": [1]}, "devices": [CARD]}, "request.only['layers.*']"),
        ({"links": {"between": None, "inside": None, "size": 0, "pairs": [[0, 1]]}}, "request.links.pairs[0]"),
        ({"links": {"between": {"bandwidth": 1}, "inside": None, "size": 0, "pairs": []}}, "request.links"),
        ({"devices": {}}, "request.devices"),
        ({"devices": [3]}, "request.devices[0]"),
        ({"devices": [{**CARD, "key": None}]}, "request.devices[0].key"),
        ({"devices": [CARD, CARD]}, "request.devices"),
        ({"devices": [{**CARD, "bandwidth": 0.0}]}, "request.devices[0]"),
        ({"devices": [{**CARD, "kernels": "hopper"}]}, "request.devices[0]"),
    ],
)
def test_damaged_requests_are_refused_by_field(request_, field):
    assert Plan.from_dict(GRAPH.graph, {**some_plan().to_dict(), "request": {"devices": [CARD]}}).request.kinds == 1
    with pytest.raises(FileError, match="SK501") as caught:
        Plan.from_dict(GRAPH.graph, {**some_plan().to_dict(), "request": request_})
    assert f"damaged: {field}" in caught.value.reason


def test_a_request_survives_a_file_with_all_that_it_says():
    device = find_device("l4")
    limits = {"together": ("a.*", "b"), "only": {"c": (0, "x"), "d.*": ("x",)}, "devices": {0: device, "x": device}}
    host = asdict(HostLink.of("pcie5"))
    asked = PlanRequest("training", "sgd", "zbv", 8, 2, "pcie4", (None, 5), **limits, chunk=16, offload=host)
    again = Plan.from_dict(GRAPH.graph, json.loads(json.dumps(replace(some_plan(), request=asked).to_dict())))
    assert again.request == asked


def test_a_schedule_of_ones_own_need_not_be_registered_where_its_plan_is_read():
    """The plan runs, and is drawn, without it; what needs the schedule says that there is none."""
    asked = PlanRequest("training", "adam", "one by one of mine", 4)
    data = json.loads(json.dumps(replace(some_plan(), request=asked).to_dict()))
    assert data["request"]["schedule"] == {"own": "one by one of mine"}
    assert Plan.from_dict(GRAPH.graph, data).request == asked
