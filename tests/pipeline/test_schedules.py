"""The registry of schedules: what its entries promise, and that an entry is all it takes to add one."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from campaigns import these_first
from capturedmodels import captured_example

import splitkit as sk
from splitkit.cli import main
from splitkit.errors import PolicyError, ScheduleError
from splitkit.extend import Action, Schedule, register_schedule
from splitkit.pipeline import schedules
from splitkit.pipeline.memory import keeps_sent
from splitkit.pipeline.schedule import stalls
from splitkit.pipeline.schedules import known_schedules, pipeline_order, schedule_named, schedule_of
from splitkit.pipeline.simulate import StageCosts, simulate_schedule
from splitkit.policies import MemoryBudget, Stages
from splitkit.runtime.ranks.order_runner import order_of
from splitkit.view.data.ladder import LadderView

NAMES = [schedule.name for schedule in known_schedules()]
EQUAL = StageCosts(1.0, 1.0, 1.0, saved_bytes=1)


def step(name, ranks, microbatches, **options):
    count = ranks * schedule_named(name).usual_stages_per_rank
    return simulate_schedule([EQUAL] * count, name, microbatches, **options)


# V-Min, V-Half, eager 1F1B

PAPER = {"v-min": lambda p: (p + 4) // 3, "v-half": lambda p: (p + 2) // 2}
"""Whole microbatches in flight on a rank at most, of p ranks (Qi et al., NeurIPS 2024); 1F1B has p."""


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("ranks", [*range(1, 13), 16, 24])
def test_v_schedules_hold_what_their_paper_says(name, ranks):
    run = step(name, ranks, 4 * ranks)
    most = 2 * PAPER[name](ranks)  # of two stages each
    assert max(run.in_flight) == most
    assert max(memory.saved for memory in run.memory) == most


def test_v_schedules_hold_a_third_and_a_half_of_1f1b():
    whole = replace(EQUAL, saved_bytes=2)  # as much as the two stages of a rank
    highest = max(simulate_schedule([whole] * 24, "1f1b", 96).peaks)
    assert highest == 48
    assert max(step("v-min", 24, 96).peaks) == 18  # a third, and two more microbatches of one stage
    assert max(step("v-half", 24, 96).peaks) == 26  # a half, and one more
    assert max(step("zbv", 24, 96).peaks) == 48


def test_v_schedules_idle_less_than_1f1b():
    """As the paper has it: 2/3 of 1F1B's bubbles (V-Min), 1/2 (V-Half), the last one before actions are reordered."""
    idle = {name: step(name, 12, 48).bubble for name in ("1f1b", "v-min", "v-half")}
    assert idle["v-half"] < idle["v-min"] < 0.75 * idle["1f1b"]


@pytest.mark.parametrize("name", PAPER)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_v_schedules_take_few_microbatches(name, microbatches):
    for ranks in (1, 2, 3, 4, 6):
        order = pipeline_order(name, 2 * ranks, microbatches)  # which refuses what is missing, or waits for ever
        assert order.microbatches == microbatches
        assert order.rank_of == (*range(ranks), *reversed(range(ranks)))


def test_eager_1f1b_warms_up_twice_as_long():
    """As in the table of Alpa's OverlapFriendlyPipeDreamSchedule, whose first rank runs F0 to F4 before B0."""
    rows = [" ".join(f"{a.kind}{a.microbatch}" for a in row) for row in pipeline_order("eager-1f1b", 3, 6).ranks]
    assert rows == [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]
    assert step("eager-1f1b", 4, 16).in_flight == (7, 5, 3, 1)


def test_eager_1f1b_hides_messages_that_1f1b_waits_for():
    stages = [StageCosts(1.0, 2.0, activation_bytes=1)] * 4
    slow = sk.costs.Links.uniform(1.0)  # a message takes as long as a forward
    eager, plain = (simulate_schedule(stages, name, 16, links=slow).seconds for name in ("eager-1f1b", "1f1b"))
    work = 16 * 3
    assert eager < work + 16 < plain


# Entries


