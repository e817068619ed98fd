"""Parts that backward runs again: in the data of a page, in the still picture, and once borders have moved."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from browser import NEEDS_CHROMIUM
from keptmodels import Convolutions
from steeredpages import GPT2, assert_quiet, planned, shown, side

import splitkit as sk
from splitkit.graph.node_values import value_bytes
from splitkit.memory.segment import RNG_STATE_BYTES
from splitkit.pipeline.stage_prices import StagePrices, stage_costs
from splitkit.plans.record import checkpointed
from splitkit.policies import Stages
from splitkit.units import duration, size
from splitkit.view.data.ladder import LadderView, kept_between, step_choices
from splitkit.view.svg.ladder_svg import ladder_svg

in_browser = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def priced():
    return planned("gpt2", 3, **GPT2)


def some_again(plan, keys):
    return replace(plan, parts={k: replace(p, call="checkpoint") if k in keys else p for k, p in plan.parts.items()})


def stepped(flow, plan, costs, schedule="1f1b", microbatches=6, **options):
    run = sk.simulate_schedule(stage_costs(flow, plan, costs), schedule, microbatches, **options)
    return LadderView(flow, plan, costs, run=run)


def part_of_borders(borders, row):
    return sum(row >= border for border in borders[1:-1])


def moved_plan(view, borders, keys):
    """The plan with borders above these rows, of which backward runs the parts in ``keys`` again."""
    part = {node: part_of_borders(borders, row) for node, row in view.rows.of.items()}
    return some_again(sk.plan(view.flow.root, lambda n: part.get(n, 0)), keys)


def test_the_other_choice_is_priced_as_the_same_plan_with_and_without(priced):
    flow, plan, costs = priced
    prices = StagePrices(flow, costs)
    for given, words in ((plan, ["no", "yes"]), (checkpointed(plan), ["yes", "no"])):
        found = step_choices(prices, given, stepped(flow, given, costs).run)
        assert [*found] == words and found["no"] == prices.of(plan) and found["yes"] == prices.of(checkpointed(plan))
    mixed = some_again(plan, {1})
    found = step_choices(prices, mixed, stepped(flow, mixed, costs).run)
    assert [*found] == ["in some parts", "no", "yes"] and found["in some parts"] == prices.of(mixed)


def test_where_there_is_nothing_else_to_choose(priced):
    flow, plan, costs = priced
    other = sk.simulate_schedule([replace(s, forward=1.0) for s in stage_costs(flow, plan, costs)], "1f1b", 6)
    assert [*step_choices(StagePrices(flow, costs), plan, other)] == ["no"]
    inference = sk.simulate_schedule(stage_costs(flow, plan, costs, optimizer=None), "1f1b", 6)
    assert [*step_choices(StagePrices(flow, costs, None), plan, inference)] == ["no"]
    gm = sk.capture(Convolutions().train(), torch.randn(2, 3, 8, 8), torch.tensor([1, 2]))  # writes in place
    flow, costs = sk.analyze(gm), sk.costs.training(sk.costs.roofline(gm, "a100"))
    plan = sk.plan(gm, Stages(2, seconds=1), costs)
    told = stepped(flow, plan, costs).to_dict()["run"]["whatIf"]
    assert told["recompute"] == ["no"] and {row[7] for row in told["rows"]} == {0}
    with pytest.raises(sk.errors.PlanError, match="SK207"):
        stage_costs(flow, checkpointed(plan), costs)


@pytest.mark.parametrize("again", [{0, 1, 2}, {1}])
def test_what_lies_between_forward_and_backward_is_what_the_stages_keep(priced, again):
    flow, plan, costs = priced
    view = LadderView(flow, some_again(plan, again), costs)
    data = view.still()
    assert data["rerun"] == [k in again for k in range(3)]

    def part(node):
        return view.part_of_row(view.rows.of[flow.producer(node)])

    for k in again:
        taken = [(a, b, nbytes) for a, b, nbytes in data["saved"] if view.part_of_row(b) == k]
        own = [n for n in flow.index if flow.producer(n) in view.rows.of and part(n) == k]
        # of what the graph returns only the loss is held
        returned = [n for n in own if any(user.op == "output" for user in n.users)]
        ends = [n for n in returned if n.meta["val"].numel() == 1]
        given = [n for n in own if n in ends or any(user.op != "output" and part(user) > k for user in n.users)]
        kept = sum(nbytes for *_, nbytes in taken) + sum(map(value_bytes, given)) + RNG_STATE_BYTES
        assert kept == view.stages[k].saved_bytes
        assert all(view.part_of_row(a) < k or a == b for a, b, _ in taken)
    plain = LadderView(flow, plan, costs).still()["saved"]
    others = [one for one in data["saved"] if view.part_of_row(one[1]) not in again]
    assert others == [one for one in plain if view.part_of_row(one[1]) not in again]


def test_the_still_picture_says_which_stages_run_again(priced):
    flow, plan, costs = priced
    plain, mixed = (ladder_svg(LadderView(flow, p, costs)) for p in (plan, some_again(plan, {1})))
    assert "runs again" not in plain and "recomputed" not in plain
    assert mixed.count(">recomputed<") == 1 and "hatched: runs again in backward" in mixed
    view = LadderView(flow, some_again(plan, {1}), costs)
    rows = [row for row in range(len(view.rows)) if view.part_of_row(row) == 1]
    seconds = sum(sum(view.still()["times"][way][row] for row in rows) for way in ("forward", "backward", "forward"))
    assert f">{duration(seconds)}<" in mixed and seconds == pytest.approx(
        view.stages[1].forward + view.stages[1].backward
    )
    inference = ladder_svg(LadderView(flow, checkpointed(plan), costs, optimizer=None))
    assert "again" not in inference and "recomputed" not in inference


def test_plans_beside_are_priced_with_their_own_parts(priced):
    flow, plan, costs = priced
    view = replace(stepped(flow, plan, costs), beside=(checkpointed(plan),))
    (beside,) = view.to_dict()["beside"]
    again = stage_costs(flow, checkpointed(plan), costs)
    assert beside["stages"]["saved"] == [stage.saved_bytes for stage in again]
    assert beside["step"]["peak"] == max(sk.simulate_schedule(again, "1f1b", 6).peaks)


MOVED = "(data, borders) => new Prices(data).stages(borders, false)"


@in_browser
@pytest.mark.parametrize(("again", "schedule"), [({0, 1, 2}, "1f1b"), ({1}, "gpipe")])
def test_stages_of_moved_borders_are_those_of_python(browser, tmp_path, priced, again, schedule):
    flow, plan, costs = priced
    view = stepped(flow, some_again(plan, again), costs, schedule, links="pcie4")
    data, rows = view.to_dict(), len(view.rows)
    assert (data["stretches"] is None) == (len(again) == 3)
    page = shown(browser, tmp_path, view)
    for borders in ([0, 2, 4, rows], [0, 1, rows - 1, rows], [0, 3, rows], [0, 1, 2, 4, rows]):
        count = len(borders) - 1
        runs_again = again if count == 3 else {*range(count)} if len(again) == 3 else set()
        made = moved_plan(view, borders, runs_again)
        stages = StagePrices(flow, costs).of(made)
        told = page.value(f"({MOVED})({json.dumps(data)}, {borders})")
        for here, stage in zip(told, stages, strict=True):
            held = (stage.saved_bytes, stage.temporary_bytes, stage.fixed_bytes)
            assert (here["saved"], here["temporary"], here["fixed"]) == held
            assert (here["forward"], here["backward"]) == pytest.approx((stage.forward, stage.backward), rel=1e-9)
        page.value(f"splitkit.setBorders({borders})")
        assert page.value("splitkit.run") is None
        part_of = partial(part_of_borders, borders)
        kept = kept_between(
            view._saved, view._taken, view.rows.of.__getitem__, part_of, [k in runs_again for k in range(count)]
        )
        assert page.value("splitkit.saved") == [list(one) for one in kept]
        calls = [part["call"] for part in page.value("planFile(splitkit).parts")]
        assert calls == ["checkpoint" if k in runs_again else "plain" for k in range(count)]
    page.value("splitkit.asPlanned()")
    assert page.value("splitkit.saved") == [list(one) for one in view.still()["saved"]]
    assert_quiet(page)


@in_browser
def test_the_page_says_which_stages_run_again(browser, tmp_path, priced):
    flow, plan, costs = priced
    view = stepped(flow, some_again(plan, {1}), costs)
    page = shown(browser, tmp_path, view)
    legend = "runs again in backward: such a stage keeps only its inputs"
    assert legend in side(page)
    page.value("splitkit.select({stage: 1})")
    assert "backward runs it again" in side(page) and size(view.stages[1].saved_bytes) in side(page)
    assert "keeps its inputs only" in page.value("splitkit.describe({stage: 1})")
    both = "(at => [at.forward, at.backward])(splitkit.priceOf(splitkit.borders[1], splitkit.borders[2]))"
    assert page.value(both) == pytest.approx([view.stages[1].forward, view.stages[1].backward])
    rows = "[...Array(splitkit.borders[2] - splitkit.borders[1]).keys()].map(i => splitkit.borders[1] + i)"
    each = page.value(f"{rows}.map(row => splitkit.priceOf(row, row + 1).backward)")
    assert sum(each) == pytest.approx(view.stages[1].backward) and all(each)
    page.value("splitkit.select({stage: 0})")
    assert "backward runs it again" not in side(page)
    assert "keeps its inputs only" not in page.value("splitkit.describe({stage: 0})")
    assert legend not in side(shown(browser, tmp_path, stepped(flow, plan, costs)))


@in_browser
def test_a_stage_that_nobody_trains_runs_nothing_again(browser, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    model[0].requires_grad_(False)
    gm = sk.capture(model, torch.randn(4, 8))
    flow, costs = sk.analyze(gm), sk.costs.training(sk.costs.roofline(gm, "a100"))
    plan = checkpointed(sk.plan(gm, {node: min(i, 1) for i, node in enumerate(flow.nodes)}))
    view = LadderView(flow, plan, costs)
    page = shown(browser, tmp_path, view)
    assert page.value("splitkit.runsAgain") == [False, page.value("splitkit.stages[1].backward") > 0] == [False, True]
    assert page.value("splitkit.priceOf(0, 1).backward") == 0
    assert ladder_svg(view).count(">recomputed<") == 1


def chosen(page, name):
    return page.value(f"document.querySelector('aside select[aria-label={name}]').selectedOptions[0].text")


def choose(page, name, word):
    page.value(
        f"""(() => {{ const s = document.querySelector('aside select[aria-label={name}]');
        s.value = [...s.options].findIndex(o => o.text === {word!r}); s.dispatchEvent(new Event('change')); }})()"""
    )


@in_browser
def test_what_is_alive_in_stages_that_run_again_is_what_they_receive_and_send(browser, tmp_path, priced):
    """And the state of the generator, which is not a copy; that they could keep less is not said of them."""
    flow, plan, costs = priced
    texts = []
    for made in (plan, checkpointed(plan)):
        page = shown(browser, tmp_path, stepped(flow, made, costs))
        texts.append(page.value("document.querySelector('aside').innerText"))
        kinds = page.value("splitkit.heldIn(splitkit.run, 1).values.map(each => each[1])")
        assert ("saved" in kinds) is (made is plan) and kinds
    assert ["would cost its forward again" in text for text in texts] == [True, False]
    assert ["state of the random number generator" in text for text in texts] == [False, True]


@in_browser
def test_recompute_is_one_of_the_other_steps_with_undo_and_in_the_address(browser, tmp_path, priced):
    flow, plan, costs = priced
    view = stepped(flow, plan, costs, "gpipe", links="pcie4")
    told, page = view.to_dict()["run"]["whatIf"], shown(browser, tmp_path, view)

    def listed():
        rows = "[...document.querySelectorAll('aside section:not([class]) tbody tr')]"
        return page.value(f"{rows}.map(r => [...r.cells].map(c => c.innerText))")

    def expected(again):
        each = sorted(
            (row for row in told["rows"] if row[2] == 0 and told["recompute"][row[7]] == again),
            key=lambda row: row[4] / told["microbatches"][row[1]],
        )
        return [(size(row[6]), f"{100 * row[5]:.1f} %") for row in each[:6]]

    def shown_now():
        return [(row[4], row[3]) for row in listed()[:6]]

    assert chosen(page, "recompute") == "no" and shown_now() == expected("no")
    before = listed()
    choose(page, "recompute", "yes")
    assert chosen(page, "recompute") == "yes" and shown_now() == expected("yes")
    # the same schedule and microbatches stay in the list, and their step is Python's
    run = sk.simulate_schedule(StagePrices(flow, costs).of(checkpointed(plan)), "gpipe", 6, links="pcie4")
    own = next(row for row in listed() if row[0] == "gpipe ×6")
    assert own[4] == size(max(run.peaks)) and own[3] == f"{100 * run.bubble:.1f} %"
    page.value("document.querySelector('aside section:not([class]) tbody tr').click()")
    assert " --recompute plans stages for it" in side(page)
    address = page.value("location.href")
    assert "whatif=0%2C1%2C" in address
    page.value("splitkit.undo()")
    assert chosen(page, "recompute") == "yes" and "plans stages for it" not in side(page)
    page.value("splitkit.undo()")
    assert chosen(page, "recompute") == "no" and listed() == before and "whatif" not in page.value("location.href")
    page.value("splitkit.redo(); splitkit.redo()")
    assert "--recompute plans" in side(page) and page.value("location.href") == address
    browser("Page.navigate", url="about:blank")
    browser("Page.navigate", url=address)
    browser.value("new Promise(done => setTimeout(done, 300))")
    assert chosen(page, "recompute") == "yes" and "--recompute plans" in side(page)
    for bad in ("9,1,-1", "0,5,-1", "0,1,99999", "0,1", "x"):
        browser("Page.navigate", url="about:blank")
        browser("Page.navigate", url=address.partition("#")[0] + f"#whatif={bad}")
        browser.value("new Promise(done => setTimeout(done, 300))")
        assert chosen(page, "recompute") == "no" and chosen(page, "links") == "as given"
    assert_quiet(page)
