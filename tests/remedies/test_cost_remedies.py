"""Remedies of errors about devices, links and prices (SK32x)."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from carried import Remedy, refusal
from torch import nn

import splitkit as sk
from splitkit import costs
from splitkit.costs import Device, Link, Links
from splitkit.policies import Devices, Stages

X = torch.ones(4, 16)
FIGURES = {"peak": {"float32": 19.5e12}, "bandwidth": 1e12, "memory": 80 * 2**30, "source": "its data sheet"}
TABLE = 'peak = { float32 = 19.5e12 }\nbandwidth = 1e12\nmemory = 85899345920\nsource = "its data sheet"\n'


@cache
def graph():
    return sk.capture(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), X)


@cache
def joint():
    return sk.capture_joint(nn.Linear(16, 16), X, loss=torch.sum)


def planned(prices):
    return len(sk.plan(graph(), Stages(2), costs=prices).parts) == 2


def device(**other):
    return Device("mine", **{**FIGURES, **other})


def link(links, source=0, target=1):
    return links.seconds(source, target, 1000) > 0


class Prices:
    """Costs of the user's own; ``seconds`` may be anything."""

    def __init__(self, seconds, **others):
        self.given = seconds
        for name, value in others.items():
            setattr(self, name, value)

    def seconds(self, node):
        return self.given(node)

    def flops(self, node):
        return 0.0

    def nbytes(self, node):
        return 4

    def param_bytes(self, node):
        return 0


class Lacking(Prices):
    def seconds(self, node):
        return {}[node]