def test_listing_schedules_loads_neither_torch_nor_numpy():
    code = """
import sys
from splitkit.cli.parser import make_parser
from splitkit.pipeline.schedules import known_schedules
make_parser().format_help()
assert "v-min" in [schedule.word for schedule in known_schedules()]
assert not {"torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_docs_list_all_schedules():
    docs = Path(__file__).parents[2] / "docs" / "schedules.md"
    rows = re.findall(r"^\| `([\w-]+)`.* \| (1|2[^|]*) \| (yes|no) \|", docs.read_text(), re.MULTILINE)
    local = {1: "1", 2: "2, as a V", None: "2, or from `ranks=`"}
    told = [(s.word, local[s.stages_per_rank], "yes" if s.divided else "no") for s in known_schedules()]
    assert rows == told


@pytest.mark.parametrize("name", NAMES)
def test_an_order_is_recognized_and_what_its_entry_says(name):
    schedule = schedule_named(name)
    for ranks in (1, 2, 4):
        stages = ranks * schedule.usual_stages_per_rank
        order = pipeline_order(name, stages, 2 * ranks)
        assert schedule_of(order) is schedule
        assert order.rank_of == tuple(schedule.rank_of(stage, ranks) for stage in range(stages))
    assert schedule_named(schedule.word) is schedule
    other = sk.extend.PipelineOrder(name, tuple(row for row in pipeline_order("v-min", 4, 2).ranks))
    assert (schedule_of(other) is schedule) == (name == "V-Min"), "a name is not enough"


def test_what_was_sent_is_kept_to_the_end_of_the_step_except_by_torchs_class_for_1f1b():
    kept = {name: keeps_sent(step(name, 2, 4, static_buffers=True)) for name in NAMES}
    assert kept == dict.fromkeys(NAMES, True) | {"1F1B": False}
    assert not any(keeps_sent(step(name, 2, 4)) for name in NAMES)
    order = pipeline_order("1f1b", 2, 4)
    own = simulate_schedule([EQUAL] * 2, sk.extend.PipelineOrder("own", order.ranks), static_buffers=True)
    assert keeps_sent(own), "the interpreter runs it"


def test_gradients_that_gpipe_has_sent_add_up():
    """The last rank saves nothing beyond its received input, which lies in a static buffer: 4 of 10 bytes each.

    Under 1F1B, torch keeps the gradient that was sent last until it has the next one.
    """
    stages = [StageCosts(1, 1, saved_bytes=10, activation_bytes=10), StageCosts(1, 1, saved_bytes=10)]
    gpipe, usual = (simulate_schedule(stages, name, 4, static_buffers=True) for name in ("gpipe", "1f1b"))
    assert [run.memory[1].peak for run in (gpipe, usual)] == [4 * 10 + 4 * 10, 4 * 10 + 10]


def test_torchs_class_for_1f1b_keeps_the_last_activation_that_it_sent_by_itself():
    sizes = {"saved_bytes": 100, "temporary_bytes": 3}
    stages = [StageCosts(1, 1, activation_bytes=nbytes, **sizes) for nbytes in (10, 7, 0)]
    run = simulate_schedule(stages, "1f1b", 6, static_buffers=True)
    # buffers of 6 microbatches; those in flight; of rank 0 the output of microbatch 1, of rank 1 that of microbatch 0
    # and the gradient of the microbatch before; of rank 2 this gradient alone
    kept = [10, 7 + 10, 7]
    held = [6 * 10 + 3 * 100, 6 * (10 + 7) + 2 * (100 - 10), 6 * 7 + 100 - 7]
    assert [one.peak for one in run.memory] == [own + more + 3 for own, more in zip(held, kept, strict=True)]


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({}, "not one of order and window"),
        ({"order": list, "window": max}, "not one of order and window"),
        ({"order": list, "placement": "V"}, "placement='V' with stages_per_rank=1"),
        ({"order": list, "placement": "U"}, "placement='U'"),
        ({"order": list, "stages_per_rank": 0}, "stages_per_rank=0"),
        ({"window": max, "stages_per_rank": 2}, "a window, and several stages"),
        ({"window": max, "divided": True}, "a window, and several stages"),
        ({"order": list, "word": "--"}, "the name '--'"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(fields, reason):
    with pytest.raises(ScheduleError, match="SK333") as caught:
        Schedule("mine", **fields)
    assert reason in caught.value.reason


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(schedules, "_KNOWN", dict(schedules._KNOWN))


def one_by_one(stages, microbatches, ranks):
    """One microbatch in the pipeline at a time."""
    return [[Action(s, kind, m) for m in range(microbatches) for kind in "FB"] for s in range(stages)]


@pytest.mark.usefixtures("registry")
def test_a_name_that_is_taken_is_refused():
    for entry in (Schedule("GPIPE", one_by_one), Schedule("mine", one_by_one, word="1-f-1-b")):
        with pytest.raises(ScheduleError, match="SK333: .* has the name"):
            register_schedule(entry)
    register_schedule(Schedule("mine", one_by_one, word="my-own"))
    with pytest.raises(ScheduleError, match="SK333: mine has the name"):
        register_schedule(Schedule("other", one_by_one, word="my-own"))
    again = Schedule("mine", half_way_order)  # as a cell of a notebook that runs again
    register_schedule(again)
    assert schedule_named("mine") is again
    with pytest.raises(ScheduleError, match="no schedule is called 'my-own'"):
        schedule_named("my-own")
    with pytest.raises(ScheduleError, match="SK333"):
        register_schedule("1f1b")


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"order": lambda s, m, r: one_by_one(s, m + 1, r)}, "has (3, 5, 3) stages, microbatches and ranks"),
        ({"order": lambda s, m, r: one_by_one(s, m, r)[::-1]}, "and placement says (0, 1, 2)"),
        ({"order": lambda s, m, r: [[*map(divided, row)] for row in one_by_one(s, m, r)]}, "mine has "),
        ({"order": lambda s, m, r: [sorted(row) for row in one_by_one(s, m, r)]}, "never ends"),
        ({"window": lambda stages, stage: stage + 1}, "stage 1 has 2 microbatches in flight, and stage 0"),
        ({"window": lambda stages, stage: 0}, "window of 0"),
    ],
)
@pytest.mark.usefixtures("registry")
def test_an_order_that_is_not_what_its_entry_says_is_refused(fields, reason):
    register_schedule(Schedule("mine", **fields))
    with pytest.raises(ScheduleError, match="SK331") as caught:
        pipeline_order("mine", 3, 4)
    assert reason in caught.value.reason


def half_way_order(stages, microbatches, ranks):
    return one_by_one(stages, microbatches, ranks)


def divided(action):
    return action._replace(kind="I") if action.kind == "B" else action


@pytest.mark.usefixtures("registry")
def test_a_backward_that_is_divided_must_be_told():
    def order(stages, microbatches, ranks):
        kinds = "FIW"
        return [[Action(s, kind, m) for m in range(microbatches) for kind in kinds] for s in range(stages)]

    register_schedule(Schedule("mine", order))
    with pytest.raises(ScheduleError, match="SK331: mine divides backward"):
        pipeline_order("mine", 2, 2)
    register_schedule(Schedule("told", order, divided=True))
    assert pipeline_order("told", 2, 2).microbatches == 2


def test_windows_that_grow_are_known_to_stall():
    assert stalls([2, 2, 1]) is None and stalls([1, 1, 2]) == (0, 2) and stalls([3, 2, 2, 3]) == (1, 3)


# One entry is enough


@pytest.fixture(scope="module")
def gm():
    return captured_example("gpt2", layers=1, width=32, heads=2, seq=8, vocab=50).graph


def half_way(stages, stage):
    """A window between 1F1B's and eager 1F1B's."""
    return 1 + -(-3 * (stages - 1 - stage) // 2)


@pytest.mark.usefixtures("registry")
def test_one_entry_goes_through_all_that_reads_schedules(gm, tmp_path, capsys):
    register_schedule(Schedule("Half-Eager", window=half_way, swept=True))
    costs = sk.costs.training(sk.costs.roofline(gm, "h200"))
    plan = sk.plan(gm, Stages(4, "half eager", 8), costs)
    assert "Half-Eager" in plan.note
    stages = sk.stage_costs(sk.analyze(gm), plan, costs)
    run = sk.simulate_schedule(stages, "half_eager", 8)
    assert run.in_flight == (6, 4, 3, 1) and schedule_of(run.order).name == "Half-Eager"
    plain = sk.simulate_schedule(stages, "1f1b", 8)
    assert run.memory[0].saved == 6 * stages[0].saved_bytes > plain.memory[0].saved
    assert sk.plan(gm, MemoryBudget("1GiB", 2, schedule="half-eager"), costs).parts
    found = sk.sweep(gm, costs, stages=(2,), microbatches=(4,))
    assert "half-eager" in [row.schedule for row in found.rows]
    assert order_of("half-eager", 4, 8, 4).ranks == run.order.ranks
    assert main(["plan", "--help"]) == 0 and "half-eager" in "".join(capsys.readouterr().out.split())
    words = ["gpt2", "--size", "layers=1,width=32,heads=2,seq=8,vocab=50", "--stages", "2", "--schedule", "half-eager"]
    words += ["--costs", "roofline:h200"]
    assert main(["plan", *words, "--view", str(tmp_path / "page.html")]) == 0
    assert "Half-Eager" in capsys.readouterr().out
    assert "Half-Eager" in (tmp_path / "page.html").read_text()


OWN = """
from splitkit.extend import Action, Schedule

