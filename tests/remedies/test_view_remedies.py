"""Remedies of errors about pictures (SK9xx)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import stagedsteps
import torch
from carried import Remedy, refusal
from torch import nn

import splitkit as sk
from splitkit.errors import ViewError
from splitkit.pipeline.trace import MeasuredStep
from splitkit.plans.record import Plan
from splitkit.policies import Budget, Stages
from splitkit.view.renderers import html, pictured, svg, view

X = torch.linspace(-1, 1, 32).reshape(4, 8)


@cache
def made():
    """A plan of two stages with prices in seconds, and a step of it, simulated."""
    gm = sk.capture(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), X)
    costs = sk.costs.roofline(gm, "h100")
    plan = sk.plan(gm, Stages(2), costs)
    return gm, plan, costs, stepped(gm, plan, costs)


def stepped(gm, plan, costs):
    return sk.simulate_schedule(sk.stage_costs(sk.analyze(gm), plan, costs), "1f1b", 4)


@cache
def halves():
    joint, costs = stagedsteps.captured()
    return joint.split(Budget(0.9, of="saved"), costs)


def staged():
    return stagedsteps.divided()


def drawn(shown, **options):
    """Whether there is a page and a picture."""
    return svg(shown, **options).startswith("<svg") and "<html" in html(shown, **options)


def ran(tmp_path):
    """The simulated step as one that was measured."""
    run = made()[3]
    run.to_trace(tmp_path / "trace.json")
    return MeasuredStep.load(tmp_path / "trace.json")


CASES = [
    Remedy(
        "SK901",
        "Draw a plan, a split, a frontier, a profile or a run.",
        lambda: pictured(3),
        (
            lambda: drawn(made()[1]),
            lambda: drawn(sk.split(made()[0], made()[1])),
            lambda: drawn(sk.Frontier(stagedsteps.captured()[0], of="saved")),
            lambda: drawn(sk.simulate_memory(made()[0])),
            lambda: drawn(made()[3]),
        ),
    ),
    Remedy(
        "SK901",
        "Draw it with costs, memory and title.",
        lambda: drawn(halves().plan, run=made()[3]),
        lambda: drawn(halves().plan, costs=stagedsteps.captured()[1], memory="1GiB", title="step"),
    ),
    Remedy(
        "SK901",
        "Draw it with costs, optimizer, memory, run and title.",
        lambda: drawn(staged().plan, beside=made()[1]),
        lambda: drawn(
            staged().plan,
            costs=stagedsteps.captured()[1],
            optimizer="sgd",
            memory="1GiB",
            run=sk.simulate_schedule(staged().stage_costs(stagedsteps.captured()[1]), "zbv", 4),
            title="step",
        ),
    ),
    Remedy(
        "SK901",
        "Compare plans of one graph module.",
        lambda: drawn(made()[1], beside=sk.plan(sk.capture(nn.Linear(8, 8), X), Stages(1))),
        lambda: drawn(made()[1], beside=sk.plan(made()[0], Stages(3))),
    ),
    Remedy(
        "SK901",
        "splitkit.split(gm, plan).view() draws it.",
        lambda: Plan.of({}).view(),
        lambda: "<html" in sk.split(made()[0], made()[1]).view().html,
    ),
    Remedy(
        "SK901",
        "live=True is for plans and splits; use .view().",
        lambda: view(made()[3], live=True),
        (
            lambda: "<html" in made()[3].view().html,
            lambda: bool(view(made()[1], live=True).borders),
            lambda: bool(view(sk.split(made()[0], made()[1]), live=True).borders),
        ),
    ),
    Remedy(
        "SK901",
        "Leave live=True out, and plan again for other stages.",
        lambda: view(staged(), live=True),
        (lambda: "<html" in view(staged()).html, lambda: drawn(stagedsteps.recomputed())),
    ),
    Remedy(
        "SK901",
        "Give what splitkit.simulate_schedule returns.",
        lambda: drawn(made()[1], run=sk.simulate_memory(made()[0])),
        lambda: drawn(made()[1], run=made()[3]),
    ),
    Remedy(
        "SK903",
        (
            "Give prices in seconds: --costs roofline:h100 on the command line, or "
            "costs=splitkit.costs.roofline(gm, 'h100'), to the plan or to the picture and `stage_costs`."
        ),
        lambda: drawn(sk.plan(made()[0], Stages(2)), run=untimed()),
        (
            lambda: drawn(timed := sk.plan(made()[0], Stages(2), made()[2]), run=stepped(made()[0], timed, made()[2])),
            lambda: drawn(
                bare := sk.plan(made()[0], Stages(2)), costs=made()[2], run=stepped(made()[0], bare, made()[2])
            ),
        ),
    ),
]


def untimed():
    gm = made()[0]
    return stepped(gm, sk.plan(gm, Stages(2)), sk.costs.flops(gm))


@pytest.mark.parametrize("remedy", CASES, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_pictures(remedy):
    remedy.carry_out()


def test_borders_of_a_widget():
    widget = view(made()[1], live=True)
    with refusal("SK901", "Give increasing numbers from 0 to {...}.") as caught:
        widget.borders = [0, 999]
    last = int(caught.value.remedy.rstrip(".").split()[-1])
    widget.borders = [0, 1, last]
    assert widget.borders == [0, 1, last]


def test_steps_of_other_plans():
    gm, _, costs, run = made()
    three = sk.plan(gm, Stages(3), costs)
    with refusal("SK901", "Simulate the stages of this plan: {...}.") as caught:
        drawn(three, run=run)
    code = caught.value.remedy.removeprefix("Simulate the stages of this plan: ").rstrip(".")
    stages = eval(code, {"splitkit": sk, "flow": sk.analyze(gm), "plan": three, "costs": costs})
    assert drawn(three, run=sk.simulate_schedule(stages, "1f1b", 4))
    with refusal("SK901", "Simulate the stages of this plan: {...}.") as caught:
        drawn(staged(), run=run)
    code = caught.value.remedy.removeprefix("Simulate the stages of this plan: ").rstrip(".")
    stages = eval(code, {"step": staged(), "costs": stagedsteps.captured()[1]})
    assert drawn(staged(), run=sk.simulate_schedule(stages, "zbv", 4))


def test_steps_that_ran(tmp_path):
    _, plan, _, run = made()
    with refusal("SK901", "Give what StepRecorder.measured or splitkit.pipeline.trace.MeasuredStep.load returns."):
        drawn(plan, run=run, measured=run)
    step = ran(tmp_path)
    assert drawn(plan, run=run, measured=step)
    other = sk.simulate_schedule(run.stages, "gpipe", 5)
    for given in (None, other):
        with refusal(
            "SK901", "Simulate the actions that ran: run=splitkit.simulate_schedule(stages, measured.order)."
        ) as caught:
            drawn(plan, run=given, measured=step)
        code = caught.value.remedy.partition("run=")[2].rstrip(".")
        assert drawn(plan, run=eval(code, {"splitkit": sk, "stages": run.stages, "measured": step}), measured=step)


def test_traces_of_replicas(tmp_path):
    step = ran(tmp_path)
    twice = replace(step, timeline=(*step.timeline, *(e._replace(rank=1 - e.rank) for e in step.timeline)))
    with refusal("SK901", "Record one pipeline, without --dp; https://ui.perfetto.dev shows this trace as it is."):
        _ = twice.order
    assert step.order.rank_of == (0, 1) and issubclass(ViewError, sk.SplitError)


@pytest.mark.parametrize("name", ["page.html", "page.svg"])
def test_a_file_of_a_page_or_a_picture(name, tmp_path):
    plan = made()[1]
    with refusal("SK901", "Name it page.html; or page.svg for a still picture."):
        plan.to_html(tmp_path / "page.png")
    plan.to_html(tmp_path / name)
    text = (tmp_path / name).read_text("utf-8")
    assert text.startswith("<svg ") if name.endswith(".svg") else "<html" in text
