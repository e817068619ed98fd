"""Remedies of captures that are refused (SK4xx): what they advise has the results and the gradients of the model."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from carried import Remedy, refusal
from torch import nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import splitkit as sk
from splitkit.graph.ops import declared as declarations
from splitkit.policies import SaveAll, Stages

X = torch.linspace(-1, 1, 16).view(4, 4)


def outcome(run, model):
    """The output of a run of a model and the gradients of its parameters."""
    torch.manual_seed(0)
    model.zero_grad()
    out = run()
    out = out["loss"] if isinstance(out, dict) else out
    if out.requires_grad:
        out.sum().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def alike(one, other):
    torch.testing.assert_close(one[0], other[0])
    assert one[1].keys() == other[1].keys()
    for name in one[1]:
        torch.testing.assert_close(one[1][name], other[1][name])
    return True


def captured(model, *inputs, like=None, **options):
    """Whether a capture of the model, in two stages, computes what the model (or another one) computes in eager."""
    inputs = inputs or (X,)
    plain = copy.deepcopy(model) if like is None else like
    plain.load_state_dict(model.state_dict())
    gm = sk.capture(model, *inputs, **options)
    split = sk.split(gm, Stages(2)).module  # its parts have the parameters of the graph
    return alike(outcome(lambda: split(*inputs), gm), outcome(lambda: plain(*inputs), plain))


def applied(model, *inputs, like=None):
    inputs = inputs or (X,)
    torch._dynamo.reset()
    plain = copy.deepcopy(model) if like is None else like
    plain.load_state_dict(model.state_dict())
    trained = sk.apply(model, SaveAll(), *inputs)
    return alike(outcome(lambda: trained(*inputs), model), outcome(lambda: plain(*inputs), plain))


def joint(model, *inputs, **options):
    inputs = inputs or (X,)
    plain = copy.deepcopy(model)
    found = sk.capture_joint(model, *inputs, **options).run(*inputs)
    loss = options.get("loss", lambda out: out["loss"] if isinstance(out, dict) else out)(plain(*inputs))
    loss.backward()
    torch.testing.assert_close(found.loss, loss.detach())
    for name, p in plain.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(found.gradients[name], p.grad)
    return True


def inference(program_of):
    """Whether the graph of an exported program has the outputs of the model."""
    gm = sk.capture(torch.export.export(program_of, (X,)))
    with torch.no_grad():
        return torch.allclose(gm(X), program_of(X))


class Net(nn.Module):
    """Two layers with ``body`` between them."""

    def __init__(self, body=torch.tanh, **tensors):
        super().__init__()
        self.a, self.b, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return self.b(self.body(self.a(x)))


class OfModule(Net):
    """``body`` is also given the model."""

    def forward(self, x):
        return self.b(self.body(self, self.a(x)))


class WithArguments(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3, None, None


class HoldsModule(Function):
    @staticmethod
    def forward(ctx, x, module):
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3, None


INNER = nn.Linear(4, 4).requires_grad_(False)


def without_grad(x):
    with torch.no_grad():
        return HoldsModule.apply(x, INNER)


def pushed(model, x):
    y = x * 2
    y.data = x * 3
    return y


def rebound(model, x):
    return x * 3


def written(model, x):
    model.state.data = model.state.data + 1
    return x * model.state


def copied(model, x):
    with torch.no_grad():
        model.state.copy_(model.state + 1)
    return x * model.state


def hooked(model, x):
    y = x * 2
    y.register_hook(lambda gradient: gradient * 3)
    return y


class TripledGradient(Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 6


def with_parameter_hook():
    model = Net()
    model.a.weight.register_hook(lambda gradient: gradient * 3)
    return model


def with_module_hook():
    model = Net()
    model.a.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] * 3 if inputs[0] is not None else None,)
    )
    return model


def seeded(x):
    torch.manual_seed(3)
    return x + torch.rand(4)


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, noise):
        return self.b(self.a(x) + noise)


def flagged(model, x):
    y = x.detach().requires_grad_(True)
    return y * 2


class ByInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.b(self.a(x)) + y * 2


def branches(x):
    return x * 2 if x.sum() > 0 else x * 3


def chosen(x):
    return torch.where(x.sum() > 0, x * 2, x * 3)


class Creates(nn.Module):
    """Makes a buffer at each call, or has it from the start."""

    def __init__(self, early):
        super().__init__()
        self.a, self.b, self.early = nn.Linear(4, 4), nn.Linear(4, 4), early
        if early:
            self.register_buffer("late", torch.ones(4))

    def forward(self, x):
        if not self.early:
            self.register_buffer(f"late{len(self._buffers)}", torch.ones(4))
        return self.b(self.a(x) + next(iter(self._buffers.values())))


class Rebinds(nn.Module):
    def __init__(self, in_place=False):
        super().__init__()
        self.a, self.b, self.in_place = nn.Linear(4, 4), nn.Linear(4, 4), in_place
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.a(x)
        mean = y.detach().mean(0)
        if self.in_place:
            self.mean.copy_(mean)
        else:
            self.mean = mean
        return self.b(y - self.mean).sum()


class Recurrent(nn.Module):
    def __init__(self, apart=False, dropout=0.5):
        super().__init__()
        self.a = nn.Linear(4, 4)
        if apart:
            self.rnn = nn.ModuleList([nn.LSTM(4, 4), nn.LSTM(4, 4)])
            self.drop = nn.Dropout(dropout)
        else:
            self.rnn = nn.LSTM(4, 4, 2, dropout=dropout)

    def forward(self, x):
        x = self.a(x)
        if isinstance(self.rnn, nn.ModuleList):
            return self.rnn[1](self.drop(self.rnn[0](x)[0]))[0].sum()
        return self.rnn(x)[0].sum()


class OwnLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, output):
        return self.head(output).sum()


class WithLoss(nn.Module):
    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x):
        return self.loss(self.model(x))


class Summed(Net):
    def forward(self, x):
        return super().forward(x).sum()


class ReturnsLoss(Net):
    def forward(self, x):
        return {"loss": super().forward(x).sum()}


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x, y):
        x.add_(1)
        return (self.a(x) * y).sum()


SIMPLE = [
    # ------------------------------------------------------------ SK401
    Remedy(
        "SK401", "Choose one of {...}.", lambda: captured(Net(), how="guess"), lambda: captured(Net(), how="export")
    ),
    Remedy(
        "SK401",
        "Leave out how= and dynamic=, or training=.",
        lambda: sk.capture(Net(), X, training=True, dynamic=True),
        (lambda: joint(Net(), loss=torch.sum), lambda: captured(Net(), dynamic=True)),
    ),
    Remedy(
        "SK401",
        "Give a torch.nn.Module; wrap a function in one.",
        lambda: sk.capture(torch.tanh, X),
        lambda: captured(Net(torch.tanh)),
    ),
    Remedy(
        "SK401",
        "Give the module that was scripted or traced, before torch.jit.script or torch.jit.trace.",
        lambda: sk.capture(torch.jit.trace(Net(), X), X),
        lambda: captured(Net()),
    ),
    Remedy(
        "SK401",
        "Give example inputs that model(...) accepts.",
        lambda: sk.capture_joint(Net(), torch.ones(3, 7), loss=torch.sum),
        lambda: captured(Net()),
    ),
    Remedy("SK401", "Create them in __init__.", lambda: captured(Creates(False)), lambda: captured(Creates(True))),
    Remedy(
        "SK401",
        "Make that tensor an input or a parameter. To run the graph without gradients, capture "
        "torch.export.export(model, args, kwargs).",
        lambda: captured(OfModule(flagged)),
        (
            lambda: captured(ByInput(), X, torch.ones(4, 4, requires_grad=True)),
            lambda: inference(OfModule(flagged)),
        ),
    ),
    Remedy(
        "SK401",
        "Write to it in place: self.mean.copy_(...). splitkit.apply and splitkit.backend accept the model.",
        lambda: sk.capture_joint(Rebinds(), X),
        (lambda: joint(Rebinds(in_place=True)), lambda: applied(Rebinds())),
    ),
    Remedy(
        "SK401",
        "Set its dropout to 0, or write one module per layer with torch.nn.Dropout between them.",
        lambda: joint(Recurrent()),
        (lambda: joint(Recurrent(dropout=0.0)), lambda: sk.capture_joint(Recurrent(apart=True), X).run(X).loss),
    ),
    Remedy(
        "SK401",
        "Make the loss a submodule of the model.",
        lambda: sk.capture_joint(Net(), X, loss=OwnLoss()),
        lambda: joint(WithLoss(Net(), OwnLoss())),
    ),
    Remedy(
        "SK401",
        "Give one: capture_joint(model, ..., {...}) or --loss cross_entropy; or return it as `loss`.",
        lambda: joint(Net()),
        (lambda: joint(Net(), loss=torch.sum), lambda: joint(ReturnsLoss())),
    ),
    Remedy(
        "SK401",
        "Use capture_joint(..., loss=lambda output: ...) with a function that returns a real scalar tensor.",
        lambda: joint(Net(), loss=lambda output: output),
        lambda: joint(Net(), loss=lambda output: output.sum()),
    ),
    Remedy(
        "SK401",
        "Call requires_grad_(), or give a loss that depends on the parameters.",
        lambda: sk.capture_joint(Summed().requires_grad_(False), X, loss=lambda output: output),
        (lambda: joint(Summed().requires_grad_(False).requires_grad_()), lambda: joint(Summed())),
    ),
    # ------------------------------------------------------------ SK404, SK405: gradients that would be lost
    Remedy(
        "SK404",
        "Give apply every tensor that it needs as an argument of its own; splitkit.capture_joint and splitkit.apply "
        "accept the model as it is; for inference only, call it under torch.no_grad() in the model, or capture "
        "torch.export.export(model, args, kwargs), which has no such backward.",
        lambda: captured(Net(lambda x: HoldsModule.apply(x, INNER))),
        (
            lambda: captured(Net(lambda x: WithArguments.apply(x, INNER.weight, INNER.bias))),
            lambda: joint(Net(lambda x: HoldsModule.apply(x, INNER)), loss=torch.sum),
            lambda: applied(Net(lambda x: HoldsModule.apply(x, INNER))),
            lambda: captured(Net(without_grad)),
            lambda: inference(Net(lambda x: HoldsModule.apply(x, INNER))),
        ),
    ),
    Remedy(
        "SK404",
        "Give the model itself: splitkit.capture(model, *inputs). For inference only, call "
        "model.requires_grad_(False) before the export.",
        lambda: sk.capture(torch.export.export(Net(TripledGradient.apply), (X,), strict=True)),
        (
            lambda: captured(Net(lambda x: TripledGradient.apply(x))),
            lambda: sk.capture(
                torch.export.export(Net(TripledGradient.apply).requires_grad_(False), (X,), strict=True)
            ),
        ),
    ),
    Remedy(
        "SK405",
        "Remove the hook before the capture and hook a parameter instead (parameters keep their hooks), or write it as "
        "a torch.autograd.Function; {...} the model as it is.",
        lambda: captured(OfModule(hooked)),
        (
            lambda: captured(with_parameter_hook(), like=with_parameter_hook()),
            lambda: captured(Net(lambda x: TripledGradient.apply(x))),
            lambda: joint(OfModule(hooked), loss=torch.sum),
            lambda: applied(OfModule(hooked)),
        ),
    ),
    Remedy(
        "SK405",
        "Remove the hook before the capture and hook a parameter instead (parameters keep their hooks), or write it as "
        "a torch.autograd.Function; {...} the model as it is.",
        lambda: captured(with_module_hook()),
        lambda: applied(with_module_hook(), like=with_module_hook()),
    ),
    # ------------------------------------------------------------ SK410: effects that would be lost
    Remedy(
        "SK410",
        "Rebind the name (z = y instead of z.data = y); to change a parameter, buffer or input in place, write "
        "p.copy_(y) under torch.no_grad().",
        lambda: captured(OfModule(pushed)),
        (lambda: captured(OfModule(rebound)), lambda: captured(OfModule(copied, state=torch.ones(4)))),
    ),
    Remedy(
        "SK410",
        "Seed before the model is called, or make the random numbers an input.",
        lambda: captured(Net(seeded)),
        (lambda: captured(Net(lambda x: x + torch.rand(4))), lambda: captured(Random(), X, torch.rand(4))),
    ),
]


@pytest.mark.parametrize("remedy", SIMPLE, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy):
    remedy.carry_out()


def test_a_branch_on_the_data():
    told = (
        "Write the choice with torch.cond or torch.where; state bounds of a size with torch._check; or compute it "
        "outside the model and pass it in."
    )
    with refusal(
        "SK401",
        "Write the choice with torch.cond or torch.where; state bounds of a size with torch._check; or compute it "
        "outside the model and pass it in.",
    ) as error:
        captured(Net(branches))
    assert error.value.remedy == f"{told} {TRAIN_AS_IT_IS}"
    assert captured(Scaled(), X, torch.tensor(2.0))  # computed outside
    assert captured(Net(chosen)) and applied(Net(branches))
    model = Net(branches)
    torch._dynamo.reset()
    plain, compiled = copy.deepcopy(model), torch.compile(model, backend=sk.backend(SaveAll()))
    assert alike(outcome(lambda: compiled(X), model), outcome(lambda: plain(X), plain))


def test_autocast_around_a_capture():
    def traced():
        with torch.autocast("cpu", torch.bfloat16):
            return sk.capture(Net(), X, how="symbolic_trace")

    with refusal("SK401", 'Use how="export", which records it, or leave the block.'):
        traced()
    with torch.autocast("cpu", torch.bfloat16):
        model = Net()
        gm, want = sk.capture(model, X, how="export"), model(X)
    assert torch.equal(gm(X), want)
    assert captured(Net(), how="symbolic_trace")


class InAutocast(nn.Module):
    """A model in whose forward the autocast is entered."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(x).float().sum()


