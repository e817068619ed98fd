"""Remedies of errors about the devices of parts (SK807, SK808), on the CPU and on ``meta``."""

from __future__ import annotations

import re

import pytest
import torch
from carried import Remedy, refusal
from torch import fx, nn

import splitkit as sk
from splitkit.plans.parts import Part
from splitkit.runtime import open_stages, save_stages, to_devices
from splitkit.runtime.folder.tensorfiles import write_tensors

X = torch.linspace(0.1, 1, 4)
CPUS = ["cpu:0", "cpu:1"]  # to torch one CPU: every crossing value is copied all the same
META = [*CPUS[:1], "meta"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x).relu())


class Twice(nn.Module):
    """Calls one module twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(self.a(x).relu())


class Calls(nn.Module):
    """Calls a graph that names a device and holds a tensor."""

    def __init__(self):
        super().__init__()

        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4))

            def forward(self, x):
                return x * self.weight + torch.ones_like(x, device="cpu")

        self.inner = fx.symbolic_trace(Inner())

    def forward(self, x):
        return self.inner(x).sin()


class Leaves(fx.Tracer):
    """Does not look into modules."""

    proxy_buffer_attributes = True

    def is_leaf_module(self, module, name):
        return True


class Buffers(nn.Module):
    """Two buffers, of which one may be a view of the other, and a module with a buffer that may be written."""

    def __init__(self, run, cloned=False):
        super().__init__()
        whole = torch.linspace(1, 2, 4)
        self.run = run
        self.register_buffer("whole", whole)
        self.register_buffer("tail", whole[2:].clone() if cloned else whole[2:])
        self.inner = nn.Linear(4, 4).requires_grad_(False)
        nn.init.eye_(self.inner.weight)
        nn.init.zeros_(self.inner.bias)

    def forward(self, x):
        return self.run(self, x)


def leaves(model):
    return fx.GraphModule(model, Leaves().trace(model))


def net():
    return sk.capture(Net(), X[None])


def two(gm=None, **options):
    return sk.split(gm or net(), sk.policies.Stages(2), **options)


def same(placed, model=None, x=X[None]):
    """Whether parts compute what the model computes."""
    with torch.no_grad():
        return torch.equal(placed(x.clone()), (model or Net())(x.clone()))


def elsewhere(placed, x=X[None]):
    """Whether parts on ``meta`` compute there, which torch refuses as soon as one of several tensors is not there."""
    return placed(x.to("meta")).is_meta


def placed(run, labels, devices=CPUS, cloned=False):
    """A traced function on two devices, split by the parts of its nodes."""
    split = sk.split(leaves(Buffers(run, cloned)), labels)
    return to_devices(split, {key: devices[key % 2] for key in split.parts})


def right(run, labels, devices=CPUS, cloned=False):
    """Whether it runs on several devices as it does on one."""
    with torch.no_grad():
        return torch.equal(placed(run, labels, devices, cloned)(X.clone()), Buffers(run)(X.clone()))


def written_while_read(m, x):
    y = x.mul(2)
    z = y.add_(1)
    return z + y.cos()


def by_address(m, x):
    return x.view(2, 2).t().sin().t().as_strided((2, 2), (1, 2))


def read_twice(m, x):
    return (x * m.whole).view(2, 2) + m.tail.sin()


def weight_of_module(m, x):
    y = m.inner(x)
    m.inner.weight.add_(1)
    return y


class Region(nn.Module):
    """Reads in a region without gradients what was written before it."""

    def forward(self, x):
        a = x.sin()
        y = x.mul(2).add_(1)
        with torch.no_grad():
            z = a + y
        return z * x


def writes_input(m, x):
    return x.sin() + x.add_(1)


READ = {"mul": 0, "add_": 1, "cos": 2, "add": 3}
ADDRESS = {"view": 0, "t": 0, "sin": 0, "t_1": 0}
BUFFERS = {"mul": 0, "view": 0, "sin": 1, "add": 1}


def shared(first, second, gm=None):
    """Parts 0 and 1 on two devices."""
    return to_devices(two(gm or leaves(Twice())), [first, second])


def replicas(count):
    gm = net()
    plan = sk.plan(gm, sk.policies.Stages(2))
    return to_devices(sk.split(gm, sk.Plan(plan.places, {k: Part(k, replicas=count) for k in plan.parts})), CPUS)


def regions(part):
    """Parts on two devices, and the node of the region in another part, or (``None``) in the parent."""
    of = {"sin": 0, "mul": 1, "add_": 1, "mul_1": 2, **({} if part is None else {"add": part})}
    split = sk.split(sk.capture(Region(), X), of)
    return to_devices(split, {key: CPUS[key % 2] for key in split.parts})


def region(part):
    x, y = (X.clone().requires_grad_() for _ in range(2))
    found, want = regions(part)(x), Region()(y)
    found.sum().backward()
    want.sum().backward()
    return torch.equal(found, want) and torch.equal(x.grad, y.grad)


def given(remedy):
    """The devices that a remedy shows, on the CPU."""
    shown = re.search(r'devices=(\[.*\])|"(cuda:0)"', remedy)
    return eval((shown[1] or f'"{shown[2]}"').replace("cuda", "cpu"))


SIMPLE = [
    Remedy(
        "SK807",
        "Plan at least one part.",
        lambda: to_devices(sk.split(net(), lambda node: None), "cpu"),
        lambda: same(to_devices(sk.split(net(), lambda node: 0), "cpu")),
    ),
    Remedy(
        "SK807",
        "Give one for each, in their order.",
        lambda: to_devices(two(), ["cpu"]),
        lambda: [*(on := to_devices(two(), CPUS)).part_devices.values()] == [*map(torch.device, CPUS)] and same(on),
    ),
    Remedy(
        "SK807",
        "Run it with splitkit.runtime.pipeline, or plan without replicas.",
        lambda: replicas(2),
        lambda: same(replicas(1)),
    ),
    Remedy(
        "SK807",
        "Call to_devices(split, ...) with other devices.",
        lambda: to_devices(two(), "cpu").to("meta"),
        (
            lambda: elsewhere(to_devices(two(), "meta")),
            lambda: (split := two()) and to_devices(split, "cpu:0") and same(to_devices(split, CPUS)),
            lambda: (split := two()) and to_devices(split, "cpu:0") and elsewhere(to_devices(split, "meta")),
        ),
    ),
    Remedy(
        "SK807",
        "Give both parts one device, or capture by export, which has no calls of modules.",
        lambda: shared(*CPUS),
        (
            lambda: same(shared("cpu:1", "cpu:1"), Twice()),
            lambda: same(shared(*CPUS, sk.capture(Twice(), X[None])), Twice()),
        ),
    ),
    Remedy(
        "SK807",
        "Capture by export, which gives such graphs all that they read.",
        lambda: to_devices(two(leaves(Calls())), ["meta", "meta"]),
        (
            lambda: elsewhere(to_devices(two(sk.capture(Calls(), X)), ["meta", "meta"]), X),
            lambda: same(to_devices(two(sk.capture(Calls(), X)), CPUS), Calls(), X),
        ),
    ),
    Remedy(
        "SK808",
        "Put all nodes that share it into parts on one device: a value that crosses is a copy.",
        lambda: placed(written_while_read, READ),
        (
            lambda: right(written_while_read, {**READ, "add_": 0}),
            lambda: right(written_while_read, {**READ, "add_": 2, "cos": 4, "add": 6}),  # even parts are on one device
        ),
    ),
    Remedy(
        "SK808",
        "Put both into parts of one device.",
        lambda: placed(by_address, {**ADDRESS, "as_strided": 1}),
        (
            lambda: right(by_address, {**ADDRESS, "as_strided": 0}),
            lambda: right(by_address, {**ADDRESS, "as_strided": 2}),
        ),
    ),
    Remedy(
        "SK808",
        "Give the parts that read them one device, or clone one of them before the capture.",
        lambda: placed(read_twice, BUFFERS),
        (
            lambda: right(read_twice, BUFFERS, [CPUS[1]] * 2),
            lambda: right(read_twice, BUFFERS, cloned=True),
        ),
    ),
    Remedy(
        "SK808",
        "Give it a part: the parent runs it now.",
        lambda: regions(None),
        (lambda: region(0), lambda: region(1), lambda: region(2)),
    ),
    Remedy(
        "SK808",
        "Put both on that device.",
        lambda: placed(weight_of_module, {"add_": 1, "inner": 0}),
        (
            lambda: right(weight_of_module, {"add_": 1, "inner": 1}),
            lambda: right(weight_of_module, {"add_": 1, "inner": 0}, [CPUS[1]] * 2),
        ),
    ),
]


@pytest.mark.parametrize("remedy", SIMPLE, ids=lambda remedy: remedy.told[:40])
def test_simple(remedy):
    remedy.carry_out()


def test_devices_that_the_remedy_shows():
    with refusal("SK807", 'Give one for each part: devices=["cuda:0", "cuda:1"].') as caught:
        to_devices(two())
    assert same(to_devices(two(), devices=given(caught.value.remedy)))
    with refusal("SK807", 'Use "cuda:0", for example.') as caught:
        to_devices(two(), ["cpu", "gpu:0"])
    assert same(to_devices(two(), ["cpu", given(caught.value.remedy)]))


def test_the_part_that_was_meant():
    split = sk.split(net(), lambda node: "first" if node.name.endswith("a") else "second", on_cycle="refine")
    with refusal("SK807", "Did you mean {...}?") as near:
        to_devices(split, {"secnd": "cpu", **dict.fromkeys(split.parts, "cpu")})
    with refusal("SK807", "The parts are {...}.") as known:
        to_devices(split, {"nothing like it": "cpu", **dict.fromkeys(split.parts, "cpu")})
    for caught in (near, known):
        meant = re.search(r"'(.+?)'", caught.value.remedy)[1]
        assert meant in split.parts and same(to_devices(split, {**dict.fromkeys(split.parts, "cpu:0"), meant: "cpu:1"}))


def test_an_input_on_the_device_that_writes_it():
    on = placed(writes_input, {"sin": 0, "add_": 0, "add": 0})
    with refusal("SK808", "Give it on {...}.") as caught:
        on(X.to("meta"))
    where = re.search(r"on (\S+)\.$", caught.value.remedy)[1]
    x = X.to(where, copy=True)
    assert torch.equal(on(x), X.sin() + X + 1) and torch.equal(x, X + 1)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder with the weights of `Net`, and one with its stages."""
    folder, stages = tmp_path_factory.mktemp("weights"), tmp_path_factory.mktemp("stages")
    write_tensors(folder / "model.safetensors", Net().state_dict())
    save_stages(two(on_meta()), stages)
    return folder, stages


def on_meta():
    with torch.device("meta"):
        return sk.capture(Net(), X.to("meta")[None])


def test_weights_from_files(weights):
    folder, stages = weights
    with refusal("SK807", "Load the weights: splitkit.load(split, folder, devices)."):
        to_devices(two(on_meta()), CPUS)
    assert same(sk.load(two(on_meta()), folder, CPUS))
    with refusal("SK807", "Split the graph in this process; splitkit.load(split, folder, devices) reads the weights"):
        to_devices(open_stages(stages), CPUS)
    assert same(to_devices(two(), CPUS)) and same(sk.load(two(on_meta()), folder, CPUS))
    with refusal("SK807", "Give it splitkit.split(gm, plan). A rank with stages on disk loads open_stages("):
        sk.load(open_stages(stages), folder, CPUS)
    gm = on_meta()
    assert same(sk.load(sk.split(gm, sk.plan(gm, sk.policies.Stages(2))), folder, CPUS))
