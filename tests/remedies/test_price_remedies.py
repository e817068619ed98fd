"""Remedies of prices that were measured or recorded (SK32x), and of plans that run eagerly or in Inductor."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from carried import Remedy, refusal
from test_command_remedies import FACTORY, command
from torch import fx, nn

import splitkit as sk
from splitkit import costs
from splitkit.cli.commands.profile import _orders
from splitkit.costs.measuring_run import require_steps
from splitkit.costs.recorded import costs_of
from splitkit.graph.ops import declared as declarations
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.policies import Remat, Stages

X = torch.linspace(-1, 1, 64).reshape(4, 16)
STEP = [StageCosts(1.0, 2.0)] * 2


def net(layers=2):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(layers)])


@cache
def graph():
    return sk.capture(net(), X)


@cache
def joint():
    return sk.capture_joint(net(), X, loss=torch.sum)


class Prices:
    """Costs of the user's own, whose backward may be anything."""

    def __init__(self, backward):
        self.backward = lambda node: backward

    def seconds(self, node):
        return 1.0

    def flops(self, node):
        return 0.0

    def nbytes(self, node):
        return 4

    def param_bytes(self, node):
        return 0


class Times:
    """Links of the user's own."""

    def __init__(self, found):
        self.seconds = lambda source, target, nbytes: found


def scheduled(prices):
    plan = sk.plan(graph(), Stages(2, schedule="1f1b", microbatches=4), prices)
    stages = sk.stage_costs(graph(), plan, prices)
    forward, backward = sum(s.forward for s in stages), sum(s.backward for s in stages)
    return backward == pytest.approx(2.0 * forward)


def step(links):
    return sk.simulate_schedule(STEP, "1f1b", 4, links=links).seconds > 0


def exported(links):
    return "SplitPoint" in sk.export(sk.plan(graph(), Stages(2)), to="torch", links=links).text


SIMPLE = [
    Remedy(
        "SK322",
        "Give links whose times are finite numbers, 0 or more.",
        lambda: step(Times(float("inf"))),
        (lambda: step(Times(0)), lambda: step(Times(1e-6)), lambda: step(costs.Links.preset("nvlink4"))),
    ),
    Remedy(
        "SK322",
        "Name a preset, such as nvlink4: exports assume equal links.",
        lambda: exported(costs.Links.preset("pcie5")),
        lambda: exported("nvlink4"),
    ),
    Remedy(
        "SK323",
        "Give every node {...}.",
        lambda: scheduled(Prices("twice")),
        lambda: scheduled(Prices(2.0)),
    ),
]


@pytest.mark.parametrize("remedy", SIMPLE, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy):
    remedy.carry_out()


# ------------------------------------------------------------ SK324: measured training steps


def acts(x):
    return x + 1


def acting():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.sum, (graph.call_function(acts, (x,)),)))
    for node in graph.nodes:
        node.meta["val"] = X.sum() if node.target is torch.sum else X
    return fx.GraphModule(nn.Module(), graph)


def test_a_backward_that_has_no_price():
    prices = Prices(2.0)
    prices.backward = {}.__getitem__
    with refusal("SK323", "Costs must price every node of their graph."):
        scheduled(prices)
    prices.backward = dict.fromkeys(graph().graph.nodes, 2.0).__getitem__
    assert scheduled(prices)


def test_an_op_that_may_run_only_once():
    def ask(**options):
        return costs.measured(acting(), (X,), min_run_time=1e-6, **options)

    with refusal("SK324", "Declare it with splitkit.extend.declare, or estimate backward: training(measured(gm, "):
        ask(backward=True)
    estimated = costs.training(ask())
    assert all(estimated.seconds(n) >= 0 for n in estimated.gm.graph.nodes)
    sk.extend.declare(acts)
    try:
        found = ask(backward=True)
    finally:
        declarations._DECLARED.pop(acts)
    assert sum(found.seconds(n) for n in found.gm.graph.nodes) > 0