@pytest.mark.parametrize("plans", [joint, lambda model, x=X: sk.checkpoint_context(model, 0.5, x)])
def test_autocast_around_a_training_step(plans):
    with (
        torch.autocast("cpu", torch.bfloat16),
        refusal("SK401", "Enter it in the model's forward instead."),
    ):
        plans(Net())
    model = InAutocast(Net())
    context = plans(model)
    if context is not True:
        assert any("bfloat16" in str(op) or "_to_copy" in str(op) for op in context.ops)
        plain = copy.deepcopy(model)
        saving = partial(checkpoint, model, X, use_reentrant=False, context_fn=context)
        assert alike(outcome(saving, model), outcome(lambda: plain(X), plain))


def test_hooks_that_symbolic_trace_loses():
    with refusal("SK401", 'Use how="export".'):
        sk.capture(nn.utils.spectral_norm(nn.Linear(4, 4)), X, how="symbolic_trace")
    assert captured(nn.utils.spectral_norm(nn.Linear(4, 4)).eval(), how="export")


def test_a_write_that_symbolic_trace_loses():
    with refusal("SK401", 'Use how="export", or make the module that does it a leaf of your own tracer.'):
        sk.capture(Rebinds(), X, how="symbolic_trace")
    assert captured(Rebinds(), how="export")


