"""Models whose first call changes them, TorchScript and shared examples: the same as eager mode, or a coded refusal."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import CaptureError, PolicyError
from splitkit.policies import MinCut, RecomputeAll, SaveAll, Stages
from splitkit.testing import assert_same


class Resized(nn.Module):
    """Makes room in its buffer at its first call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x):
        if self.seen.numel() == 0:
            self.seen.resize_(8).fill_(1.0)
        self.seen.add_(x.detach().sum(0))
        return self.layer(x * self.seen.sigmoid())


class Retyped(nn.Module):
    """Changes the dtype of its buffer in place at its first call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("scale", torch.full((8,), 2.0, dtype=torch.float64))

    def forward(self, x):
        if self.scale.dtype != x.dtype:
            self.scale.data = self.scale.data.to(x.dtype)
        return self.layer(x * self.scale)


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.layer = torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(torch.relu(self.part(x)))


def observed():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).train()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
        return torch.ao.quantization.prepare_qat(model, inplace=True)


MODELS = {
    "quantisation-aware training": observed,
    "spectral norm by a hook": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4)),
    "lazy batch norm": lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 4)),
    "a buffer that is resized": Resized,
    "a buffer of another dtype": Retyped,
    "a part in TorchScript": Scripted,
}


def made(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return MODELS[name]()


def two_steps(model, run, x):
    """(outputs, gradients, buffers) after two steps."""
    outputs = [run(x), run(2 * x)]
    sum(output.square().sum() for output in outputs).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return outputs, gradients, dict(model.named_buffers())


def assert_equal(one, other):
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_its_first_call_changes_trains_by_a_policy_as_it_does_in_eager_mode(name):
    if name == "a buffer that is resized" and torch.__version__.startswith("2.11"):
        pytest.skip("Dynamo of torch 2.11 gives another second result, with any backend")
    x = torch.randn(4, 8)
    model = made(name)
    expected = two_steps(model, model, x)
    model = made(name)
    trained = sk.apply(model, RecomputeAll(), x)
    assert_equal(expected, two_steps(trained, trained, x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["quantisation-aware training", "lazy batch norm", "spectral norm by a hook"])
def test_a_model_that_its_first_call_changes_is_captured_with_its_loss(name):
    x = torch.randn(4, 8)
    model = made(name)
    model(x).sum().backward()
    step = sk.capture_joint(made(name), x, loss=torch.sum).run(x)
    assert_equal({n: p.grad for n, p in model.named_parameters()}, dict(step.gradients))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["quantisation-aware training", "spectral norm by a hook", "a buffer that is resized"])
def test_a_split_is_compared_with_a_model_that_its_first_call_changes(name):
    x, model = torch.randn(4, 8), made(name)
    before = {n: b.clone() for n, b in model.named_buffers()}
    split = sk.split(sk.capture(model, x), Stages(2))
    sk.compare(model, split, x).raise_if_different()
    assert {n: tuple(b.shape) for n, b in model.named_buffers()} == {n: tuple(b.shape) for n, b in before.items()}


def test_lazy_buffers_do_not_keep_what_the_capture_saw():
    model = made("lazy batch norm")
    sk.capture(model, torch.randn(4, 8))
    assert torch.equal(model[1].running_mean, torch.zeros(8)) and torch.equal(model[1].running_var, torch.ones(8))


@pytest.mark.parametrize("door", [sk.capture, sk.capture_joint, lambda m, x: sk.apply(m, SaveAll(), x)])
def test_torchscript_is_refused_with_what_works(door):
    with pytest.raises(CaptureError, match="SK401.*TorchScript") as refused:
        door(torch.jit.script(nn.Linear(8, 4)), torch.randn(4, 8))
    assert "that was scripted" in refused.value.remedy


@pytest.mark.parametrize("door", [sk.capture, sk.capture_joint])
def test_a_part_in_torchscript_is_named_where_the_model_cannot_be_captured(door):
    with pytest.raises(CaptureError, match="SK401") as refused:
        door(Scripted(), torch.randn(4, 8))
    assert "Its part part is TorchScript" in refused.value.remedy and "splitkit.apply" in refused.value.remedy


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, y):
        x.mul_(2)
        return self.layer(x).sin() + self.layer(y).cos()


def overlapping(grad=False):
    torch.manual_seed(1)
    base = torch.randn(12, 8, requires_grad=grad)
    base = base * 1 if grad else base
    return base[:6], base[3:9]


@pytest.mark.parametrize("grad", [False, True])
def test_examples_that_share_memory_are_planned_as_such(grad):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Writes()
    expected = model(*overlapping(grad))
    given = overlapping(grad)
    values = [x.detach().clone() for x in given]
    trained = sk.apply(model, SaveAll(), *given)
    assert all(torch.equal(x, value) for x, value in zip(given, values, strict=True))
    assert_equal(expected, trained(*overlapping(grad)))


def test_the_same_example_twice_is_one_tensor():
    torch._dynamo.reset()
    model, x = Writes(), torch.randn(6, 8)
    expected = model(*[x.clone()] * 2)
    assert_equal(expected, sk.apply(model, SaveAll(), x, x)(*[x.clone()] * 2))


def measured(gm):
    inputs = [torch.randn(node.meta["val"].shape) for node in gm.graph.find_nodes(op="placeholder")]
    return sk.costs.measured(gm, inputs, min_run_time=1e-4)


@pytest.mark.parametrize("door", ["apply", "backend"])
def test_prices_may_be_measured_while_torch_compiles(door):
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(4, 8)
    expected = model(x)
    if door == "apply":
        run = sk.apply(model, MinCut(), x, costs=measured)
    else:
        run = torch.compile(model, backend=sk.backend(MinCut(), costs=measured))
    assert_equal(expected, run(x))
    with pytest.warns(UserWarning, match="priced by FLOPs") if door == "apply" else warnings.catch_warnings():
        warnings.simplefilter("always")
        run(torch.randn(3, 8)).sum().backward()  # of the size, a symbol now, no tensor can be made


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="torch 2.11")
def test_a_memory_budget_in_the_model_is_refused_where_a_policy_would_ignore_it():
    torch._dynamo.reset()

    class Region(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            with torch.autograd.graph.region_activation_memory_budget(0.5):
                return self.layer(x).relu().sum()

    x = torch.randn(4, 8)
    with pytest.raises(PolicyError, match="SK305"):
        sk.apply(Region(), SaveAll(), x)
    with pytest.raises(PolicyError, match="SK305"):
        sk.capture_joint(Region(), x).split(SaveAll())


class Lazily(nn.Module):
    """Changes itself at its first call."""

    def __init__(self, how):
        super().__init__()
        self.linear, self.how, self.seen, self.mask = nn.Linear(4, 4), how, False, None

    def forward(self, x):
        if not self.seen:
            self.seen = True
            if self.how == "parameter":
                self.scale = nn.Parameter(torch.full((4,), 2.0))
            elif self.how == "buffer":
                self.register_buffer("scale", torch.full((4,), 2.0))
            elif self.how == "attribute":
                self.scale = torch.full((4,), 2.0)
            else:
                self.linear = nn.Linear(4, 4)
        return (self.linear(x) * getattr(self, "scale", 1.0)).sum()


@pytest.mark.parametrize("how", ["parameter", "buffer", "attribute", "module"])
def test_a_model_that_was_never_called_is_called_once(how):
    model, x = Lazily(how), torch.randn(2, 4)
    before = torch.get_rng_state()
    gm = sk.capture(model, x)
    assert torch.equal(torch.get_rng_state(), before)
    tensors = [t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    assert not any("Fake" in type(t).__name__ for t in (*tensors, *model.parameters(), *model.buffers()))
    sk.compare(model, gm, x).raise_if_different()
    joint = sk.capture_joint(Lazily(how), x)
    assert joint.run(x).gradients


def test_a_transformers_model_that_was_never_called_has_a_joint_graph():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_attention_heads": [1, 2], "num_encoder_blocks": 2}
    config = transformers.SegformerConfig(**sizes, decoder_hidden_size=16, num_labels=4)
    model = transformers.SegformerForSemanticSegmentation(config)
    inputs = {"pixel_values": torch.randn(1, 3, 32, 32), "labels": torch.randint(0, 4, (1, 32, 32))}
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    joint = sk.capture_joint(model, **inputs)
    assert all(torch.equal(b, buffers[name]) for name, b in model.named_buffers())
    assert joint.run(**inputs).loss.isfinite()


@pytest.mark.parametrize("how", ["export", "symbolic_trace"])
def test_lazy_modules_are_captured(how):
    model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.ReLU())
    x = torch.randn(4, 5)
    assert_same(model, sk.capture(model, x, how=how), x)