def order(stages, microbatches, ranks):
    return [[Action(s, kind, m) for m in range(microbatches) for kind in "FB"] for s in range(stages)]

one = Schedule("One by one", order)
"""


@pytest.mark.usefixtures("registry")
def test_the_command_line_takes_a_schedule_from_a_file(tmp_path, capsys):
    (tmp_path / "own.py").write_text(OWN)
    words = ["plan", "gpt2", "--size", "layers=1,width=32,heads=2,seq=8,vocab=50", "--stages", "2", "--schedule"]
    own = f"{tmp_path}/own.py:one"
    assert main([*words, own, "-o", str(tmp_path / "plan.json")]) == 0
    out = capsys.readouterr().out
    assert "One by one of 4 microbatches" in out and f"--schedule {own} --check" in out
    assert main([*words, f"{tmp_path}/own.py:two"]) == 2
    assert "own.py has no schedule called two\n  It has one." in capsys.readouterr().err
    assert main([*words, f"{tmp_path}/none.py:two"]) == 1
    assert "SK403" in capsys.readouterr().err


@pytest.mark.usefixtures("registry")
def test_an_entry_without_a_window_is_planned_and_drawn_as_it_came(gm):
    register_schedule(Schedule("one by one", one_by_one))
    costs = sk.costs.training(sk.costs.roofline(gm, "h200"))
    plan = sk.plan(gm, Stages(3, "one by one", 4), costs)
    run = sk.simulate_schedule(sk.stage_costs(sk.analyze(gm), plan, costs), "one by one", 4)
    assert run.in_flight == (1, 1, 1)
    page = LadderView(sk.analyze(gm), plan, costs, run=run).to_dict()["run"]
    drawn = [sk.extend.Action(stage, kind, microbatch) for _, kind, stage, microbatch, *_ in page["events"]]
    assert drawn == [action for row in run.order.ranks for action in row]


@pytest.mark.parametrize("name", these_first(["v-half"], ["v-min"]))
def test_v_schedules_are_planned(gm, name):
    costs = sk.costs.training(sk.costs.roofline(gm, "h200"))
    plan = sk.plan(gm, Stages(4, name, 8), costs)
    stages = sk.stage_costs(sk.analyze(gm), plan, costs)
    run = sk.simulate_schedule(stages, name, 8)
    assert run.ranks == 2 and run.replicas == (1, 1) and len(plan.parts) == 4
    page = LadderView(sk.analyze(gm), plan, costs, run=run).to_dict()["run"]
    drawn = [sk.extend.Action(stage, kind, microbatch) for _, kind, stage, microbatch, *_ in page["events"]]
    assert drawn == [action for row in run.order.ranks for action in row]
    with pytest.raises(PolicyError, match="puts several parts on one device"):
        MemoryBudget("1GiB", 2, schedule=name)