def test_inputs_that_share_memory():
    both = X.clone()
    with refusal("SK401", "Give inputs that do not share memory, or train it with splitkit.apply or splitkit.backend."):
        sk.capture_joint(Writes(), both, both)
    model, x, y = Writes(), X.clone(), X.clone()
    found, want = sk.capture_joint(model, x, y).run(X.clone(), X.clone()).loss, model(X.clone(), X.clone())
    torch.testing.assert_close(found, want.detach())
    torch._dynamo.reset()
    plain, trained = copy.deepcopy(model), sk.apply(model, SaveAll(), both, both)
    one, other = X.clone(), X.clone()
    torch.testing.assert_close(trained(one, one), plain(other, other))


def test_checkpoints_are_no_hooks_of_the_user():
    assert captured(Net(lambda x: checkpoint(torch.tanh, x, use_reentrant=False)))


class WritesWeight(nn.Module):
    """Writes a weight between two uses inside an autocast, which keeps the cast of the old one."""

    def __init__(self, leaves=False, cached=True):
        super().__init__()
        self.layer, self.leaves, self.cached = nn.Linear(4, 4), leaves, cached

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cached):
            y = self.layer(x)
            if not self.leaves:
                self.update()
                y = self.layer(y)
        if self.leaves:
            self.update()
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=self.cached):
                y = self.layer(y)
        return y.float()

    def update(self):
        with torch.no_grad():
            self.layer.weight.mul_(3)


