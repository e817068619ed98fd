"""What counts as rounding, and the texts of comparisons of wholes and of parts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from splitkit.errors import CheckError
from splitkit.testing.compare import Comparison, PartComparison
from splitkit.testing.differences import (
    Difference,
    casting_anew,
    differences,
    flattened_output,
    is_rounding,
    measure_difference,
    untouched,
)
from splitkit.testing.models import Example
from splitkit.testing.timing import StepTime, best_step, copied_inputs, measure_training


def off(name, largest, scale=1.0):
    return Difference(name, largest, scale, largest == 0)


def test_a_difference_is_rounding_up_to_its_scale_and_noise_alone_where_it_has_none():
    assert is_rounding(off("a", 0.01, 10), 0.001, 0) and not is_rounding(off("a", 0.011, 10), 0.001, 0)
    assert is_rounding(off("a", 0.5, 5.0), 0.0, 0.5) and not is_rounding(off("a", 0.5, 5.1), 0.0, 0.5)
    assert is_rounding(Difference("a", math.inf, 0.0, True), 0.0, 0.0)
    assert off("a", 2.0, 4.0).relative == 0.5 and off("a", 2.0, 0.0).relative == 2.0


def test_how_much_two_tensors_differ():
    a = torch.tensor([1.0, -8.0, 3.0])
    assert measure_difference("x", a, a + torch.tensor([0.0, 0.5, -1.0])) == Difference("x", 1.0, 8.0, False)
    assert measure_difference("x", a, a.clone()) == Difference("x", 0.0, 8.0, True)
    for other in (a.double(), a[:2], a.clone().requires_grad_(), 3, None):
        found = measure_difference("x", a, other)
        assert (found.largest, found.bitwise) == (math.inf, False)
    first, second = {"a": a, "b": 2}, {"b": 3, "c": a}
    found = differences(first, second, "the {}")
    assert [(d.name, d.bitwise) for d in found] == [("the a", False), ("the b", False), ("the c", False)]


def test_outputs_are_flat_with_their_paths():
    a, b = torch.ones(1), torch.zeros(1)
    leaves, specs = flattened_output({"x": (a, [b, 3]), "y": None})
    assert [path for path, leaf in leaves.items() if leaf is not None] == ["['x'][0]", "['x'][1][0]", "['x'][1][1]"]
    assert leaves["['x'][0]"] is a and leaves["['x'][1][0]"] is b and leaves["['x'][1][1]"] == 3 and len(specs) == 1


def test_nothing_is_kept_in_autocasts_cache_inside_the_block():
    before = torch.is_autocast_cache_enabled()
    for enabled in (True, False):
        torch.set_autocast_cache_enabled(enabled)
        with casting_anew():
            assert not torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(True)  # as torch.autocast does
            assert not torch.is_autocast_cache_enabled()
        assert torch.is_autocast_cache_enabled() is enabled
    torch.set_autocast_cache_enabled(before)


def test_a_module_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].weight.grad = kept = torch.ones(2, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bias = model[0].bias
    with pytest.raises(KeyError), untouched(model) as saved:
        assert model[0].weight.grad is None and saved["0.bias"][0] is bias
        model(torch.randn(4, 2)).sum().backward()
        with torch.no_grad():
            model[0].weight.add_(1)
        model[0].bias = nn.Parameter(torch.zeros(2))
        raise KeyError
    assert model[0].weight.grad is kept and model[0].bias is bias and bias.grad is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


SAME, WRONG = off("output[0]", 0.0), off("output[0]", 0.25, 2.0)
NEAR = off("gradient of w", 1e-6)


def compared(outputs=(SAME,), gradients=(NEAR,), **more):
    return Comparison(outputs, gradients, (), (None, None), **more)


def part(key, worst, ok, node=None):
    return PartComparison(key, worst, ok, node)


PARTS = (
    part(0, off("x", 0.0), True),
    part(1, off("y", 1e-6, 2.0), True),
    part("last", WRONG, False, off("add", 0.5, 2.0)),
)


@pytest.mark.parametrize(
    ("comparison", "text"),
    [
        (compared(), "same: 1 outputs, 1 gradients, 0 state; gradients to 1e-06 of gradient of w"),
        (compared(gradients=()), "same: 1 outputs, 0 gradients, 0 state"),
        (
            compared(gradients=(), no_backward="no loss", recast=True),
            "same: 1 outputs, 0 gradients, 0 state; gradients compared without autocast's cache of casts; no "
            "gradients, since backward from all outputs fails: no loss",
        ),
        (
            compared((WRONG,)),
            "the candidate differs from the reference in\n    output[0]: differs by 0.25 (scale 2)",
        ),
        (
            compared(tuple(off(f"output[{i}]", 1.0) for i in range(10))),
            "\n".join([
                "the candidate differs from the reference in",
                *(f"    output[{i}]: differs by 1 (scale 1)" for i in range(8)),
                "    and 2 more",
            ]),
        ),
        (
            compared((WRONG,), steps={"model": compared(), "capture": compared((WRONG,)), "split": compared()}),
            "the graph that was split differs from the model (the capture changed it); the split differs from it in\n"
            "    output[0]: differs by 0.25 (scale 2)",
        ),
        (
            compared(gradients=(), parts=PARTS[:2]),
            "same: 1 outputs, 0 gradients, 0 state\n"
            "first part that departs from the reference, given its inputs (tolerance 0.0001): none\n"
            "  part 0: the same\n  part 1: rounding: y differs by 1e-06 (5e-07 of its scale 2)",
        ),
        (
            compared((WRONG,), parts=PARTS[2:]),
            "the candidate differs from the reference in\n    output[0]: differs by 0.25 (scale 2)\n"
            "first part that departs from the reference, given its inputs (tolerance 0.0001): part last: output[0] "
            "differs by 0.25 (0.12 of its scale 2); first at node add differs by 0.5 (0.25 of its scale 2)\n"
            "  part last: output[0] differs by 0.25 (0.12 of its scale 2); first at node add differs by 0.5 (0.25 of "
            "its scale 2)",
        ),
    ],
)  # fmt: skip
def test_the_text_of_a_comparison(comparison, text):
    assert str(comparison) == repr(comparison) == text


def test_who_is_to_blame():
    code = {"": "SK701", "split": "SK701", "model": "SK703", "capture": "SK702"}
    for step, expected in code.items():
        found = compared((WRONG,), steps={step: compared((WRONG,))} if step else {})
        assert found.wrong_step == step and found.failures == (WRONG,) and not found.same
        with pytest.raises(CheckError) as caught:
            found.raise_if_different()
        assert caught.value.code == expected and bool(caught.value.remedy) is bool(step)
    named = compared((WRONG,), steps={"split": compared((WRONG,))}, parts=PARTS)
    with pytest.raises(CheckError) as caught:
        named.raise_if_different()
    assert caught.value.remedy == "" and named.wrong_part is PARTS[2]
    compared().raise_if_different()
    assert compared().worst("gradients") is NEAR and compared(gradients=()).worst("gradients") is None
    assert compared((off("a", 0.1), off("b", 0.3), SAME)).worst("outputs").name == "b"


def test_a_gradient_without_a_scale_of_its_own_may_be_noise():
    large, noise = off("gradient of w", 0.0, 10.0), off("gradient of b", 2e-6, 1e-6)
    assert compared(gradients=(large, noise)).same and not compared(gradients=(noise,)).same


def test_the_fastest_step_counts_forward_and_backward(monkeypatch):
    times = iter([StepTime(1.0, 5.0, (), None, None, False), StepTime(3.0, 1.0, (), None, None, False),
                  StepTime(4.5, None, (), None, None, False)])  # fmt: skip
    monkeypatch.setattr("splitkit.testing.timing._step", lambda *args: next(times))
    assert best_step(nn.ReLU(), [], None, 0, 3).forward == 3.0


def test_a_step_is_timed_part_by_part_and_leaves_nothing(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr("splitkit.testing.timing._now", lambda: float(next(ticks)))
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    x = torch.ones(3, 2, requires_grad=True)
    found = best_step(model, [model[0], model[1]], Example(model, (x,), {}), 0, 1)
    assert (found.forward, found.backward, found.parts) == (5.0, 1.0, (1.0, 1.0))
    assert found.loss == pytest.approx(float(model(x).sum())) and not found.loss_is_models
    assert x.grad is None and model[0].weight.grad is None and not model[0]._forward_pre_hooks
    with torch.no_grad():
        assert torch.equal(found.output, model(x))


def test_copies_of_inputs_share_memory_as_the_inputs_do():
    x = torch.ones(4, requires_grad=True)
    base = torch.zeros(4)
    (a, b, c), kwargs = copied_inputs(Example(nn.ReLU(), (x, base, base[1:]), {"n": 3}))
    assert a.requires_grad and a.is_leaf and not b.requires_grad and kwargs == {"n": 3}
    b.add_(1)
    assert torch.equal(c, torch.ones(3)) and torch.equal(base, torch.zeros(4))


def test_training_is_measured_with_what_the_allocator_takes(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "splitkit.testing.timing.measure_memory", lambda *args, **options: asked.update(options) or args
    )

    class Step:
        class joint:
            primals = staticmethod(lambda *args, **kwargs: ["primals", *args])
            tangents = staticmethod(lambda: ["tangents"])

        class pair:
            run = "run"

    model = nn.ReLU()
    assert measure_training(Step, Example(model, (1,), {}), 0) == ("run", ["primals", 1], ["tangents"])
    assert asked == {"allocator": True}
