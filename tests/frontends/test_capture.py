"""Capture keeps what the model is, disturbs nothing, and says where it failed."""

import copy
import dataclasses
import logging
import warnings

import pytest
import torch
from torch import fx, nn

import splitkit as sk
from splitkit.errors import CaptureError
from splitkit.frontends.joint_capture import capture, capture_joint
from splitkit.frontends.trace_settings import without_meta_errors
from splitkit.graph.scope import is_state_op

leaves = torch.utils._pytree.tree_leaves


class Net(nn.Module):
    """Tied weights, dropout, a buffer that forward writes, BatchNorm, optional inputs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.inner[0].weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("hidden", torch.ones(4), persistent=False)

    def forward(self, x, y=None, double=False, *, more=None):
        h = self.head(self.inner(x)) * self.hidden + self.calls
        if double:
            h = h * 2
        if y is not None:
            h = h + y
        if more is not None:
            h = h + more["z"]
        return {"h": h, "none": None, "weight": self.head.weight}


CALLS = [((), {}), ((True,), {}), ((), {"double": True}), ((), {"more": {"z": torch.ones(4)}})]
HOWS = ["export", "symbolic_trace"]


def inputs(rest):
    torch.manual_seed(0)
    return torch.randn(3, 4), torch.randn(3, 4) if rest else None, *rest


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("rest, kwargs", CALLS)
def test_same_values_and_gradients(how, rest, kwargs):
    model, args = Net(), inputs(rest)
    other = copy.deepcopy(model)
    gm = capture(other, *args, how=how, **kwargs)
    results = []
    for module in (model, gm):
        torch.manual_seed(1)
        out = module(*args, **kwargs)
        out["h"].square().sum().backward()
        results.append(leaves(out))
    assert all(a is b or torch.equal(a, b) for a, b in zip(*results, strict=True))
    for (name, mine), (_, theirs) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, mine.grad, msg=name)
    for (name, mine), (_, theirs) in zip(model.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), name


@pytest.mark.parametrize("how", HOWS)
def test_parameters_and_buffers_are_the_models_own(how):
    model = Net()
    gm = capture(model, torch.randn(3, 4), how=how)
    for name, tensor in [*gm.named_parameters(remove_duplicate=False), *gm.named_buffers()]:
        owner, _, leaf = name.rpartition(".")
        assert getattr(model.get_submodule(owner), leaf) is tensor, name
    assert gm.get_parameter("head.weight") is gm.get_parameter("inner.0.weight")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("grad", [True, False])
def test_nothing_is_disturbed(how, grad):
    model = Net()
    before = {k: v.clone() for k, v in [*model.named_parameters(), *model.named_buffers()]}
    state = torch.get_rng_state()
    with torch.set_grad_enabled(grad):
        gm = capture(model, torch.randn(3, 4, generator=torch.Generator()), how=how)
        assert torch.is_grad_enabled() is grad
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in [*model.named_parameters(), *model.named_buffers()])
    assert all(p.grad is None for p in model.parameters()) and model.training
    assert not any(is_state_op(node) for node in gm.graph.nodes)


@pytest.mark.parametrize("how", HOWS)
def test_every_node_has_its_value(how):
    gm = capture(Net(), *inputs(()), how=how)
    owned = dict([*gm.named_parameters(remove_duplicate=False), *gm.named_buffers()])
    for node in gm.graph.nodes:
        assert ("val" in node.meta) == (node.op != "output"), node
        if node.op == "get_attr":
            assert node.meta["val"].shape == owned[node.target].shape
    shapes = [node.meta["val"].shape for node in gm.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    assert torch.Size([3, 4]) in shapes


def test_module_paths_are_kept():
    gm = capture(Net(), torch.randn(3, 4))
    (norm,) = [n for n in gm.graph.nodes if n.target is torch.ops.aten.batch_norm.default]
    assert [path for path, _ in norm.meta["nn_module_stack"].values()][-1] == "inner.2"


def test_no_checks_of_export_remain():
    gm = capture(Net(), torch.randn(3, 4))
    assert not any("guards" in str(n.target) or "_assert" in str(n.target) for n in gm.graph.nodes)
    assert not hasattr(gm, "_guards_fn")


def twice(gm):
    return [gm, copy.deepcopy(gm), copy.deepcopy(copy.deepcopy(gm))]


def test_other_sizes_and_values_are_refused_also_by_copies():
    for gm in twice(capture(Net(), torch.randn(3, 4), None, False)):
        gm(torch.randn(3, 4), None, False)
        with pytest.raises(RuntimeError, match=r"shape\[0\] to be equal to 3, but got 5"):
            gm(torch.randn(5, 4), None, False)
        with pytest.raises(RuntimeError, match="to be equal to False, but got True"):
            gm(torch.randn(3, 4), None, True)


def test_tracing_refuses_other_constants_and_takes_other_sizes():
    for gm in twice(capture(Net(), torch.randn(3, 4), how="symbolic_trace")):
        assert gm(torch.randn(5, 4))["h"].shape == (5, 4)
        with pytest.raises(RuntimeError, match="input double to be False, as at capture, but got True"):
            gm(torch.randn(3, 4), None, True)


def test_dynamic_sizes():
    model = Net()
    for gm in twice(capture(model, torch.randn(3, 4), torch.randn(3, 4), dynamic=True)):
        for size in (2, 7):
            assert gm(torch.randn(size, 4), torch.randn(size, 4))["h"].shape == (size, 4)
    with pytest.raises((RuntimeError, AssertionError)):
        gm(torch.randn(3, 4), torch.randn(5, 4))


def test_exported_program():
    model = Net()
    program = torch.export.export(model, (torch.randn(3, 4),), strict=False)
    gm = capture(program)
    assert isinstance(gm, fx.GraphModule) and gm.get_parameter("head.weight") is model.head.weight


@dataclasses.dataclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def test_dataclass_outputs():
    torch.export.register_dataclass(Pair)

    class Pairs(nn.Module):
        def forward(self, x):
            return Pair(x + 1, x + 2)

    out = capture(Pairs(), torch.zeros(2))(torch.zeros(2))
    assert isinstance(out, Pair) and out.b.tolist() == [2, 2]


class Decides(nn.Module):
    def forward(self, x):
        if x.sum() > 0:  # the line to name
            return x
        return -x


class Object(nn.Module):
    def forward(self, x):
        return object()


class Fails(nn.Module):
    def forward(self, x):
        raise KeyError("no such thing")  # the line to name


@pytest.mark.parametrize("how", HOWS)
def test_data_dependent_control_flow(how, capfd):
    with pytest.raises(CaptureError) as caught:
        capture(Decides(), torch.randn(3), how=how)
    text = str(caught.value)
    assert caught.value.code == "SK401"
    assert "test_capture.py:" in text and "if x.sum() > 0" in text
    assert "def forward" not in capfd.readouterr().err, "torch prints its graph so far"
    assert "torch.cond" in text
    assert "how=" not in text  # neither way takes it


def applied_to(model, x, **options):
    return sk.apply(model, sk.policies.SaveAll(), x, **options)


class Doors(nn.Module):
    """Its inner part takes eight features."""

    def __init__(self, make=nn.Linear):
        super().__init__()
        self.inner = nn.Sequential(nn.ReLU(), make(8, 4))

    def forward(self, x):
        return self.inner(x).sum()


@pytest.mark.parametrize("door", [capture, capture_joint, applied_to])
def test_a_wrong_shape_is_told_once_and_without_torchs_log(door, capfd):
    with pytest.raises(CaptureError, match="SK401"):
        door(Doors(), torch.randn(3, 9))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("door", [capture, applied_to])
@pytest.mark.parametrize("make", [nn.Linear, torch.nn.utils.parametrizations.weight_norm])
def test_a_wrong_shape_names_the_part_that_does_not_take_it(door, make):
    model = Doors(make if make is nn.Linear else lambda i, o: make(nn.Linear(i, o)))
    with pytest.raises(CaptureError) as caught:
        door(model, torch.randn(3, 9))
    text = str(caught.value)
    assert "mat1 and mat2 shapes cannot be multiplied (3x9 and 8x4), in its part inner.1" in text
    assert "called with float32[3, 9]" in text and "return self.inner(x).sum()" in text
    assert "Dynamo" not in text and "FakeTensor" not in text.split("torch says")[0]


@pytest.mark.parametrize("fullgraph", [False, True])
def test_what_the_model_raises_at_apply_is_told_as_it_raised_it(fullgraph):
    with pytest.raises(CaptureError, match=r"Fails does not run on the example inputs: KeyError: 'no such") as caught:
        applied_to(Fails(), torch.randn(3), fullgraph=fullgraph)
    assert "called with float32[3]" in caught.value.reason and "# the line to name" in caught.value.reason
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_lazy_model_that_does_not_take_its_examples():
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(9, 4))
    with pytest.raises(CaptureError, match="in its part 1, a Linear, called with float32\\[3, 8\\]"):
        applied_to(model, torch.randn(3, 9))


def test_what_dynamo_alone_does_not_take_is_named_at_apply():
    with pytest.raises(CaptureError, match="SK401: Trains could not be captured by dynamo") as caught:
        applied_to(Trains(bool), torch.randn(2, 3), fullgraph=True)
    assert "test_capture.py" in caught.value.reason
    assert "fullgraph=True" in caught.value.remedy and "splitkit.apply" not in caught.value.remedy


class Trains(nn.Module):
    """Decides, and has a weight; the line that decides is in a function of an installed package, or in its own."""

    def __init__(self, decide):
        super().__init__()
        self.linear, self.decide = nn.Linear(3, 3), decide

    def forward(self, x):
        y = self.linear(x)
        return y.sin().sum() if self.decide(y.sum()) else y.cos().sum()  # the line of the model


def test_what_trains_a_model_that_is_not_captured_is_said():
    model, x = Trains(bool), torch.randn(2, 3)
    with pytest.raises(CaptureError) as caught:
        capture(model, x)
    assert "torch.cond" in caught.value.remedy and "splitkit.apply(model, policy" in caught.value.remedy
    model(x).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with pytest.warns(UserWarning, match="has graph breaks"):
        applied = sk.apply(model, sk.policies.SaveAll(), x)
    applied(x).backward()
    assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))
    model.requires_grad_(False)
    with pytest.raises(CaptureError) as caught:
        capture(model, x)
    assert "apply" not in caught.value.remedy


def test_nobody_is_told_to_mend_an_installed_package(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "chooses.py"
    package.parent.mkdir()
    package.write_text("def positive(x):\n    return bool(x > 0)  # of the package\n")
    monkeypatch.syspath_prepend(str(package.parent))
    import chooses

    with pytest.raises(CaptureError) as caught:
        capture(Trains(chooses.positive), torch.randn(2, 3))
    reason = caught.value.reason
    assert f"at {package}:2: return bool(x > 0)  # of the package" in reason
    assert "test_capture.py" in reason and "# the line of the model" in reason
    assert "torch.cond" not in caught.value.remedy and "splitkit.apply" in caught.value.remedy


def test_other_failures_name_the_line_and_keep_the_cause():
    with pytest.raises(
        CaptureError, match=r"(?s)test_capture.py:.*raise KeyError.*KeyError: 'no such thing'"
    ) as caught:
        capture(Fails(), torch.randn(3))
    assert isinstance(caught.value.__cause__, KeyError)


def test_outputs_without_tensors():
    with pytest.raises(CaptureError, match="returns something that is not a tensor") as caught:
        capture(Object(), torch.randn(3))
    assert "__reduce_ex__" in caught.value.remedy


def test_unknown_ways_and_things_that_are_no_module():
    with pytest.raises(CaptureError, match=r"(?s)SK401.*'dynamo'.*export, symbolic_trace"):
        capture(Net(), torch.randn(3, 4), how="dynamo")
    with pytest.raises(CaptureError, match="SK401: a function is not a module"):
        capture(lambda x: x, torch.randn(3, 4))


def test_wrong_inputs():
    with pytest.raises(CaptureError, match="SK401"):
        capture(Net(), torch.randn(3, 4), how="symbolic_trace", nonsense=1)


def test_one_tensor_given_twice_is_captured_as_two_inputs():
    class Model(nn.Module):
        def forward(self, x, labels):
            return x * 2 + labels

    x = torch.ones(2)
    gm = capture(Model(), x, x)
    assert torch.equal(gm(torch.ones(2), torch.zeros(2)), torch.full((2,), 2.0))


def test_a_failed_capture_leaves_no_fake_tensors_in_the_model():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.kept = nn.Linear(4, 4), []

        def forward(self, x):
            self.kept.append(self.linear(x))
            return x if x.sum() > 0 else -x

    model = Keeps()
    with pytest.raises(sk.errors.CaptureError, match="SK401"):
        capture(model, torch.randn(2, 4))
    assert not any("Fake" in type(t).__name__ for t in model.kept)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_mode_of_a_capture_is_fixed(mode):
    gm = capture(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), torch.ones(1, 2))
    with pytest.raises(NotImplementedError, match="fixed at capture: call model.train"):
        getattr(gm, mode)()


def test_torch_logs_no_error_of_meta_values_that_it_raises_and_later_all_again():
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, told = list(log.filters), logging.makeLogRecord({"msg": "failed while attempting to run meta for %s"})
    with without_meta_errors():
        assert not log.filter(told) and log.filter(logging.makeLogRecord({"msg": "something else"}))
    assert log.filters == before and log.filter(told)


def test_weights_that_a_recurrent_layer_lists_anew_are_no_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sk.capture(nn.GRU(4, 4), torch.randn(2, 1, 4))
    assert not [one for one in caught if "_flat_weights" in str(one.message)]