def test_a_weight_that_is_written_while_its_cast_is_kept():
    with refusal("SK401", "Leave the autocast before the weight is written, and enter it again."):
        sk.capture(WritesWeight(), X)
    model = WritesWeight(leaves=True)
    plain = copy.deepcopy(model)
    gm = sk.capture(model, X)
    with torch.no_grad():
        assert torch.equal(gm(X), plain(X))


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).chunk(2, 1)


class WithHalves(nn.Module):
    def __init__(self):
        super().__init__()
        self.halves, self.last = Halves(), nn.Linear(2, 2)

    def forward(self, x):
        one, two = self.halves(x)
        return self.last(one) + two


def test_a_hook_on_a_module_with_several_outputs():
    split, seen = sk.split(sk.capture(WithHalves(), X), Stages(2)), []
    with refusal("SK221", "Put the hook on a module in it, or around it, that has one output."):
        split.register_forward_hook("halves", seen.append)
    split.register_forward_hook("halves.linear", seen.append)
    split(X)
    assert seen[0].shape == (4, 4)


def test_a_hook_that_takes_what_hooks_of_modules_take():
    split, seen = sk.split(sk.capture(WithHalves(), X), Stages(2)), []
    with refusal("SK221", "Give a function of the output, and not of (module, args, output): lambda output: ..."):
        split.register_forward_hook("last", lambda module, args, output: seen.append(output))
    split.register_forward_hook("last", lambda output: seen.append(output))
    split.register_forward_hook("last", torch.sin)  # whose arguments nothing tells
    split(X)
    assert len(seen) == 1 and seen[0].shape == (4, 2)


