"""Random mouse and keyboard acts on each kind of page: none raises an error, and the page still says what it is."""

from __future__ import annotations

import random

import pytest
from browser import NEEDS_CHROMIUM
from campaigns import these_first
from capturedmodels import joint_graph
from steeredpages import GPT2, STEP, assert_quiet, planned, shown, side

import splitkit as sk
from splitkit.policies import MinCut, RecomputeAll, SaveAll, Stages
from splitkit.view.data.joint_ladder import HalvesView
from splitkit.view.data.ladder import LadderView

pytestmark = NEEDS_CHROMIUM
KEYS = ("ArrowDown", "ArrowUp", "ArrowLeft", "ArrowRight", "Enter", "Escape", "Home", "End", "Tab", "+", "-")


def of_stages():
    flow, plan, costs = planned("gpt2", 4, **GPT2)
    return LadderView(flow, plan, costs)


def of_a_step(name="gpt2"):
    flow, plan, costs = planned(name, 3, **GPT2)
    run = sk.simulate_schedule(sk.stage_costs(flow, plan, costs), "1f1b", 6, links="nvlink4")
    return LadderView(flow, plan, costs, run=run, memory=2**20)


def of_an_encoder_and_a_decoder():
    return of_a_step("t5")


def of_three_plans(name="gpt2"):
    flow, plan, costs = planned(name, 3, **GPT2)
    others = tuple(sk.plan(flow.root, Stages(count), costs) for count in (2, 4))
    return LadderView(flow, plan, costs, beside=others)


def of_three_plans_of_llama():
    return of_three_plans("llama")


def of_inference():
    flow, plan, costs = planned("gpt2", 2, **GPT2)
    return LadderView(flow, plan, costs, optimizer=None)


def of_forward_and_backward():
    joint = joint_graph("gpt2", **STEP)
    costs = sk.costs.roofline(joint.graph_module, "a100")
    pairs = [joint.split(policy, costs) for policy in (SaveAll(), MinCut(), RecomputeAll())]
    return HalvesView(joint.flow, pairs, costs)


def place(browser, rng, where):
    """A random point of an element."""
    left, top, wide, high = browser.value(
        f"(() => {{ const b = document.querySelector({where!r}).getBoundingClientRect();"
        " return [b.left, b.top, b.width, b.height]; })()"
    )
    return left + wide * rng.uniform(0.02, 0.98), top + high * rng.uniform(0.02, 0.98)


def act(browser, rng):
    """One act of a user, and what it was."""
    areas = ["main canvas", "aside", "header", *(["footer canvas"] if browser.value(HAS_CHART) else [])]
    where = rng.choice(["main canvas", *areas])
    x, y = place(browser, rng, where)
    kind = rng.choice(["move", "click", "double", "drag", "wheel", "key", "key", "slide", "press"])
    if kind == "move":
        browser.mouse("moved", x, y)
    elif kind in ("click", "double"):
        browser.click(x, y, 2 if kind == "double" else 1)
    elif kind == "drag":
        browser.drag(x, y, *place(browser, rng, where))
    elif kind == "wheel":
        browser.mouse("wheel", x, y, deltaX=0, deltaY=rng.choice([-400, -50, 50, 400]))
    elif kind == "key":
        key, alt = rng.choice(KEYS), rng.random() < 0.3
        browser.key(key, alt)
        return f"{key}{' with Alt' if alt else ''}"
    elif kind == "slide":
        count = rng.randint(1, 20)
        browser.value(f"splitkit.slider.value = {count}; splitkit.slider.dispatchEvent(new Event('input'))")
        return f"slider to {count}"
    else:
        browser.value(PRESS % rng.random())
    return f"{kind} in {where} at {x:.0f}, {y:.0f}"


HAS_CHART = "!!document.querySelector('footer canvas')"
PRESS = """(share => { const all = [...document.querySelectorAll('.sk button, .sk tbody tr')];
all[Math.floor(share * all.length)].click(); })(%f)"""


ALWAYS = [of_a_step, of_three_plans, of_inference, of_forward_and_backward]
OTHERS = [of_stages, of_an_encoder_and_a_decoder, of_three_plans_of_llama]


@pytest.mark.parametrize(
    ("make", "acts"), these_first([(make, 25) for make in ALWAYS], [(make, 150) for make in (*ALWAYS, *OTHERS)])
)
def test_no_act_breaks_a_page(browser, tmp_path, make, acts):
    page, rng, done = shown(browser, tmp_path, make()), random.Random(make.__name__), []
    for _ in range(acts):
        done.append(act(page, rng))
        assert page.faults() == [], done[-5:]
        sizes = "[splitkit.x, splitkit.y, splitkit.zoom, splitkit.height].every(Number.isFinite)"
        assert page.value(sizes), done[-5:]
    assert_quiet(page)
    assert "help" in side(page), done
    count = page.value("(splitkit.stages || splitkit.data.choices).length")
    assert page.value("splitkit.side.querySelector('tbody').rows.length") == count
    assert not any(word in page.value("splitkit.root.innerText") for word in ("NaN", "undefined", "null", "[object"))
