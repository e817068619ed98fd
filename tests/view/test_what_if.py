"""Other steps of the same stages: each number is the simulator's, and the page shows the quickest that fit."""

from __future__ import annotations

import pytest
from browser import NEEDS_CHROMIUM
from ownorders import own_order
from steeredpages import GPT2, assert_quiet, planned, shown, side

import splitkit as sk
from splitkit.pipeline.order import PipelineOrder
from splitkit.units import duration, size
from splitkit.view.data.ladder import LadderView, what_if


@pytest.fixture(scope="module")
def priced():
    flow, plan, costs = planned("gpt2", 4, **GPT2)
    return flow, plan, costs, sk.stage_costs(flow, plan, costs)


@pytest.mark.parametrize(("schedule", "links", "more"), [
    ("1f1b", "nvlink4", {}),
    ("gpipe", None, {}),
    ("interleaved-1f1b", "pcie4", {"ranks": 2, "static_buffers": True}),
])  # fmt: skip
def test_every_row_is_what_the_simulator_says(priced, schedule, links, more):
    stages = priced[-1]
    run = sk.simulate_schedule(stages, schedule, 8, links=links, **more)
    told = what_if(run)
    assert told["microbatches"] == [4, 8, 16, 32] and len(told["rows"]) > 100
    for s, m, k, ranks, seconds, bubble, peak, _ in told["rows"][::7]:
        word, link = told["schedules"][s], told["links"][k]
        given = {"as given": links, "none": None}.get(link, link)
        options = {**more, "ranks": more.get("ranks") if word == schedule else None}
        same = sk.simulate_schedule(stages, word, told["microbatches"][m], links=given, **options)
        assert (ranks, seconds, bubble, peak) == (same.ranks, same.seconds, same.bubble, max(same.peaks))
    own = told["rows"][told["own"]]
    assert own[4:] == [run.seconds, run.bubble, max(run.peaks), 0] and told["schedules"][own[0]] == schedule


def test_orders_of_ones_own_and_long_steps_have_none(priced):
    stages = priced[-1]
    mine = own_order(["0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"])
    for name in ("mine", "1F1B"):  # also one that takes the name of a schedule
        assert what_if(sk.simulate_schedule(stages[:2], PipelineOrder(name, mine.ranks))) is None
    assert what_if(sk.simulate_schedule(stages, "gpipe", 1000)) is None
    long = what_if(sk.simulate_schedule(stages, "gpipe", 200))
    assert {long["microbatches"][row[1]] for row in long["rows"]} == {100, 200}


@NEEDS_CHROMIUM
def test_the_page_lists_the_quickest_that_fit_and_follows_the_links(browser, tmp_path, priced):
    flow, plan, costs, stages = priced
    run = sk.simulate_schedule(stages, "gpipe", 8, links="pcie4")
    limit = max(run.peaks) - 1
    page, told = shown(browser, tmp_path, LadderView(flow, plan, costs, run=run, memory=limit)), what_if(run)

    def listed():
        rows = "[...document.querySelectorAll('aside section:not([class]) tbody tr')]"
        return page.value(f"{rows}.map(r => [...r.cells].map(c => c.innerText))")

    def expected(link):
        rows = [row for row in told["rows"] if told["links"][row[2]] == link]
        best = sorted(rows, key=lambda row: (row[6] > limit, row[4] / told["microbatches"][row[1]]))
        ranks = ["" if row[3] == run.ranks else f", {row[3]} ranks" for row in best]
        names = [f"{told['schedules'][row[0]]} ×{told['microbatches'][row[1]]}" for row in best]
        return [f"{name}{more}" for name, more in zip(names, ranks, strict=True)]

    rows = listed()
    assert [row[0] for row in rows[:6]] == expected("as given")[:6]
    assert rows[-1][0] == "gpipe ×8 (this)" and rows[-1][2] == "0.0 %" and rows[-1][4] == size(max(run.peaks))
    assert page.value("document.querySelectorAll('aside section:not([class]) .bad').length") >= 1
    page.value(
        """(() => { const s = document.querySelector('aside select');
        s.value = [...s.options].findIndex(o => o.text === 'none'); s.dispatchEvent(new Event('change')); })()"""
    )
    assert [row[0] for row in listed()[:6]] == expected("none")[:6]
    page.value("document.querySelector('aside section:not([class]) tbody tr').click()")
    first = min(
        (row for row in told["rows"] if told["links"][row[2]] == "none" and row[6] <= limit),
        key=lambda row: row[4] / told["microbatches"][row[1]],
    )
    assert f"step {duration(first[4])}; splitkit plan … --schedule {told['schedules'][first[0]]}" in side(page)
    page.value("splitkit.setBorders([0, 2, splitkit.data.rows.length])")
    assert "what if" not in side(page)
    assert_quiet(page)


def entered(page, text):
    page.value(
        f"""(() => {{ const field = document.querySelector('aside .limit input');
        field.value = {text!r}; field.dispatchEvent(new Event('change')); }})()"""
    )
    page.settle()


@NEEDS_CHROMIUM
def test_another_memory_limit_is_compared_with_at_once_and_kept_in_the_address(browser, tmp_path, priced):
    flow, plan, costs, stages = priced
    run = sk.simulate_schedule(stages, "gpipe", 8, links="pcie4")
    page = shown(browser, tmp_path, LadderView(flow, plan, costs, run=run))
    red = "[...document.querySelectorAll('aside td.bad')].map(cell => cell.textContent)"
    assert page.value(red) == []
    limit = sorted(run.peaks)[1]
    entered(page, f"{limit} B")
    above = [size(peak) for peak in run.peaks if peak > limit]
    assert len(above) == 2 and all(text in page.value(red) for text in above)
    assert "the memory limit; red figures are above it" in side(page)
    address = page.value("location.href")
    assert f"limit={limit}" in address
    for text, found in (("1.5 GiB", 1.5 * 2**30), ("2kb", 2000), ("80GiB", 80 * 2**30), ("7", 7)):
        entered(page, text)
        assert page.value("splitkit.data.memory") == found
    entered(page, "much")
    assert page.value("splitkit.data.memory") == 7  # text that is not a size changes nothing, and is marked
    assert page.value("document.querySelector('aside .limit input').getAttribute('aria-invalid')") == "true"
    entered(page, "")
    assert page.value("splitkit.data.memory") is None and page.value(red) == []
    assert "limit=" not in page.value("location.href")
    browser("Page.navigate", url="about:blank")
    browser("Page.navigate", url=address)
    browser.value("new Promise(done => setTimeout(done, 300))")
    assert page.value("splitkit.data.memory") == limit and all(text in page.value(red) for text in above)
    assert_quiet(page)