def test_a_weight_that_is_computed_at_each_read():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    called = graph.call_module("0", (x,))
    graph.output(graph.call_function(torch.mm, (called, graph.get_attr("0.weight"))))
    gm, where = torch.fx.GraphModule(model, graph), {"_0": 0, "mm": 1}
    with refusal(
        "SK104", "Capture the model again, which puts the computation into the graph: splitkit.capture(gm, *inputs)."
    ):
        sk.split(gm, where)
    again = sk.capture(gm, X)
    assert torch.allclose(sk.split(again, Stages(2))(X), gm(X))
    want = gm(X)
    nn.utils.parametrize.remove_parametrizations(gm.get_submodule("0"), "weight")
    assert torch.allclose(sk.split(gm, where)(X), want)


def test_tensors_of_a_subclass():
    from torch.testing._internal.two_tensor import TwoTensor

    def doubled():
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        model.weight = nn.Parameter(TwoTensor(torch.randn(4, 4), torch.randn(4, 4)))
        return model

    def trained(model, run):
        out = run(X)
        out.square().sum().backward()
        return [half for value in (out, model.weight.grad) for half in (value.a, value.b)]

    with refusal("SK401", "Train it with splitkit.apply or splitkit.backend, which put them back together."):
        sk.capture_joint(doubled(), X, loss=torch.sum)
    want = trained(plain := doubled(), plain)
    for run in (lambda m: sk.apply(m, SaveAll(), X), lambda m: torch.compile(m, backend=sk.backend(SaveAll()))):
        torch._dynamo.reset()
        torch.testing.assert_close(trained(model := doubled(), run(model)), want)


COUNTED = []