SIMPLE = [
    # ------------------------------------------------------------ SK320, SK321: devices
    Remedy("SK320", "Give it a name.", lambda: Device(3, **FIGURES), device),
    Remedy(
        "SK320",
        'Give "cpu", or "sm" and the compute capability of a CUDA device: "sm90".',
        lambda: device(kernels="hopper"),
        lambda: [device(kernels=name) for name in ("cpu", "sm90")],
    ),
    Remedy("SK320", "Say where the figures come from.", lambda: device(source=3), device),
    Remedy("SK320", 'Give FLOP/s by dtype: {"float32": 19.5e12}.', lambda: device(peak={}), device),
    Remedy(
        "SK320",
        "Give a positive number of {...}, {...}.",
        lambda: device(bandwidth=0),
        lambda: device(bandwidth=1e9),
    ),
    Remedy(
        "SK320",
        "Give seconds, 0 or more, {...} at most.",
        lambda: device(launch=-1),
        (lambda: device(launch=0.0), lambda: device(launch=4e-6)),
    ),
    Remedy("SK321", 'Measure on "cpu".', lambda: measured("cuda:7"), lambda: measured("cpu")),
    # ------------------------------------------------------------ SK322: links
    Remedy(
        "SK322",
        "Give a positive number of bytes a second, {...} or more.",
        lambda: Link(0),
        lambda: Link(1e9).seconds(10) > 0,
    ),
    Remedy(
        "SK322",
        "Give seconds, 0 or more, {...} at most.",
        lambda: Link(1e9, -1),
        (lambda: Link(1e9, 0), lambda: Link(1e9, 1e-6)),
    ),
    Remedy(
        "SK322",
        "Give a Link, or one of {...}.",
        lambda: Links.nodes(2, 3, "pcie5"),
        (lambda: link(Links.nodes(2, Link(1e9), "pcie5")), lambda: link(Links.nodes(2, "nvlink4", "pcie5"))),
    ),
    Remedy(
        "SK322",
        "Give a Link, or use Links.preset, nodes or matrix.",
        lambda: Links(3),
        (
            lambda: link(Links(Link(1e9))),
            lambda: link(Links.preset("nvlink4")),
            lambda: link(Links.nodes(2, "nvlink4", "pcie5")),
            lambda: link(Links.matrix([[0, 1e9], [1e9, 0]])),
        ),
    ),
    Remedy(
        "SK322",
        "Give a whole number, 0 for no nodes.",
        lambda: Links(Link(1e9), size=-1),
        lambda: link(Links(Link(1e9), size=0)),
    ),
    Remedy(
        "SK322",
        "Give {(source, target): Link(bandwidth)}.",
        lambda: Links(pairs={0: Link(1e9)}),
        lambda: link(Links(pairs={(0, 1): Link(1e9)})),
    ),
    Remedy(
        "SK322",
        "Give a whole number, 1 or more.",
        lambda: Links.nodes(0, "nvlink4", "pcie5"),
        lambda: link(Links.nodes(1, "nvlink4", "pcie5")),
    ),
    Remedy(
        "SK322", "Give rows of numbers.", lambda: Links.matrix("fast"), lambda: link(Links.matrix([[0, 1e9], [1e9, 0]]))
    ),
    Remedy(
        "SK322",
        "Give a square matrix.",
        lambda: Links.matrix([[0, 1e9]]),
        lambda: link(Links.matrix([[0, 1e9], [1e9, 0]])),
    ),
    Remedy(
        "SK322",
        "Give both the same shape.",
        lambda: Links.matrix([[0, 1e9], [1e9, 0]], [[0.0]]),
        lambda: link(Links.matrix([[0, 1e9], [1e9, 0]], [[0, 1e-6], [1e-6, 0]])),
    ),
    Remedy(
        "SK322",
        "Name each once.",
        lambda: Links.matrix([[0, 1e9], [1e9, 0]], devices=["a", "a"]),
        lambda: link(Links.matrix([[0, 1e9], [1e9, 0]], devices=["a", "b"]), "a", "b"),
    ),
    Remedy(
        "SK322",
        'List their names: [0, 1], or ["cuda:0", "cuda:1"].',
        lambda: Links.matrix([[0, 1e9], [1e9, 0]], devices=3),
        (
            lambda: link(Links.matrix([[0, 1e9], [1e9, 0]], devices=[0, 1])),
            lambda: link(Links.matrix([[0, 1e9], [1e9, 0]], devices=["cuda:0", "cuda:1"]), "cuda:0", "cuda:1"),
        ),
    ),
    Remedy(
        "SK322",
        "Use the names of the links.",
        lambda: Links(pairs={("a", "b"): Link(1e9)}).link("a", "c"),
        lambda: link(Links(pairs={("a", "b"): Link(1e9)}), "a", "b"),
    ),
    Remedy(
        "SK322",
        "Give 0 or more.",
        lambda: Links.preset("nvlink4").seconds(0, 1, -1),
        lambda: link(Links.preset("nvlink4")),
    ),
    Remedy(
        "SK322",
        'Links.nodes numbers devices: 3, or "cuda:3".',
        lambda: link(Links.nodes(2, "nvlink4", "pcie5"), "first", "second"),
        (
            lambda: link(Links.nodes(2, "nvlink4", "pcie5"), 0, 3),
            lambda: link(Links.nodes(2, "nvlink4", "pcie5"), "cuda:0", "cuda:3"),
        ),
    ),
    # ------------------------------------------------------------ SK323: prices
    Remedy(
        "SK323",
        "Give costs of the graph, such as splitkit.costs.roofline(gm, 'h200').",
        lambda: planned(3),
        lambda: planned(costs.roofline(graph(), "h200")),
    ),
    Remedy(
        "SK323",
        "Costs must price every node of their graph.",
        lambda: planned(Lacking(None)),
        lambda: planned(Prices(lambda node: 1.0)),
    ),
    Remedy(
        "SK323",
        "Give every node {...}.",
        lambda: planned(Prices(lambda node: -1)),
        lambda: planned(Prices(lambda node: 0.5)),
    ),
    Remedy(
        "SK323",
        "Pass it: training(costs, gm).",
        lambda: costs.training(Prices(lambda node: 1.0)),
        lambda: planned(costs.training(Prices(lambda node: 1.0), graph())),
    ),
    Remedy(
        "SK323",
        "Use it as it is.",
        lambda: costs.training(costs.training(costs.roofline(graph(), "h100"), graph()), graph()),
        lambda: planned(costs.training(costs.roofline(graph(), "h100"), graph())),
    ),
    Remedy(
        "SK323",
        "Give a function of a graph: costs=lambda gm: splitkit.costs.roofline(gm, 'h200').",
        lambda: sk.backend(0.5, costs=costs.roofline(graph(), "h200")),
        lambda: sk.backend(0.5, costs=lambda gm: costs.roofline(gm, "h200")),
    ),
    Remedy(
        "SK323",
        "Capture the forward graph: splitkit.capture(model, *inputs).",
        lambda: sk.stage_costs(joint().graph_module, [joint().flow.nodes]),
        lambda: len(sk.stage_costs(graph(), [sk.analyze(graph()).nodes])) == 1,
    ),
    # ------------------------------------------------------------ SK324, SK325: measured prices
    Remedy(
        "SK324", "Give inputs like those of capture.", lambda: costs.measured(graph(), "x"), lambda: measured("cpu")
    ),
    Remedy("SK324", "Give True or False.", lambda: measured(backward=3), lambda: measured(backward=True)),
    Remedy("SK324", "Give a number above 0.", lambda: measured(min_run_time=0), lambda: measured(min_run_time=1e-6)),
    Remedy(
        "SK324",
        "Measure it without backward=True: measured(joint, inputs).",
        lambda: costs.measured(joint().graph_module, joint_inputs(), backward=True),
        lambda: costs.measured(joint().graph_module, joint_inputs(), min_run_time=1e-6),
    ),
]


