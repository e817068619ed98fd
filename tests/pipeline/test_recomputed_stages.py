"""Parts that are run again in backward cost what ``torch.utils.checkpoint`` takes: saved bytes; peaks from above."""

from __future__ import annotations

import inspect
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from campaigns import these_first
from capturedmodels import captured_example
from keptmodels import MODELS, LossOnly, Mixed
from savedbytes import Parts, kept_by_autograd, storages, tensors_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import splitkit as sk
from splitkit import _torch
from splitkit.memory.segment import RNG_STATE_BYTES
from splitkit.pipeline.schedules import known_schedules
from splitkit.pipeline.stage_prices import StagePrices, stage_costs
from splitkit.policies import Stages
from splitkit.testing.models import build


def recomputed(plan, keys=None):
    """The plan with parts that backward runs again: those of the keys, or all."""
    again = {key: replace(part, call="checkpoint") for key, part in plan.parts.items() if keys is None or key in keys}
    return replace(plan, parts={**plan.parts, **again})


def measured(part, args):
    """What a part holds between forward and backward, as hooks and as the allocator see it, and its peak."""

    def run():
        return checkpoint(part, *args, use_reentrant=False)

    seen = kept_by_autograd(part, run, tensors_of(args), outputs=True)
    given = [torch.ones_like(t) for t in tensors_of(run()) if t.requires_grad]

    def backward(outputs):
        torch.autograd.backward([t for t in outputs if t.requires_grad], [g.clone() for g in given])

    backward(tensors_of(run()))  # later microbatches add to gradients that exist
    came, made = sum(storages(tensors_of(args)).values()), []
    up = _torch.allocations_between(lambda: made.extend(tensors_of(run())), "")[0]
    down = _torch.allocations_between(lambda: backward(made), "")[0]
    peaks = [max(accumulate(up, initial=0)), sum(up) + max(accumulate(down, initial=0))]
    if "convolution" in sk.simulate_memory(part).unseen:
        # its kernels copy tensors into layouts of their own, which stage costs leave out: tensors alone count
        made.clear()
        forward = sk.measure_memory(lambda: made.extend(tensors_of(run())))
        down = sk.measure_memory(lambda: backward(made))
        inside, peaks = peaks, [forward.peak - forward.baseline, sum(up) + down.peak - down.baseline]
        assert all(least <= most for least, most in zip(peaks, inside, strict=True))
    for parameter in part.parameters():
        parameter.grad = None
    # a message between ranks holds every element of an expanded value
    expanded = sum(max(0, t.nbytes - t.untyped_storage().nbytes()) for t in (*tensors_of(args), *tensors_of(run())))
    came += expanded
    seen += expanded
    return {"seen": seen, "held": came + sum(up), "forward": came + peaks[0], "backward": came + peaks[1]}


def check(model, *args, stages=3, slack=1.3, **kwargs):
    gm = sk.capture(model, *args, **kwargs)
    policy = Stages(stages, seconds=1) if isinstance(stages, int) else stages(gm)
    plan = sk.plan(gm, policy, sk.costs.flops(gm))
    found = stage_costs(sk.analyze(gm), recomputed(plan), sk.costs.flops(gm), optimizer="sgd")
    inputs = tensors_of(list(inspect.signature(gm.forward).bind(*args, **kwargs).arguments.values()))
    parts = Parts(sk.split(gm, plan).module, measured)
    parts.run(*inputs)
    for stage, true in zip(found, parts.rows, strict=True):
        assert stage.saved_bytes == true["seen"] + torch.get_rng_state().nbytes
        assert abs(stage.saved_bytes - true["held"]) <= 64  # the allocator also sees numbers that the part makes
        peak = stage.saved_bytes + stage.temporary_bytes
        assert max(true["forward"], true["backward"]) <= peak + 64
        assert peak <= slack * max(true["forward"], true["backward"])
    return gm, plan, found, parts.rows


@pytest.mark.parametrize("name", these_first(["gpt2"], sorted({*MODELS} - {"gpt2"})))
def test_a_stage_holds_its_inputs_and_its_peak_has_one_recomputed_microbatch(name):
    example = build(name, **MODELS[name])
    gm, plan, found, _ = check(LossOnly(example.model), *example.args, stages=2, slack=1.15, **example.kwargs)
    plain = stage_costs(sk.analyze(gm), plan, sk.costs.flops(gm), optimizer="sgd")
    for again, once in zip(found, plain, strict=True):
        assert again.saved_bytes - RNG_STATE_BYTES < 0.7 * once.saved_bytes
        assert again.temporary_bytes > once.temporary_bytes
        assert again.forward == once.forward and again.backward == pytest.approx(once.forward + once.backward)
        assert again.fixed_bytes == once.fixed_bytes
        assert (again.activation_bytes, again.input_gradient_bytes) == (
            once.activation_bytes,
            once.input_gradient_bytes,
        )


def test_a_part_with_regions_and_a_dropout_mask():
    check(Mixed().train(), torch.randn(4, 16), stages=2)


