"""The costs of parts are what their modules take when they run: saved bytes exactly, peaks from above."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example
from keptmodels import LANGUAGE, MODELS, Convolutions, LossOnly, Mixed
from savedbytes import Parts, kept_by_autograd, storages, tensors_of
from smallnets import loss_or_sum
from torch import nn

import splitkit as sk
from splitkit.hardware.device_specs import find_device
from splitkit.memory.saved_storages import activations
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.placed_prices import costs_of_plan
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.stage_prices import StagePrices, run_order, stage_costs
from splitkit.policies import Devices, RoundRobin, Stages
from splitkit.search.plan_figures import StagePricing
from splitkit.testing.models import build
from splitkit.units import size
from splitkit.view.renderers import pictured


def forward_and_backward(part, args, gradients):
    outputs = [t for t in tensors_of(part(*args)) if t.requires_grad]
    torch.autograd.backward(outputs, [g.clone() for g in gradients])


def forward(part, args):
    with torch.no_grad():
        return part(*args)


def measured(part, args):
    """What a part takes: bytes saved, peak of training from the second microbatch on, peak of inference."""
    saved = kept_by_autograd(part, lambda: part(*args), tensors_of(args), outputs=True)
    trained = [p for p in dict.fromkeys(part.parameters()) if p.requires_grad]
    inference = sk.measure_memory(forward, part, [t.detach() if isinstance(t, torch.Tensor) else t for t in args])
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    gradients = [torch.ones_like(t) for t in tensors_of(part(*args)) if t.requires_grad]
    training = sk.measure_memory(forward_and_backward, part, args, gradients)
    for parameter in trained:
        parameter.grad = None
    return {
        "saved": saved,
        "parameters": sum(storages([*part.parameters(), *part.buffers()]).values()),
        "gradients": sum(p.numel() * p.element_size() for p in trained),
        "inference": inference.peak,
        "training": training.peak - sum(g.nbytes for g in gradients),  # those above; the copies are backward's
    }


def check(gm, plan, inputs):
    flow, costs = sk.analyze(gm), sk.costs.flops(gm)
    found = stage_costs(flow, plan, costs, optimizer="momentum")
    inference = stage_costs(flow, plan, costs, optimizer=None)
    split = sk.split(gm, plan)
    parts = Parts(split.module, measured)
    parts.run(*inputs)
    assert len(found) == len(inference) == len(parts.rows)
    for training, without, true in zip(found, inference, parts.rows, strict=True):
        assert training.saved_bytes == true["saved"]
        assert training.parameter_bytes == without.parameter_bytes == true["parameters"]
        assert training.gradient_bytes == training.optimizer_bytes == true["gradients"]
        peak = true["parameters"] + true["gradients"] + training.saved_bytes + training.temporary_bytes
        assert true["training"] <= peak <= 1.3 * true["training"]
        assert true["inference"] <= without.parameter_bytes + without.temporary_bytes <= 1.02 * true["inference"]
        assert without.saved_bytes == without.gradient_bytes == without.optimizer_bytes == without.backward == 0
    return found


def inputs_of(gm, args, kwargs):
    return tensors_of(list(inspect.signature(gm.forward).bind(*args, **kwargs).arguments.values()))


@pytest.mark.parametrize("name", these_first(["gpt2"], sorted({*MODELS} - {"gpt2"})))
def test_parts_of_models(name):
    example = build(name, **MODELS[name])
    gm = sk.capture(LossOnly(example.model), *example.args, **example.kwargs)
    inputs = inputs_of(gm, example.args, example.kwargs)
    found = check(gm, sk.plan(gm, Stages(3, seconds=1), sk.costs.flops(gm)), inputs)
    costs = sk.costs.training(sk.costs.flops(gm))
    assert sum(s.forward + s.backward for s in found) == pytest.approx(sum(costs.seconds(n) for n in gm.graph.nodes))
    assert all(s.backward_weight > 0 for s in found)
    assert found[-1].activation_bytes == 0
    assert found[0].input_gradient_bytes == 0
    assert all(s.input_gradient_bytes > 0 for s in found[1:])


def test_logits_beside_the_loss_are_not_held():
    """They are as large as all activations of this model, and the pipeline drops them before backward."""
    example = build("gpt2", layers=1, width=32, heads=2, vocab=4000)
    whole, bare = (sk.capture(m, **example.kwargs) for m in (example.model, LossOnly(example.model)))
    costs = [stage_costs(sk.analyze(gm), sk.plan(gm, Stages(2, seconds=1), sk.costs.flops(gm))) for gm in (whole, bare)]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("count", these_first([2], [1, 3]))
def test_parts_of_a_convolutional_net_and_of_one_with_regions(count):
    for model, inputs in (
        (Convolutions(), (torch.randn(2, 3, 8, 8), torch.tensor([1, 2]))),
        (Mixed(), (torch.randn(4, 16),)),
    ):
        gm = sk.capture(model.train(), *inputs)
        check(gm, sk.plan(gm, Stages(count, seconds=1), sk.costs.flops(gm)), inputs)


def chain():
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2, bias=False)), torch.randn(3, 4)
    gm = sk.capture(model, x)
    flow = sk.analyze(gm)
    return gm, flow, sk.costs.flops(gm), list(flow.nodes)


def test_each_number_of_a_chain_by_hand():
    _, flow, costs, (first, relu, last) = chain()
    one, two = stage_costs(flow, [{first, relu}, {last}], costs, optimizer="adam")
    x, y, z = 3 * 4 * 4, 3 * 6 * 4, 3 * 2 * 4
    assert (one.saved_bytes, two.saved_bytes) == (x + y, y + z)
    assert (one.parameter_bytes, two.parameter_bytes) == (4 * (24 + 6), 4 * 12)
    assert (one.gradient_bytes, one.optimizer_bytes) == (4 * 30, 8 * 30)
    assert (one.activation_bytes, two.activation_bytes) == (y, 0)
    assert (one.input_gradient_bytes, two.input_gradient_bytes) == (0, y)
    # backward of linear: the gradient that came, that of relu's input, and those of the parameters; of the last
    # product: the gradient that came, of its input, of its weight
    assert one.temporary_bytes == y + y + 4 * 30
    assert two.temporary_bytes == z + y + 4 * 12
    assert one.forward == pytest.approx(costs.seconds(first) + costs.seconds(relu))
    assert one.backward_input == 0  # torch's first stage has no input part
    assert one.backward_weight == pytest.approx(costs.seconds(first) + costs.seconds(relu))  # x needs no gradient
    assert two.backward_input == two.backward_weight == pytest.approx(costs.seconds(last))


def test_gradients_of_parameters_stay_no_longer_than_their_backward():
    _, flow, costs, nodes = chain()
    (whole,) = stage_costs(flow, [nodes], costs)
    x, y, z = 3 * 4 * 4, 3 * 6 * 4, 3 * 2 * 4
    assert whole.saved_bytes == x + y + z
    # relu: the gradient of the output, held to the end, and both of its own; not that of the last weight
    assert whole.temporary_bytes == z + y + y


def test_inference_by_hand():
    _, flow, costs, nodes = chain()
    (whole,) = stage_costs(flow, [nodes], costs, optimizer=None)
    x, y = 3 * 4 * 4, 3 * 6 * 4
    assert whole.temporary_bytes == x + y + y
    assert whole.parameter_bytes == 4 * 42
    assert whole.input_gradient_bytes == 0


def test_sets_and_plans_agree_whatever_the_parts_are_called():
    gm, flow, costs, (first, relu, last) = chain()
    plan = sk.Plan.of({first: "z", relu: "a", last: "m"})
    assert stage_costs(flow, plan, costs) == stage_costs(flow, [[first], [relu], [last]], costs)
    assert StagePrices(flow, costs, activations=activations(gm)).of(plan) == stage_costs(flow, plan, costs)


def test_a_part_reads_its_own_copy():
    _, flow, costs, (first, relu, last) = chain()
    x, y = 3 * 4 * 4, 3 * 6 * 4
    plan = sk.Plan.of({first: 0, relu: [0, 1], last: 1})
    sent, copied = stage_costs(flow, [[first, relu], [last]], costs), stage_costs(flow, plan, costs)
    assert copied[0].activation_bytes == sent[0].activation_bytes == y  # what relu reads is as large
    assert copied[1].saved_bytes == sent[1].saved_bytes + y  # the input of its relu
    assert copied[0].saved_bytes == x + 2 * y  # what it gives, and what its own relu saves


def test_what_is_read_twice_is_paid_once_and_skips_go_through_neighbours():
    class Skip(nn.Module):
        def forward(self, x, w):
            y = torch.tanh(x * w)
            return (torch.sin(y) + torch.cos(y)) * y

    gm = sk.capture(Skip(), torch.randn(8), torch.randn(8))
    flow = sk.analyze(gm)
    found = stage_costs(flow, [[node] for node in flow.nodes], sk.costs.flops(gm), optimizer=None)
    # mul | tanh | sin | cos | add | mul: y goes on to the last one, sin and cos to the sum
    assert [s.activation_bytes // 32 for s in found] == [1, 1, 2, 3, 2, 0]


def test_a_view_of_a_parameter_that_crosses_is_the_readers_own():
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x):
            return x * self.weight[1]

    gm = sk.capture(Sliced(), torch.randn(8))
    flow = sk.analyze(gm)
    one, two = stage_costs(flow, [[node] for node in flow.nodes], sk.costs.flops(gm))
    assert (one.parameter_bytes, two.parameter_bytes) == (4 * 32, 0)
    assert one.activation_bytes == two.input_gradient_bytes == 32
    assert two.saved_bytes == 3 * 32  # x, the row, and the result


def test_shared_parameters_are_in_each_part_and_once_in_one():
    example, gm = captured_example("gpt2", **LANGUAGE)
    flow = sk.analyze(gm)
    prices = StagePrices(flow, sk.costs.flops(gm))
    (whole,) = prices.of([flow.nodes])
    assert whole.gradient_bytes == sum(p.numel() * 4 for p in example.model.parameters())
    tied = example.model.lm_head.weight.numel() * 4
    parts = prices.of(sk.plan(gm, Stages(2), sk.costs.flops(gm)))
    assert sum(p.gradient_bytes for p in parts) == whole.gradient_bytes + tied


def test_bad_input():
    gm, flow, costs, (first, relu, last) = chain()
    with pytest.raises(sk.SplitError, match="SK302.*'lion'"):
        stage_costs(flow, [[first, relu, last]], costs, optimizer="lion")
    with pytest.raises(sk.SplitError, match="SK208.*linear_1"):
        stage_costs(flow, [[first, relu]], costs)
    with pytest.raises(sk.SplitError, match="SK208.*relu"):
        stage_costs(flow, sk.Plan.of({first: 0, last: 1}), costs)
    with pytest.raises(sk.SplitError, match="SK203"):
        stage_costs(flow, sk.Plan.of({first: 0, relu: 1, last: 0}), costs)
    joint = sk.capture_joint(nn.Linear(2, 2), torch.randn(1, 2), loss=loss_or_sum).graph_module
    with pytest.raises(sk.SplitError, match="SK323"):
        stage_costs(sk.analyze(joint), [sk.analyze(joint).nodes], sk.costs.flops(joint))
    assert stage_costs(sk.analyze(gm), sk.plan(gm, RoundRobin(1)), costs)


def test_a_device_that_is_visited_twice_holds_both_stages_and_the_larger_of_what_runs():
    first, second = (
        StageCosts(1, 1, saved_bytes=s, temporary_bytes=t, parameter_bytes=100) for s, t in ((1, 20), (2, 7))
    )
    assert ByteBreakdown.of_visits([first, second]).total == 100 + 1 + 100 + 2 + 20
    assert ByteBreakdown.of_visits([second]).total == ByteBreakdown.of_stage(second).total == 109
    assert ByteBreakdown.of_visits([second, first]).total == 223


class Kernels(nn.Module):
    """Attention, which each kind of device computes with another kernel, a norm, and an LSTM."""

    def __init__(self):
        super().__init__()
        self.first, self.then = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.cell = nn.LayerNorm(16), nn.LSTM(16, 16)

    def forward(self, x):
        for layer in (self.first, self.then):
            heads = layer(x).unflatten(-1, (2, 8)).transpose(1, 2)
            made = nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
            x = self.norm(made.transpose(1, 2).flatten(2))
        return self.cell(x)[0].mean()


@pytest.mark.campaign
@pytest.mark.parametrize("devices", [["cpu", "l4"], ["l4", "cpu"]])
def test_each_part_saves_what_the_kernels_of_its_own_device_save(devices):
    gm = sk.capture(Kernels(), torch.randn(2, 32, 16))
    flow = sk.analyze(gm)
    policy = Devices(devices, links="pcie4", optimizer="sgd", only={"first": [0], "cell": [1]})
    plan = sk.plan(gm, policy, sk.costs.roofline(gm, "h100"))
    alone = {
        device: stage_costs(flow, plan, activations=activations(gm, find_device(device).kernels)) for device in devices
    }
    on = [devices[plan.parts[key].planned_on] for key in run_order(flow, plan)]
    stages = stage_costs(flow, plan)
    saved = [stage.saved_bytes for stage in stages]
    assert saved == [alone[device][number].saved_bytes for number, device in enumerate(on)]
    assert all(saved != [stage.saved_bytes for stage in of] for of in alone.values())
    pricing = StagePricing.of(flow, plan, costs_of_plan(plan, flow))
    peaks = [stage.fixed_bytes + stage.saved_bytes + stage.temporary_bytes for stage in stages]
    assert sorted(pricing.figures(plan).peaks) == sorted(peaks) and f"peak {size(max(peaks))} on" in plan.note
    page = pictured(plan).ladder()
    assert page.to_dict()["stages"]["saved"] == saved
    parts = page.rows.parts
    borders = [*(parts.index(part) for part in range(len(saved))), len(parts)]
    assert [page.saved_bytes(*rows) for rows in pairwise(borders)] == saved
