"""Eager selective checkpointing by a plan: the gradients of eager mode, the saved ops, the predicted peak."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from campaigns import these_first
from torch import nn
from torch.utils.checkpoint import checkpoint

import splitkit as sk
from splitkit.errors import CaptureError, PlanError
from splitkit.policies import Budget, MinCut, Remat, SaveAll


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
        self.dropout = dropout

    def forward(self, x, scale=1.0):
        hidden = torch.nn.functional.gelu(self.wide(self.norm(x))).sin() * scale
        return x + torch.nn.functional.dropout(self.narrow(hidden), self.dropout)


class Net(nn.Module):
    def __init__(self, count=3, dropout=0.0, make=Block):
        super().__init__()
        self.blocks, self.context = nn.ModuleList(make(dropout) for _ in range(count)), None

    def forward(self, x):
        for block in self.blocks:
            given = {"use_reentrant": False, "context_fn": self.context}
            x = block(x) if self.context is None else checkpoint(block, x, **given)
        return x.square().mean()


X = torch.randn(64, 16)


def step(net):
    net.zero_grad()
    torch.manual_seed(1)
    net(X).backward()
    return [p.grad.clone() for p in net.parameters()]


def measured(net):
    net.zero_grad()
    return sk.measure_memory(lambda module, x: module(x).backward(), net, X).peak


@pytest.mark.parametrize(
    ("policy", "dropout"),
    these_first([("least", 0.2), (Remat(keep=["aten.addmm"]), 0.0)], [(0.5, 0.0), (SaveAll(), 0.2)]),
    ids=str,
)
def test_a_plan_of_one_layer_is_carried_out_in_all(policy, dropout):
    torch.manual_seed(0)
    net = Net(dropout=dropout)
    expected, without = step(net), measured(net)
    net.zero_grad()
    net.context = sk.checkpoint_context(net, policy, X, layers="blocks.*")
    assert net.context.layers == ("blocks.0", "blocks.1", "blocks.2")
    assert all(torch.equal(a, b) for a, b in zip(step(net), expected, strict=True))
    net.zero_grad()
    predicted = sk.dry_run(net, X)
    found = measured(net)
    assert predicted.peak == found
    if policy == "least":
        assert not net.context.saved and found < without


def test_each_op_is_saved_or_recomputed_as_planned():
    torch.manual_seed(0)
    net = Net(count=1)
    net.context = sk.checkpoint_context(net, Remat(keep=["aten.gelu", "aten.addmm"]), X, layers="blocks.*")
    saved = {str(net.context.ops[i]) for i in net.context.saved}
    assert saved == {"aten.gelu.default", "aten.addmm.default"}
    loss = net(X)
    ran = sk.measure_memory(loss.backward).ops
    # The second product is not an input of backward: it is not saved, and not reached again, since torch stops early.
    assert "aten.gelu.default" not in ran and ran.count("aten.sin.default") == 1
    assert "gelu" in str(net.context) and "1 layers of" in str(net.context)


class Repeated(Block):
    def forward(self, x, scale=1.0):
        return x + self.narrow(self.wide(x).sin() * self.wide(x).cos())


def test_of_equal_ops_the_first_is_saved():
    net = Net(count=1, make=Repeated)
    context = sk.checkpoint_context(net, Remat(keep=["aten.addmm"]), X, layers="blocks.*")
    products = [i for i, op in enumerate(context.ops) if op is torch.ops.aten.addmm.default]
    assert len(products) == 3 and context.saved == {products[0]}


def test_a_smaller_share_never_has_a_higher_peak():
    torch.manual_seed(0)
    net, peaks = Net(count=4), []
    for share in (0.0, 0.4, 1.0):
        net.context = sk.checkpoint_context(net, share, X, layers="blocks.*")
        peaks.append(sk.dry_run(net, X).peak)
        net.context = None
    assert peaks == sorted(peaks) and peaks[0] < peaks[-1]


class Inner(Block):
    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        self.norm = nn.Identity()

    def forward(self, x, scale=1.0):
        hidden = self.wide(x)
        hidden.mul_(2)  # the result of the product can no longer be saved
        return x + self.narrow(hidden.sin())


def test_what_is_written_to_later_is_not_saved_but_computed_again():
    net = Net(make=Inner)
    expected = step(net)
    net.context = sk.checkpoint_context(net, SaveAll(), X, layers="blocks.*")
    targets = [str(net.context.ops[i]) for i in sorted(net.context.saved)]
    assert "aten.mul_.Tensor" in map(str, net.context.ops) and "aten.mul_.Tensor" not in targets
    assert all(torch.equal(a, b) for a, b in zip(step(net), expected, strict=True))


class WritesAView(Block):
    """Writes a view, of which autograd makes a view again on fake tensors, and on those only."""

    def forward(self, x, scale=1.0):
        hidden = self.wide(self.norm(x)).unsqueeze(1).squeeze(1)
        hidden.add_(self.wide.bias)
        left, right = hidden.squeeze(0).chunk(2, -1)
        return x + self.narrow(torch.cat([left.sin(), right], -1))


@pytest.mark.parametrize("policy", these_first(["least"], [0.5]), ids=str)
def test_a_layer_may_write_a_view(policy):
    net = Net(make=WritesAView)
    expected = step(net)
    net.context = sk.checkpoint_context(net, policy, X, layers="blocks.*")
    assert net.context.replays and all(torch.equal(a, b) for a, b in zip(step(net), expected, strict=True))
    net.zero_grad()
    assert sk.dry_run(net, X).peak == measured(net)


class Deep(Block):
    def forward(self, x, scale=1.0):
        for _ in range(40):
            x = x + x.sin()
        return x


def test_a_layer_may_have_many_residual_branches():
    context = sk.checkpoint_context(Deep(), 0.5, X.clone().requires_grad_())
    assert len(context.ops) == 80


class Counting(Block):
    def __init__(self, dropout):
        super().__init__(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, scale=1.0):
        self.calls += 1
        return super().forward(x)


def test_what_checkpoints_cannot_do_is_refused():
    with pytest.raises(sk.errors.PlanError, match="SK307.*writes to an input, a parameter or a buffer"):
        sk.checkpoint_context(Net(make=Counting), 0.5, X, layers="blocks.*")
    mixed = Net()
    mixed.blocks[1] = Inner()
    with pytest.raises(sk.errors.PlanError, match=r"SK307.*blocks.0 and blocks.1 run different ops"):
        sk.checkpoint_context(mixed, 0.5, X, layers="blocks.*")
    with pytest.raises(sk.errors.PolicyError, match="SK304.*no module|SK304.*matches no module"):
        sk.checkpoint_context(Net(), 0.5, X, layers="block.*")
    with pytest.raises(sk.errors.PolicyError, match="SK302"):
        sk.checkpoint_context(Net(), "much", X, layers="blocks.*")
    with pytest.raises(sk.errors.PolicyError, match="SK301"):
        sk.checkpoint_context(Net(), None, X, layers="blocks.*")
    with pytest.raises(CaptureError, match="SK401"):
        sk.checkpoint_context(Net(), 0.5, torch.randn(8, 3), layers="blocks.*")
    with pytest.raises(CaptureError, match="SK401"):
        sk.dry_run(Net(), torch.randn(8, 3))
    with pytest.raises(CaptureError, match="SK401"):
        sk.dry_run(nn.Linear(16, 2), X)


def test_other_ops_than_planned_are_refused_in_forward():
    net = Net()
    net.context = sk.checkpoint_context(net, 0.5, X, layers="blocks.*")
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(sk.errors.PlanError, match="SK307.*was planned"):
        net(X)


def test_a_layer_alone_and_a_plan_of_bytes():
    block = Block()
    context = sk.checkpoint_context(block, Budget("1KiB", of="saved"), X.clone().requires_grad_(), scale=2.0)
    assert context.layers == ("",) and "(within 1.00 KiB)" in context.note


def test_a_model_of_transformers_as_it_is():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50)).train()
    ids = torch.randint(0, 50, (2, 24))
    batch = {"input_ids": ids, "labels": ids}

    def gradients():
        model.zero_grad()
        model(**batch).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    model.zero_grad()
    context = sk.checkpoint_context(model, 0.5, **batch)
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": context})
    predicted = sk.dry_run(model, **batch).peak
    found = sk.measure_memory(lambda m, **batch: m(**batch).loss.backward(), model, **batch).peak
    assert predicted == found and len(context.layers) == 2 and context.saved
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


class Strict(nn.Module):
    def forward(self, x):
        if x.shape[0] != 3:
            raise ValueError
        return x


@pytest.mark.parametrize("call", [partial(sk.dry_run, Strict()), partial(sk.checkpoint_context, Strict(), 0.5)])
def test_a_failure_without_a_message_is_named_by_its_type(call):
    with pytest.raises(CaptureError, match="SK401.*fake tensors of these inputs: ValueError"):
        call(torch.ones(2))


class Routed(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 3), nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        scores = self.router(x)
        chosen = nn.functional.one_hot(scores.argmax(-1), 3) * scores.sigmoid()
        return x + sum(chosen[:, i : i + 1] * expert(x).tanh() for i, expert in enumerate(self.experts))


@pytest.mark.parametrize("policy", ["least", Remat(keep=["aten.tanh"])], ids=str)
def test_ops_on_integers_may_look_at_their_values(policy):
    torch.manual_seed(0)
    net = Net(make=Routed)
    expected = step(net)
    net.context = sk.checkpoint_context(net, policy, X, layers="blocks.*")
    assert len(net.context.saved) == (0 if policy == "least" else 3)
    assert all(torch.equal(a, b) for a, b in zip(step(net), expected, strict=True))


def mixtral(experts, dtype=torch.float32):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=40, num_local_experts=4)
    model = MixtralForCausalLM._from_config(config, experts_implementation=experts, dtype=dtype).train()
    ids = torch.randint(0, 40, (2, 8))
    return model, {"input_ids": ids, "labels": ids, "use_cache": False}


def test_products_of_groups_run_on_fakes():
    model, batch = mixtral("grouped_mm")
    measured = sk.measure_memory(lambda m, **batch: m(**batch).loss.backward(), model, **batch).peak
    model.zero_grad()
    assert sk.dry_run(model, **batch).peak == measured


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_groups_are_planned(dtype):
    model, batch = mixtral("grouped_mm", dtype)

    def gradients():
        model.zero_grad()
        model(**batch).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = gradients()
    context = sk.checkpoint_context(model, 1.0, **batch)
    assert [str(context.ops[i]) for i in context.saved].count("aten._grouped_mm.default") == 2
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": context})
    assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


def test_a_remedy_for_experts_that_look_at_values_works():
    model, batch = mixtral("eager")
    for call, other in (
        (partial(sk.checkpoint_context, model, "least"), "apply"),
        (partial(sk.dry_run, model), "meas"),
    ):
        with pytest.raises(CaptureError, match=rf'SK401.*nonzero.*\n.*set_experts_implementation\("batch.*{other}'):
            call(**batch)
    model.set_experts_implementation("batched_mm")
    assert sk.dry_run(model, **batch).peak
    model, batch = Branching(), {"x": X}
    with pytest.raises(CaptureError, match=r"SK401.*needs values\n  Use splitkit.apply\(model, policy, \*\*batch\)"):
        sk.checkpoint_context(model, "least", **batch)
    with pytest.warns(UserWarning, match="graph breaks"):
        sk.apply(model, "least", **batch)(**batch).sum().backward()


@pytest.mark.campaign
def test_layers_of_transformers_that_differ_are_planned_one_by_one():
    model, batch = mixtral("batched_mm")
    model.model.layers[1].mlp = torch.nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    with pytest.raises(PlanError, match=r"SK307(.|\n)*layers='model\.layers\.1', \*\*batch\)"):
        sk.checkpoint_context(model, "least", **batch)
    found = [sk.checkpoint_context(model, "least", layers=f"model.layers.{i}", **batch) for i in range(2)]
    assert [context.layers for context in found] == [("model.layers.0",), ("model.layers.1",)]
    model(**batch).loss.backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": False})
    for layer, context in zip(model.model.layers, found, strict=True):
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=context)
    model(**batch).loss.backward()
    made = [p.grad for p in model.parameters()]
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(made, expected, strict=True))


class Branching(Block):
    def forward(self, x):
        x = self.wide(x)
        return x.sin() if x.sum() > 0 else x.cos()


class Overwriting(nn.Module):
    """A layer that overwrites what its gradient is computed from; eager mode has no cosine, which backward reads."""

    def __init__(self, dropout):
        super().__init__()
        self.a, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(self.a(x).exp_()).sin()


def test_what_eager_mode_does_not_save_is_computed_in_backward():
    """If all values weigh the same, the cosine alone would be the least to save."""
    net = Net(1, make=Overwriting)
    want = step(net)
    net.context = sk.checkpoint_context(net.blocks[0], MinCut(size=lambda node: 1.0), X)
    torch.testing.assert_close(step(net), want)
