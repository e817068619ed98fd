"""Joint graphs: what is captured runs like eager, its signature says what is what, and every half is sound."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from campaigns import these_first
from jointmodels import (
    MODELS,
    Checkpointed,
    Conv,
    assert_steps_alike,
    captured,
    eager,
    example,
    ran,
)
from smallnets import loss_or_sum
from torch import nn
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from splitkit.errors import CaptureError, CycleError, GraphError, PlanError, PolicyError
from splitkit.frontends.joint_capture import capture, capture_joint
from splitkit.policies import RecomputeAll, Remat, RoundRobin, SaveAll
from splitkit.training.flow import BACKWARD, FORWARD, save_all_plan, unrepeatable

CAPTURED = ["gpt2", "llama", "t5", "conv"]
"""Those that the other tests of this file capture as well."""


@pytest.fixture(scope="module", name="captured")
def _captured():
    return captured


@pytest.mark.parametrize("name", these_first(["gpt2", "conv"], [n for n in MODELS if n not in ("gpt2", "conv")]))
def test_a_joint_graph_runs_like_eager(captured, name):
    joint, args, kwargs, expected = captured(name)
    torch.manual_seed(0)
    assert_steps_alike(joint.run(*args, **kwargs), expected)


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
@pytest.mark.parametrize("name", ["gpt2", "conv"])
def test_halves_of_torchs_partitioners_run_like_eager_and_leave_the_joint_graph(captured, name, partition):
    joint, args, kwargs, expected = captured(name)
    before = [(n.name, n.meta.get("recompute")) for n in joint.graph_module.graph.nodes]
    assert_steps_alike(ran(joint, joint.partition(partition), args, kwargs), expected)
    assert [(n.name, n.meta.get("recompute")) for n in joint.graph_module.graph.nodes] == before


@pytest.mark.parametrize("name", these_first(["gpt2", "conv"], [n for n in MODELS if n not in ("gpt2", "conv")]))
def test_every_node_has_a_value_and_a_module(captured, name):
    joint, *_ = captured(name)
    modules = dict(joint.model.named_modules())
    computed = 0
    for node in joint.graph_module.graph.nodes:
        assert node.op == "output" or "val" in node.meta, node
        if node.op != "call_function":
            continue
        backward = node.meta["partitioner_tag"] == "is_backward"
        stack = node.meta.get("fwd_nn_module_stack" if backward else "nn_module_stack")
        paths = [path.removeprefix("L['self']").lstrip(".") for path, _ in (stack or {}).values()]
        assert all(path in modules for path in paths), (node, paths)
        computed += bool(paths and paths[-1])
    total = len(joint.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default))
    assert computed > total


def test_gradients_of_a_block_belong_to_it(captured):
    joint, *_ = captured("gpt2")
    owners = {}
    for node in joint.graph_module.graph.nodes:
        stack = node.meta.get("fwd_nn_module_stack")
        if node.target is torch.ops.aten.native_layer_norm_backward.default:
            owners[node] = list(stack.values())[-1][0]
    assert sorted(path.removeprefix("L['self'].") for path in owners.values()) == [
        "transformer.h.0.ln_1",
        "transformer.h.0.ln_2",
        "transformer.h.1.ln_1",
        "transformer.h.1.ln_2",
        "transformer.ln_f",
    ]


def test_the_signature_of_a_model_with_buffers():
    model = Conv()
    joint = capture_joint(model, torch.randn(2, 3, 8, 8, requires_grad=True), loss=loss_or_sum)
    signature = joint.signature
    outputs = joint.graph_module.graph.output_node().args[0]
    assert set(signature.parameters.values()) == {n for n, _ in model.named_parameters()}
    assert {signature.buffers[n] for n in signature.updates.values()} == {n for n, _ in model.named_buffers()}
    assert list(signature.inputs.values()) == [0]
    assert outputs[signature.loss].meta["val"].shape == ()
    assert list(signature.tangents.values()) == [signature.loss]
    assert signature.forward_outputs == 4
    assert set(signature.gradients.values()) == {*signature.parameters, *signature.inputs}
    for i, name in signature.gradients.items():
        by_name = {n.name: n for n in joint.graph_module.graph.nodes}
        assert i >= signature.forward_outputs and outputs[i].meta["val"].shape == by_name[name].meta["val"].shape


def test_tied_weights_are_one_parameter(captured):
    joint, *_ = captured("gpt2")
    assert "lm_head.weight" not in joint.signature.parameters.values()
    assert list(joint.signature.parameters.values()).count("transformer.wte.weight") == 2  # one of them is not read


def test_capture_leaves_model_and_random_state_alone():
    model, args, kwargs = example("conv")
    state, seed = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    capture_joint(model, *args, **kwargs, loss=loss_or_sum).split(SaveAll())
    assert torch.equal(torch.get_rng_state(), seed)
    assert all(torch.equal(state[n], v) for n, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert list(dict(model.named_modules())) == list(dict(Conv().named_modules()))


def test_a_loss_of_ones_own_and_gradients_of_inputs():
    model, x = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    joint = capture_joint(model, x, loss=lambda output: (output**2).mean())
    expected = torch.autograd.grad((model(x) ** 2).mean(), [x, model.weight, model.bias])
    found = joint.run(x).gradients
    for name, gradient in zip(["input 0", "weight", "bias"], expected, strict=True):
        torch.testing.assert_close(found[name], gradient)


def test_the_loss_of_a_view():
    joint = capture_joint(nn.Linear(3, 1), torch.randn(1, 3), loss=lambda output: output.view(()))
    assert joint.run(torch.ones(1, 3)).loss.shape == ()


def test_inputs_in_a_tree_and_by_keyword():
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, pair, scale=1, *, more):
            return (pair["a"] * self.w + pair["b"] * scale).sin() * more[1]

    model, pair, more = Tree(), {"a": torch.randn(3), "b": torch.randn(3)}, [torch.randn(3), torch.randn(3)]
    joint = capture_joint(model, pair, 2, more=more, loss=loss_or_sum)
    step = joint.run(pair, 2, more=more)
    expected = model(pair, 2, more=more).sum()
    assert torch.equal(step.loss, expected)
    torch.testing.assert_close(step.gradients["w"], *torch.autograd.grad(expected, [model.w]))


def test_a_captured_graph_is_a_model_too(captured):

    joint, args, kwargs, expected = captured("gpt2")
    again = capture_joint(capture(joint.model, *args, **kwargs), *args, **kwargs, loss=loss_or_sum)
    torch.manual_seed(0)
    assert_steps_alike(again.run(*args, **kwargs), expected)
    paths = {list(s.values())[-1][0] for n in again.graph_module.graph.nodes if (s := n.meta.get("nn_module_stack"))}
    assert "transformer.h.0.attn" in paths


def test_tensor_subclasses_are_refused():
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(TwoTensor(torch.randn(2, 3), torch.randn(2, 3)))
    with pytest.raises(CaptureError, match="SK401.*subclass"):
        capture_joint(model, torch.randn(4, 3), loss=loss_or_sum)


def test_one_tensor_given_twice_counts_as_two():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3))

        def forward(self, x, y):
            return x * self.w - y

    x = torch.randn(3)
    joint, other = capture_joint(Two(), x, x, loss=loss_or_sum), torch.randn(3)
    assert torch.equal(joint.run(x, other).loss, joint.model(x, other).sum())


def test_many_models_may_be_captured():
    for width in range(2, 11):  # more than Dynamo's limit of recompilations
        joint = capture_joint(nn.Linear(width, 2), torch.randn(3, width), loss=loss_or_sum)
        assert joint.graph_module.graph.find_nodes(op="placeholder")[0].meta["val"].shape == (2, width)


def test_saved_values_have_one_name_and_one_storage_in_both_halves(captured):
    for name in ("llama", "conv"):
        pair = captured(name)[0].split(SaveAll())
        gives = {n.name: n for n in pair.forward.graph.output_node().args[0][pair.outputs :]}
        takes = {n.name: n for n in pair.backward.graph.find_nodes(op="placeholder")}
        assert list(gives) == [*pair.saved, *pair.sizes]
        assert list(takes)[: len(gives)] == [*pair.sizes, *pair.saved]
        assert all(gives[n].meta["val"] is takes[n].meta["val"] for n in pair.saved)


@pytest.mark.parametrize("name", these_first(CAPTURED, [n for n in MODELS if n not in CAPTURED]))
def test_save_all_saves_what_torch_saves_by_default(captured, name):
    joint = captured(name)[0]
    ours, theirs = joint.split(SaveAll()), joint.partition(default_partition)
    assert storages(ours) == storages(theirs)
    assert ours.plan.members(FORWARD) and all(len(keys) == 1 for keys in ours.plan.values() if keys)


def storages(pair):
    """The bytes of the distinct storages that are saved."""
    values = {n.name: n.meta["val"] for n in pair.backward.graph.find_nodes(op="placeholder")}
    saved = [values[name].untyped_storage() for name in pair.saved]
    return sum({s._cdata: s.nbytes() for s in saved}.values())


@pytest.mark.parametrize("name", these_first(CAPTURED, [n for n in MODELS if n not in CAPTURED]))
def test_recompute_all_saves_inputs_and_what_may_not_be_repeated(captured, name):
    joint = captured(name)[0]
    pair, fixed = joint.split(RecomputeAll()), unrepeatable(joint.flow)
    nodes = {n.name: n for n in joint.graph_module.graph.nodes}
    for saved in (nodes[n] for n in pair.saved):
        assert saved.op == "placeholder" or joint.flow.producer(saved) in fixed, saved
    random = [n for n in fixed if "bernoulli" in n.name or "dropout" in n.name or "rand" in n.name]
    assert all(pair.plan[n] == (FORWARD,) for n in random)
    assert bool(random) == (name in ("gpt2", "bert", "t5", "conv"))


def test_remat_by_modules_recomputes_only_there(captured):
    joint, args, kwargs, expected = captured("gpt2")
    pair = joint.split(Remat(modules="transformer.h.*.attn"))
    twice = [n for n, keys in pair.plan.items() if len(keys) > 1 and n.op == "call_function"]
    paths = {list(n.meta["nn_module_stack"].values())[-1][0] for n in twice if n.meta.get("nn_module_stack")}
    assert paths and all(".attn" in path for path in paths)
    assert len(pair.saved) < len(joint.split(SaveAll()).saved)
    assert_steps_alike(ran(joint, pair, args, kwargs), expected)


def test_remat_keeps_what_it_is_told_to_keep(captured):
    joint, *_ = captured("llama")
    plan = joint.split(Remat(["aten.mm"])).plan
    products = [n for n in plan if n.target is torch.ops.aten.mm.default and plan.home(n) == FORWARD]
    assert products and all(plan[n] == (FORWARD,) for n in products)
    assert any(len(keys) > 1 for keys in plan.values())


def test_remat_of_a_module_that_is_not_there(captured):
    with pytest.raises(PolicyError, match="SK304") as caught:
        captured("gpt2")[0].split(Remat(modules="transformer.h.*.atn"))
    assert "transformer.h" in caught.value.remedy


def test_a_rule_may_place_nodes_itself(captured):
    joint, args, kwargs, expected = captured("conv")
    plan = save_all_plan(joint.flow)
    pair = joint.split(lambda node: plan.home(node))
    assert_steps_alike(ran(joint, pair, args, kwargs), expected)


def test_plans_that_cannot_be_right_are_refused(captured):
    joint, *_ = captured("conv")
    flow, plan = joint.flow, save_all_plan(joint.flow)
    random = next(n for n in flow.once if "bernoulli" in n.name or "dropout" in n.name)
    convolution = next(n for n in plan if n.target is torch.ops.aten.convolution.default)
    gradient = next(n for n in plan if plan[n] == (BACKWARD,) and flow.inputs(n))
    for changes, code in [
        ({random: (FORWARD, BACKWARD)}, "SK202"),
        ({random: (BACKWARD,)}, "SK210"),
        ({convolution: (BACKWARD,)}, "SK203"),
        ({gradient: (FORWARD,)}, "SK203"),
        ({convolution: ()}, "SK208"),
        ({convolution: (0,)}, "SK206"),
    ]:
        with pytest.raises(PlanError, match=code) as caught:
            joint.split(plan.place(changes))
        assert caught.value.nodes
    with pytest.raises(PlanError, match="SK206"):
        joint.split(RoundRobin(2))
    with pytest.raises(PlanError, match="SK210"):
        joint.split(lambda node: BACKWARD)
    with pytest.raises(CycleError, match="SK203"):
        joint.split({n.name: BACKWARD for n in plan if n not in flow.once})


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x


class Weighted(nn.Linear):
    """Takes inputs by name, a dict and a number."""

    def forward(self, x, y=None, more=None, scale=1):
        total = super().forward(x) - (0 if y is None else 2 * y)
        return (total + sum((i + 1) * more[k] for i, k in enumerate(sorted(more or {})))).sum() * scale


def test_inputs_by_name_may_come_in_any_order():
    model, (x, y, a, b) = Weighted(3, 3), torch.randn(4, 2, 3).unbind()
    joint = capture_joint(model, x=x, y=y, more={"b": b, "a": a}, loss=loss_or_sum)
    expected = model(x, y, {"a": a, "b": b})
    for inputs in ({"y": y, "more": {"a": a, "b": b}, "x": x}, {"x": x, "y": y, "more": {"b": b, "a": a}}):
        assert torch.equal(joint.run(**inputs).loss, expected.detach())


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "another structure"),
        ((torch.zeros(2, 3),), {"scale": 3}, "is 3, but the graph was captured for 2"),
        ((torch.zeros(2, 3),), {"scale": 2.0}, "is 2.0, but the graph was captured for 2"),
        ((torch.zeros(4, 3),), {"scale": 2}, r"float32 \[4, 3\], but .* was torch.float32 \[2, 3\]"),
        ((torch.zeros(2, 3, dtype=torch.float64),), {"scale": 2}, "float64"),
    ],
)
def test_inputs_unlike_the_example_are_refused(args, kwargs, words):
    joint = capture_joint(Weighted(3, 3), torch.randn(2, 3), scale=2, loss=loss_or_sum)
    with pytest.raises(GraphError, match=f"SK109.*{words}"):
        joint.run(*args, **kwargs)


class Doubling(nn.Linear):
    """Writes its second input."""

    def forward(self, x, y):
        y.mul_(2)
        return (super().forward(x) + y.sum()).sum()


def test_writes_to_inputs_that_share_memory_are_refused():
    x = torch.randn(4, 3)
    for inputs in ((x, x), (x, x[:2])):
        with pytest.raises(CaptureError, match="SK401.*writes to inputs that share memory"):
            capture_joint(Doubling(3, 3), *inputs, loss=loss_or_sum)
    joint = capture_joint(Doubling(3, 3), x, x.clone(), loss=loss_or_sum)
    assert list(joint.run(x, x.clone()).updates) == ["input 1"]


def test_a_buffer_that_is_bound_anew_is_refused():
    class Mean(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            y = super().forward(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return (y * self.mean).sum()

    with pytest.raises(CaptureError, match="SK401.*rebinds a buffer or parameter"):
        capture_joint(Mean(), torch.randn(4, 3), loss=loss_or_sum)


def test_a_buffer_that_is_written_by_an_operator_is_kept():
    class Count(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return (super().forward(x) * self.calls).sum()

    model = Count()
    assert capture_joint(model, torch.randn(4, 3), loss=loss_or_sum).run(torch.randn(4, 3)).updates == {
        "calls": torch.ones(())
    }
    assert model.calls == 0


def test_capture_keeps_neither_model_nor_inputs_alive():
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3)
    joint = capture_joint(model, x, loss=loss_or_sum)
    alive = [weakref.ref(model), weakref.ref(model[0].weight)]
    joint.split(SaveAll())
    del model, joint, x
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


def test_dropout_between_the_layers_of_an_lstm_is_not_lost():
    model = nn.Sequential(nn.LSTM(4, 4, num_layers=2, dropout=0.5))
    with pytest.raises(CaptureError, match="SK401.*dropout between the layers of 0, an LSTM"):
        capture_joint(model, torch.randn(3, 4), loss=lambda output: output[0].sum())
    for plain in (model.eval(), nn.LSTM(4, 4, dropout=0.5), nn.LSTM(4, 4, num_layers=2)):
        torch.manual_seed(0)
        joint = capture_joint(plain, torch.randn(3, 4), loss=lambda output: output[0].sum())
        x = torch.randn(3, 4)
        torch.testing.assert_close(joint.run(x).loss, plain(x)[0].sum().detach())


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (Branch(), None, "test_joint.py"),
        (nn.Linear(2, 2), lambda output: output, "shape"),
        (nn.Linear(2, 2).requires_grad_(False), None, "requires grad"),
        (nn.Linear(2, 2), lambda output: output.detach().sum(), "requires grad"),
        (torch.relu, None, "not a module"),
        (nn.Linear(2, 2), lambda output: (output.sum(), 1), "is not a tensor"),
        (nn.Linear(2, 2), lambda output: 3.0, "is not a tensor"),
        (nn.Linear(2, 2), lambda output: None, "is not a tensor"),
        (nn.Linear(2, 2), lambda output: output.sum().to(torch.complex64), "is complex"),
        (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1), nn.Flatten(0)), "parameters of its own"),
    ],
)
def test_what_cannot_be_captured(model, loss, words):
    with pytest.raises(CaptureError, match="SK401") as caught:
        capture_joint(model, torch.randn(3, 2), loss=loss)
    assert words in caught.value.reason


def test_checkpointed_blocks_save_their_inputs_only():
    torch.manual_seed(1)
    model, x = Checkpointed(), torch.randn(4, 8)
    joint = capture_joint(model, x, loss=loss_or_sum)
    pair = joint.split(SaveAll())
    nodes = {n.name: n for n in joint.graph_module.graph.nodes}
    saved = [nodes[n] for n in pair.saved if nodes[n].op == "call_function"]
    fixed = unrepeatable(joint.flow)
    inside = [n for n in saved if "recompute" in n.meta and joint.flow.producer(n) not in fixed]
    assert len(inside) == 1  # the value between the blocks
    assert len(saved) < len([nodes[n] for n in capture_joint(Plain(model), x, loss=loss_or_sum).split(SaveAll()).saved])
    assert_steps_alike(ran(joint, pair, (x,), {}), eager(model, (x,), {}))


class Plain(nn.Module):
    """The same without checkpoints."""

    def __init__(self, other):
        super().__init__()
        self.blocks = other.blocks

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sin()


def test_a_capture_of_a_hugging_face_model_does_not_warn(recwarn):
    model, args, kwargs = example("gpt2")
    capture_joint(model, *args, **kwargs, loss=loss_or_sum)
    assert not [str(warning.message) for warning in recwarn]


def test_what_dynamo_says_of_the_models_own_side_effects_comes_through():
    class Counting(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    with pytest.warns(UserWarning, match="side effects"):
        capture_joint(Counting(), torch.ones(2, 3), loss=loss_or_sum)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x).exp())


def test_capture_joint_leaves_a_module_that_goes_by_two_names_as_it_is():
    model = Shared()
    weight = model.a.weight
    capture_joint(model, torch.randn(8, 16), loss=loss_or_sum)
    assert model.a.weight is weight and isinstance(model.a.weight, nn.Parameter)
    model(torch.randn(8, 16))


def test_a_module_that_goes_by_two_names_has_one_gradient():
    model, x = Shared(), torch.randn(8, 16)
    model(x).sum().backward()
    parameters = dict(model.a.named_parameters())
    joint = capture_joint(model, x, loss=loss_or_sum)
    gradient = joint.run(x).gradients["a.weight"]
    torch.testing.assert_close(gradient, parameters["weight"].grad)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 8)

    def forward(self, x):
        return self.lstm(x)[0]


def test_the_joint_graph_of_an_lstm_runs_on_plain_inputs():
    joint = capture_joint(Recurrent(), torch.randn(3, 4, 16), loss=loss_or_sum)
    joint.run(torch.randn(3, 4, 16))


def test_a_loss_that_depends_on_nothing_that_trains_is_refused():
    frozen = nn.Linear(2, 1).requires_grad_(False)
    with pytest.raises(CaptureError, match="SK401"):
        capture_joint(frozen, torch.ones(1, 2), loss=torch.sum)
    assert capture_joint(frozen, torch.ones(1, 2, requires_grad=True), loss=torch.sum).signature.tangents


class Composites(nn.Module):
    """Ops that torch decomposes, and for which it has shape functions that autograd does not see through."""

    def __init__(self):
        super().__init__()
        self.linear, self.slope = nn.Linear(4, 4), nn.PReLU()

    def forward(self, x, y):
        h = self.slope(self.linear(x))
        h = nn.functional.selu(torch.where(h > 0, h, 0.1)) + nn.functional.pairwise_distance(h, x)[:, None]
        return nn.functional.cross_entropy(h, y) + h.std()


def test_a_capture_on_meta_has_all_gradients():
    """Torch's own joint graph has none of a cross entropy there."""
    model, given = Composites(), (torch.randn(3, 4), torch.zeros(3, dtype=torch.long))
    real = capture_joint(model, *given)
    meta = capture_joint(model.to("meta"), *(t.to("meta") for t in given))
    assert real.signature.gradients == meta.signature.gradients and len(real.signature.gradients) == 3
    targets = [[n.target for n in joint.graph_module.graph.nodes if n.op == "call_function"] for joint in (real, meta)]
    assert targets[0] == targets[1]


class Choosing(nn.Module):
    """A model with an argument that `capture` has, too."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)

    def forward(self, x, training=False):
        return self.body(x).sum() * (2 if training else 1)


def test_one_door_captures_both_graphs_and_leaves_a_model_its_own_argument():
    x = torch.randn(2, 4)
    joint = capture(nn.Sequential(nn.Linear(4, 4)), x, training=True, loss=torch.Tensor.sum)
    assert set(joint.run(x).gradients) == {"0.weight", "0.bias"}
    model = Choosing()
    graph = capture(model, x, training=True)
    torch.testing.assert_close(graph(x, training=True), 2 * model(x))
    with pytest.raises(CaptureError, match="SK401"):
        capture(torch.export.export(model, (x,)), training=True)