class Passing(nn.Module):
    """Its forward makes large values that backward does not need, before the last value that it does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        wide = self.a(x).repeat(1, 64) + 1
        return self.b((wide * 2 - 3).view(-1, 64, 16).sum(1)).sum()


def test_the_second_forward_counts_where_it_takes_more_than_backward():
    *_, (true,) = check(Passing(), torch.randn(32, 16), stages=1, slack=1.05)
    assert true["backward"] - true["held"] > 2 * 64 * 32 * 16 * 4  # two of the large values at once


class Powers(nn.Module):
    """Its first part sends a value that its backward reads, and takes several times as much to compute with it."""

    def __init__(self):
        super().__init__()
        self.power, self.last = nn.Parameter(torch.full((64, 64), 1.5)), nn.Linear(64, 4)

    def forward(self, x):
        return self.last(torch.pow(x.abs() + 1, self.power)).sum()


def test_what_the_second_forward_sends_again_is_memory_of_its_own():
    def cut(gm):
        nodes = list(sk.analyze(gm).nodes)
        return {node: int(i > nodes.index(next(n for n in nodes if "pow" in n.name))) for i, node in enumerate(nodes)}

    check(Powers(), torch.randn(64, 64), stages=cut, slack=1.02)


def chain():
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2, bias=False)), torch.randn(3, 4)
    gm = sk.capture(model, x)
    flow = sk.analyze(gm)
    return gm, flow, sk.plan(gm, {flow.nodes[0]: 0, flow.nodes[1]: 0, flow.nodes[2]: 1})


def test_each_number_of_a_chain_by_hand():
    gm, flow, plan = chain()
    one, two = stage_costs(flow, recomputed(plan), sk.costs.flops(gm))
    x, y, z = 3 * 4 * 4, 3 * 6 * 4, 3 * 2 * 4
    assert (one.saved_bytes, two.saved_bytes) == (x + y + RNG_STATE_BYTES, y + z + RNG_STATE_BYTES)
    # relu's result again, the gradient that came, that of relu's input, and those of the parameters; of the last
    # product the second run's result, the generator's state of the moment, and the gradient that came
    assert one.temporary_bytes == max(y + y + y + 4 * 30, RNG_STATE_BYTES + y + y + y)
    assert two.temporary_bytes == max(z + y + 4 * 12, RNG_STATE_BYTES + z + z)
    assert torch.get_rng_state().nbytes == RNG_STATE_BYTES


def test_backward_is_whole_and_nothing_waits_for_the_weight_part():
    """As the pipeline runs it: the first stage in the weight part, the others in the input part."""
    gm, flow, plan = chain()
    costs = sk.costs.flops(gm)
    plain, again = stage_costs(flow, plan, costs), stage_costs(flow, recomputed(plan), costs)
    assert plain[1].backward_weight and plain[1].deferred_bytes
    assert (again[1].backward_weight, again[1].deferred_bytes) == (0, 0)
    assert again[1].backward_input == pytest.approx(plain[1].forward + plain[1].backward)
    assert again[0].backward_input == 0 and again[0].backward_weight == pytest.approx(
        plain[0].forward + plain[0].backward
    )
    y = 3 * 6 * 4
    assert again[0].deferred_bytes == again[0].saved_bytes + y


def test_one_of_two_parts_may_be_run_again_and_inference_runs_nothing_again():
    gm, flow, plan = chain()
    costs = sk.costs.flops(gm)
    plain, all_again = stage_costs(flow, plan, costs), stage_costs(flow, recomputed(plan), costs)
    mixed = stage_costs(flow, recomputed(plan, {1}), costs)
    assert mixed == (plain[0], all_again[1])
    assert stage_costs(flow, recomputed(plan), costs, optimizer=None) == stage_costs(flow, plan, costs, optimizer=None)


def test_what_nobody_trains_is_not_run_again():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    gm = sk.capture(model, torch.randn(3, 4))
    flow = sk.analyze(gm)
    plan = recomputed(sk.plan(gm, {flow.nodes[0]: 0, flow.nodes[1]: 1}))
    frozen, _ = stage_costs(flow, plan, sk.costs.flops(gm))
    assert frozen.backward == 0


def test_every_schedule_simulates_recompute_in_less_memory_and_more_time():
    gm = captured_example("gpt2", layers=1, width=32, heads=2, vocab=50, seq=16).graph
    flow, costs = sk.analyze(gm), sk.costs.training(sk.costs.flops(gm))
    plan = sk.plan(gm, Stages(4, seconds=1), sk.costs.flops(gm))
    prices = StagePrices(flow, costs)
    plain, again = prices.of(plan), prices.of(recomputed(plan))
    for schedule in known_schedules():
        once, twice = (sk.simulate_schedule(stages, schedule.word, 8) for stages in (plain, again))
        assert twice.seconds > once.seconds, schedule
        assert max(twice.peaks) < max(once.peaks), schedule