def measured(device="cpu", **options):
    return planned(costs.measured(graph(), (X,), device=device, **{"min_run_time": 1e-6, **options}))


def joint_inputs():
    return (*joint().primals(X), *joint().tangents())


@pytest.mark.parametrize("remedy", SIMPLE, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy):
    remedy.carry_out()


def test_a_file_of_devices(tmp_path):
    file = tmp_path / "devices.toml"

    def load(text):
        file.write_text(text)
        return costs.load_devices(file)

    with refusal("SK504", "Give the path of a TOML file."):
        costs.load_devices(tmp_path / "nothing.toml")
    with refusal("SK320", "Write one table per device; see load_devices."):
        load("fast")
    with refusal("SK320", "Write [{...}] above the fields of a device.") as error:
        load("mine = 3")
    head = error.value.remedy.split()[1]
    with refusal("SK320", "A device needs {...}."):
        load(f"{head}\nbandwidth = 1e12\n")
    with refusal("SK320", "Known are {...}.") as error:
        load(f"{head}\nqqqqqq = 1e12\n")
    assert {"bandwidth", "peak"} <= set(re.findall(r"\w+", error.value.remedy))
    with refusal("SK320", "Did you mean {...}?") as error:
        load(f"{head}\nbandwith = 1e12\n")
    assert "bandwidth" in error.value.remedy
    found = load(f"{head}\n{TABLE}")
    gm = graph()
    assert planned(costs.roofline(gm, found["mine"])) and sk.plan(gm, Devices([found["mine"]] * 2)).parts


def test_names_that_are_near():
    with refusal("SK321", "Did you mean {...}?") as error:
        costs.roofline(graph(), "h10")
    assert "h100" in error.value.remedy and planned(costs.roofline(graph(), "h100"))
    with refusal("SK321", "Known are {...}; describe yours with Device(...) or in a file for load_devices.") as error:
        costs.roofline(graph(), "qqqqqq")
    known = error.value.remedy.removeprefix("Known are ").partition(";")[0].split(", ")
    assert "h100" in known and all(planned(costs.roofline(graph(), name)) for name in known)
    with refusal("SK322", "Did you mean {...}?") as error:
        Links.preset("nvlink44")
    assert "nvlink4" in error.value.remedy and link(Links.preset("nvlink4"))
    with refusal("SK322", "Known are {...}; or give a Link.") as error:
        Links.preset("qqqqqq")
    assert all(link(Links.preset(n)) for n in error.value.remedy.removeprefix("Known are ").split("; ")[0].split(", "))
    with refusal("SK320", "Did you mean {...}?") as error:
        device(peak={"float32": 1e12, "bfloat1": 1e12})
    assert "bfloat16" in error.value.remedy and device(peak={"float32": 1e12, "bfloat16": 1e12})
    with refusal("SK322", "{...}") as error:
        Links.matrix([[0, -1], [1e9, 0]])
    assert error.value.remedy.startswith("Give a positive number of bytes a second")


def test_a_node_that_was_added_after_measuring():
    gm = sk.capture(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), X)
    prices = costs.measured(gm, (X,), min_run_time=1e-6)
    last = next(n for n in gm.graph.nodes if "tanh" in n.name)
    with gm.graph.inserting_after(last):
        added = gm.graph.call_function(torch.ops.aten.sin.default, (last,))
        added.meta = dict(last.meta)
    last.replace_all_uses_with(added, delete_user_cb=lambda user: user is not added)
    gm.recompile()
    with refusal("SK325", "Measure again after editing a graph: splitkit.costs.measured(gm, inputs)."):
        sk.plan(gm, Stages(2), costs=prices)
    assert sk.plan(gm, Stages(2), costs=costs.measured(gm, (X,), min_run_time=1e-6)).parts