@torch.library.custom_op("splitkit_remedies::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    COUNTED.append(len(x))
    return x.clone()


@torch.library.custom_op("splitkit_remedies::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def test_an_effect_that_a_schema_hides(monkeypatch):
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    counted.register_fake(torch.empty_like)
    counted.register_autograd(lambda ctx, gradient: gradient)
    _register_effectful_op(torch.ops.splitkit_remedies.counted.default, _EffectType.ORDERED)

    def step(x):
        return torch.tanh(counted(x))

    with refusal(
        "SK410",
        "Train the model with splitkit.apply or splitkit.backend, or tell splitkit: "
        "splitkit.extend.declare(torch.ops.{...}, impure=True).",
    ) as error:
        joint(Net(step), loss=torch.sum)
    for run in (lambda m: sk.apply(m, "least", X), lambda m: torch.compile(m, backend=sk.backend("least"))):
        torch._dynamo.reset()
        model = Net(step)
        plain, trained = copy.deepcopy(model), run(model)
        COUNTED.clear()
        assert alike(outcome(lambda: trained(X), model), outcome(lambda: plain(X), plain)) and len(COUNTED) == 2
    monkeypatch.setattr(declarations, "_DECLARED", {**declarations._DECLARED})
    eval(error.value.remedy.rpartition("tell splitkit: ")[2].rstrip("."), {"splitkit": sk, "torch": torch})
    COUNTED.clear()
    assert joint(Net(step), loss=torch.sum) and len(COUNTED) == 2


def dry(model, x=X, **options):
    """Whether a dry run measures what a real step holds, and a layer that saves as planned trains as eager does."""
    plain = copy.deepcopy(model)
    assert sk.dry_run(model, x, loss=torch.sum, **options).peak == stepped(plain, x)
    context = sk.checkpoint_context(model, 0.5, x)
    saving = partial(checkpoint, model, x, use_reentrant=False, context_fn=context)
    return alike(outcome(saving, model), outcome(lambda: plain(x), plain))


def stepped(model, x=X):
    """The peak of a real step."""
    return sk.measure_memory(lambda m, given: m(given).sum().backward(), model, x).peak


class Held:
    """Calls an op, which no copy can be made of; or of which it is its own copy."""

    def __init__(self, copied=True):
        self.op = tripled
        if copied:
            self.__class__ = OwnCopy

    def __call__(self, x):
        return self.op(x)


class OwnCopy(Held):
    def __deepcopy__(self, memo):
        return self


def test_runs_on_fake_tensors():
    tripled.register_autograd(lambda ctx, gradient: gradient * 3)
    for model, x in ((Net(), torch.ones(4, 3)), (Net(Held()), X), (Net(Held(False)), X)):
        for plans in (sk.dry_run, lambda *given, **_: sk.checkpoint_context(given[0], 0.5, given[1])):
            with refusal(
                "SK401",
                "Give inputs that the model accepts; register fake kernels for custom ops; let copy.deepcopy copy it.",
            ):
                plans(model, x, loss=torch.sum)
    tripled.register_fake(torch.empty_like)
    assert dry(Net()) and dry(Net(Held()))


def test_runs_that_need_values():
    with refusal("SK401", "{...}{...}.") as error:
        sk.dry_run(Net(branches), X, loss=torch.sum)
    assert error.value.remedy == "Use splitkit.measure_memory, which runs the step."
    assert stepped(Net(branches)) == stepped(Net(lambda x: x * 3))
    with refusal("SK401", "{...}{...}.") as error:
        sk.checkpoint_context(Net(branches), 0.5, X)
    assert error.value.remedy == "Use splitkit.apply(model, policy, **batch), which looks at real values."
    assert applied(Net(branches))


def test_experts_that_look_at_their_tokens():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MixtralConfig(**sizes, vocab_size=32, num_key_value_heads=2, num_local_experts=2)
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    ids = torch.zeros(1, 4, dtype=torch.long)
    with refusal("SK401", "{...}{...}.") as error:
        sk.dry_run(model, input_ids=ids, labels=ids)
    first, use = error.value.remedy.split(" first. Or ")
    assert use == "use splitkit.measure_memory, which runs the step."
    eval(first.removeprefix("Call "), {"model": model})
    found = sk.dry_run(model, input_ids=ids, labels=ids)
    assert found.peak == sk.measure_memory(lambda m: m(input_ids=ids, labels=ids).loss.backward(), model).peak


class Scaled(Net):
    """Reads a factor of an object, or a number."""

    def forward(self, x, by):
        return self.b(self.a(x)) * getattr(by, "scale", by)


class Scale:
    scale = 2.0


class Registered(Scale):
    pass


@pytest.mark.parametrize("of", [captured, joint])
def test_an_input_that_torch_does_not_know(of):
    """The hints of `splitkit.frontends.capture.capture_errors`, for both tracers."""
    given = {"loss": torch.sum} if of is joint else {}
    with refusal(
        "SK401", "Pass tensors, numbers, or tuples and dicts of them; register other types with torch.utils._pytree."
    ):
        of(Scaled(), X, Scale(), **given)
    torch.utils._pytree.register_pytree_node(
        Registered, lambda _: ([], None), lambda *_: Registered(), flatten_with_keys_fn=lambda _: ([], None)
    )
    try:
        assert of(Scaled(), X, Registered(), **given) and of(Scaled(), X, 2.0, **given)
        assert of(Scaled(), X, torch.tensor(2.0), **given)
    finally:
        torch.utils._pytree._deregister_pytree_node(Registered)


class Reads(Net):
    """Reads a value while it is traced, in a way that neither tracer can follow."""

    def __init__(self, computed=False):
        super().__init__()
        self.computed = computed

    def forward(self, x):
        y = self.a(x)
        scale = y.sum().abs() if self.computed else abs(float(y.sum()))
        return self.b(y) * scale


TRAIN_AS_IT_IS = (
    "To train it as it is, use splitkit.apply(model, policy, *inputs) or torch.compile with splitkit.backend(policy), "
    "which also accept models with graph breaks."
)


class Strays(Net):
    """Does something that no tracer follows, if it is told so."""

    def __init__(self, when=lambda model, x: True):
        super().__init__()
        self.when, self.known = when, 1.0

    def forward(self, x, attention_mask=None):
        y = self.a(x if attention_mask is None else x * attention_mask)
        if self.when(self, y):
            y.untyped_storage().data_ptr()
        return self.b(y) * self.known


def test_what_no_tracer_follows_is_trained_as_it_is():
    with refusal(
        "SK401",
        "To train it as it is, use splitkit.apply(model, policy, *inputs) or torch.compile with "
        "splitkit.backend(policy), which also accept models with graph breaks.",
    ):
        captured(Strays())
    assert applied(Strays())
    with refusal("SK401", "TORCH_LOGS=graph_breaks shows details."):
        sk.capture_joint(Strays(), X, loss=torch.sum)
    with refusal("SK401", "Leave out fullgraph=True: a model may have graph breaks."):
        sk.apply(Strays(), SaveAll(), X, fullgraph=True)


class OnlyWithoutGradients(Net):
    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            raise NotImplementedError("there is no backward")
        return y


def keyed(x):
    return x * {4: 2.0}[x.shape[0]]


def test_remedies_of_captures_that_were_tried():
    """Each is said where the capture that it advises succeeded."""
    drops = Strays(lambda model, _: model.training)
    with refusal("SK401", "Call model.eval() first: in eval mode the model is captured."):
        captured(drops)
    assert captured(drops.eval())
    with refusal("SK401", "Capture with dynamic=False."):
        captured(Net(keyed), dynamic=True)
    assert captured(Net(keyed), dynamic=False)
    with refusal("SK401", "{...} It runs without gradients: call model.requires_grad_(False) first."):
        captured(OnlyWithoutGradients())
    assert captured(OnlyWithoutGradients().requires_grad_(False))
    with refusal("SK401", "{...} {...}.") as error:
        captured(Net(), X[:, :3])
    assert error.value.remedy.startswith("Called without capture, the model raises RuntimeError: ")
    given = {"input_ids": X}
    masked = MasksItself()
    with refusal("SK401", "Pass attention_mask, too: torch.ones_like(input_ids) if nothing is padding."):
        sk.capture(masked, **given)
    given |= {"attention_mask": torch.ones_like(X)}
    assert torch.equal(sk.capture(masked, **given)(**given), masked(input_ids=X))


class MasksItself(nn.Linear):
    """As LongT5, which torch.export does not let make a mask."""

    def __init__(self):
        super().__init__(4, 4)

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None and not torch.compiler.is_compiling():
            attention_mask = torch.ones_like(input_ids)
        return super().forward(input_ids * attention_mask)


def test_an_input_keeps_no_marks_of_a_capture_that_failed():
    """torch.export marks sizes that may vary on the tensors themselves, and leaves the marks if it fails."""
    x = X.clone()
    with pytest.raises(sk.errors.CaptureError):
        sk.capture(Net(keyed), x, dynamic=True)
    assert not x.__dict__ and sk.capture(Net(keyed), x)


def test_a_model_on_meta_that_needs_a_call():
    def reads(model, y):
        if model.known == 1.0:
            model.known = float(y.detach().numpy().shape[0])
        return False

    with refusal(
        "SK401",
        "Call the model once on real inputs, before it is moved to meta or fake tensors; a capture on real inputs says "
        "what else helps.",
    ):
        sk.capture(Strays(reads).to("meta"), X.to("meta"))
    model = Strays(reads)
    model(X)
    gm = sk.capture(copy.deepcopy(model).to("meta"), X.to("meta"))
    gm.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(gm(X), model(X))
    with refusal(
        "SK401",
        "Write the choice with torch.cond or torch.where; state bounds of a size with torch._check; or compute it "
        "outside the model and pass it in.",
    ):
        sk.capture(Net(branches).to("meta"), X.to("meta"))
    assert sk.capture(Net(chosen).to("meta"), X.to("meta"))


class Scripted(Net):
    def __init__(self, script):
        super().__init__()
        self.part = torch.jit.script(nn.Linear(4, 4)) if script else nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.part(x))


def test_a_part_that_was_scripted():
    with refusal("SK401", "Its part {...} is TorchScript: give the module that was scripted.") as error:
        sk.capture(Scripted(True), X)
    assert "Its part part is" in error.value.remedy
    assert captured(Scripted(False))


class Result:
    """What cannot be taken apart, unless it is told so."""

    def __init__(self, value):
        self.value = value

    def __reduce_ex__(self, protocol):
        raise TypeError("no copy")


class OpenResult(Result):
    def __reduce_ex__(self, protocol):
        return object.__reduce_ex__(self, protocol)


class Returns(Net):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, x):
        return self.result(super().forward(x))