def test_backward_where_there_are_no_hooks_of_its_clock():
    with refusal("SK324", "Estimate it there: splitkit.costs.training(splitkit.costs.measured(gm, inputs, device))."):
        require_steps(sk.analyze(graph()), torch.device("cuda"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    estimated = costs.training(costs.measured(graph(), (X,), device, min_run_time=1e-6))
    assert sk.plan(graph(), Stages(2), estimated).claim.value > 0


# ------------------------------------------------------------ SK325: recorded prices


def test_a_plan_without_a_price_of_a_node():
    gm = graph()
    last = [n for n in gm.graph.nodes if n.op == "call_function"][-1]

    class Partial(Prices):
        def seconds(self, node):
            return {}[node] if node is last else 1.0

    def saved(prices):
        where = dict.fromkeys(sk.analyze(gm).nodes, 0)
        plan = sk.Plan.from_dict(gm.graph, sk.plan(gm, where, prices).to_dict())
        return sum(map(costs_of(plan.prices, gm).seconds, sk.analyze(gm).nodes))

    with refusal("SK325", "Give costs of this graph, or plan again."):
        saved(Partial(2.0))
    assert saved(Prices(2.0)) == saved(costs.unit(gm)) == len(sk.analyze(gm).nodes)


# ------------------------------------------------------------ SK330: orders and numbers of stages


def test_the_links_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(FACTORY)
    device = "\n[mine]\ncount = 2\npeak = { float32 = 4e13 }\nbandwidth = 9e11\nmemory = 48_000_000_000\n"
    (tmp_path / "mine.toml").write_text("links = 3" + device)
    with refusal("SK322", 'Name what connects the devices: links = "nvlink4".') as error:
        command("plan my.py:net --devices mine.toml")
    (tmp_path / "mine.toml").write_text(error.value.remedy.split(": ")[1][:-1] + device)
    assert command("plan my.py:net --devices mine.toml")["placement"]["links"] == "nvlink4"


def test_devices_that_are_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(FACTORY)
    with refusal("SK601", "Name at most {...}.") as error:
        command("plan my.py:net --devices 99999999xh200")
    assert error.value.remedy == "Name at most 1024." and "these are 99999999" in error.value.reason
    with refusal("SK601", "Give a policy to --policy in place of --devices."):
        command("plan my.py:net --devices Stages(2)")
    with refusal(
        "SK601", "Say which devices, such as --devices {...}xh200; or use --stages {...} for unspecified devices."
    ) as error:
        command("plan my.py:net --devices 2")
    for words in re.findall(r"--\w+ \w+", error.value.remedy):
        assert len(command(f"plan my.py:net {words}")["report"]["parts"]) == 2
    with refusal("SK601", "Write {...}x{...}.") as error:
        command("plan my.py:net --devices h200x2")
    assert command(f"plan my.py:net --devices {error.value.remedy.split()[1][:-1]}")["report"]["parts"]
    with refusal("SK601", "{...} --memory {...} with {...} in place of --devices.") as error:
        command("plan my.py:net --devices 2x24GiB")
    memory, stages = re.search(r"(--memory \S+) with (--stages \d+)", error.value.remedy).groups()
    assert len(command(f"plan my.py:net {memory} {stages}")["report"]["parts"]) == 2
    with refusal("SK601", "Write 4xh200, h200,h200,a100 or FILE.toml."):
        command("plan my.py:net --devices h200,mine.toml")
    for words in ("4xh200", "h200,h200,a100"):
        assert command(f"plan my.py:net --devices {words}")["report"]["parts"]
    assert command('plan my.py:net --policy "Stages(2)"')["report"]["parts"]
    with refusal("SK302", "Name 1 to {...} devices."):
        sk.fit("config.json", "99999999x24GiB")


def test_a_profile_of_stages_that_no_schedule_puts_on_the_ranks():
    args = SimpleNamespace(schedules=None)
    for ranks in (2, 3):
        with refusal("SK330", "Split into {...} or {...} stages.") as error:
            _orders(args, 2 * ranks + 1, 4, ranks)
        for stages in map(int, re.findall(r"\d+", error.value.remedy)):
            for microbatches in (2, 3, 4, 8):
                found, _ = _orders(args, stages, microbatches, ranks)
                assert found and all(len(order.ranks) == ranks for order in found)


# ------------------------------------------------------------ what Inductor does with saved values


def gradients(model, run, x=X):
    """The loss and all gradients of one step."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    loss = run(x).sum()
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


class TwoViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        left, right = (self.scale * x @ x.T).sin().split(32)
        return left.sin() * right.cos()


KEEP = Remat(keep=["aten.split"])
WIDE = torch.linspace(-1, 1, 64 * 8).reshape(64, 8)


def compiled(backend):
    torch._dynamo.reset()
    model = TwoViews()
    return gradients(model, torch.compile(model, backend=backend), WIDE)


@pytest.mark.campaign
def test_saved_values_that_inductor_does_not_write_over():
    want = compiled("eager")
    torch.testing.assert_close(compiled(sk.backend(KEEP, inner="inductor")), want)