def test_outputs_that_are_no_tensors():
    with refusal(
        "SK401", "Return tensors, tuples and dicts of them, or objects that pickle can take apart (__reduce_ex__)."
    ):
        sk.capture(Returns(Result), X)
    for result in (lambda value: value, lambda value: (value,), lambda value: {"value": value}, OpenResult):
        model = Returns(result)
        one, other = (run(X) for run in (sk.capture(model, X), model))
        one, other = (next(iter(out.values())) if isinstance(out, dict) else out for out in (one, other))
        one, other = (out[0] if isinstance(out, tuple) else getattr(out, "value", out) for out in (one, other))
        assert torch.equal(one, other)


def test_an_input_whose_data_is_assigned():
    with refusal(
        "SK401",
        "Rebind the name (z = y instead of z.data = y); to change a parameter, buffer or input in place, write "
        "p.copy_(y) under torch.no_grad().",
    ):
        joint(AssignsInput(), X.clone(), loss=torch.sum)
    assert joint(AssignsInput("rebind"), X.clone(), loss=torch.sum)
    assert joint(AssignsInput("copy"), X.clone(), loss=torch.sum)


class AssignsInput(Net):
    def __init__(self, how="data"):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == "data":
            x.data = x * 2
        elif self.how == "copy":
            with torch.no_grad():
                x.copy_(x * 2)
        else:
            x = x * 2
        return super().forward(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_packed_weights():
    from torch.ao import quantization as ao

    dynamic = ao.quantize_dynamic(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), {nn.Linear}, dtype=torch.qint8)
    with refusal("SK401", 'Use how="symbolic_trace", which keeps quantized modules whole; or {...}.'):
        sk.capture(dynamic, X)
    assert torch.equal(sk.capture(dynamic, X, how="symbolic_trace")(X), dynamic(X))
    with refusal(
        "SK401",
        "Packed weights have no gradient: capture the float model, or for quantization-aware training the result of "
        "prepare_qat, and convert it after training.",
    ):
        sk.capture_joint(dynamic, X, loss=torch.sum)
    engine = torch.backends.quantized.engine
    model = nn.Sequential(ao.QuantStub(), nn.Linear(4, 4), nn.ReLU(), ao.DeQuantStub()).train()
    assert joint(model, loss=torch.sum)
    model.qconfig = ao.get_default_qat_qconfig(engine)
    prepared = ao.prepare_qat(model)
    assert sk.capture_joint(prepared, X, loss=torch.sum).run(X).gradients
    static = ao.convert(prepared.eval())
    with refusal(
        "SK401",
        "Split torch.fx.symbolic_trace(model), which keeps quantized modules whole, by a policy that needs no sizes, "
        "such as splitkit.policies.ByName; or {...}.",
    ):
        sk.capture(static, X)
    split = sk.split(torch.fx.symbolic_trace(static), sk.policies.ByName({"1": 0, "2": 1}))
    assert torch.equal(split(X), static(X))


def test_a_value_that_python_reads():
    with refusal("SK401", "Compute it with operations of torch, or outside the model and pass it in."):
        captured(Reads(), how="symbolic_trace")
    assert captured(Reads(computed=True), how="symbolic_trace") and captured(Scaled(), X, torch.tensor(2.0))
