"""Remedies of errors about pipeline schedules and their orders (SK33x), and about syntheses of orders."""

from __future__ import annotations

import re

import pytest
from carried import Remedy, refusal
from ownorders import own_order

import splitkit as sk
from splitkit.extend import Schedule, register_schedule
from splitkit.pipeline import schedules
from splitkit.pipeline.message_order import MessageOrder
from splitkit.pipeline.order import Action, PipelineOrder, StageCopies
from splitkit.pipeline.order_messages import order_messages
from splitkit.pipeline.schedules import pipeline_order, schedule_named
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.pipeline.synthesize import load_order, order_from_csv, synthesize

STAGE = StageCosts(1.0, 2.0, saved_bytes=100)
TWO = [STAGE, STAGE]


def step(stages=2, schedule="1f1b", microbatches=4, **options):
    return sk.simulate_schedule([STAGE] * stages, schedule, microbatches, **options).seconds > 0


def order(*rows):
    return own_order(rows).microbatches > 0


def actions(*rows):
    return PipelineOrder("mine", tuple(tuple(row) for row in rows))


def one_by_one(stages, microbatches, ranks):
    return [[Action(s, kind, m) for m in range(microbatches) for kind in "FB"] for s in range(stages)]


def divided(stages, microbatches, ranks):
    return [[Action(s, kind, m) for m in range(microbatches) for kind in "FIW"] for s in range(stages)]


@pytest.fixture(autouse=True)
def _as_before():
    known = dict(schedules._KNOWN)
    yield
    schedules._KNOWN.clear()
    schedules._KNOWN.update(known)
    schedules._order.cache_clear()


def registered(*args, **fields):
    register_schedule(Schedule("mine", *args, **fields))
    return pipeline_order("mine", 2, 4).microbatches == 4


def messages(*rows):
    """The order of two stages and one microbatch with its messages as the rows say."""
    plain = own_order(["0F0 0B0", "1F0 1B0"])
    return bool(MessageOrder("mine", plain.ranks, tuple(tuple(row.split()) for row in rows)).entries)


def offloading(schedule="1f1b"):
    stage = StageCosts(1.0, 2.0, saved_bytes=100, copies=StageCopies(100, 0.1, 0.1, 0.1, 0.1))
    return sk.simulate_schedule([stage] * 2, schedule, 4).seconds > 0


FIRST, LAST = "0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"


def half(*row):
    """A row of the second rank, with the first one as it should be."""
    return lambda: messages(FIRST, " ".join(row))


SIMPLE = [
    # ------------------------------------------------------------ SK330: numbers that do not fit
    Remedy(
        "SK330",
        "Give a whole number, 1 or more.",
        lambda: pipeline_order("1f1b", 0, 4),
        lambda: pipeline_order("1f1b", 1, 4),
    ),
    Remedy(
        "SK330",
        "A step has at most {...} forward actions: use fewer.",
        lambda: pipeline_order("1f1b", 10**6, 10**6),
        lambda: pipeline_order("1f1b", 4, 8),
    ),
    Remedy("SK330", "Give a StageCosts for each stage, and at least one.", lambda: step(0), step),
    Remedy(
        "SK330",
        "Give a StageCosts for each stage, and at least one.",
        lambda: synthesize([], 4),
        lambda: synthesize(TWO, 4),
    ),
    Remedy(
        "SK330",
        "Give microbatches=8, for example.",
        lambda: sk.simulate_schedule(TWO, "1f1b"),
        lambda: sk.simulate_schedule(TWO, "1f1b", microbatches=8),
    ),
    Remedy(
        "SK330",
        "Give as many.",
        lambda: step(2, pipeline_order("1f1b", 2, 4), 3),
        lambda: step(2, pipeline_order("1f1b", 2, 4), 4),
    ),
    Remedy(
        "SK330",
        "Give all stages of one rank the same number.",
        lambda: sk.simulate_schedule([STAGE, STAGE, STAGE, StageCosts(1, 1, replicas=2)], "zbv", 4),
        lambda: sk.simulate_schedule([StageCosts(1, 1, replicas=2)] * 4, "zbv", 4),
    ),
    Remedy("SK330", "List a name for each rank.", lambda: step(devices="ab"), lambda: step(devices=["a", "b"])),
    Remedy("SK330", "Name one for each {...}.", lambda: step(devices=["a"]), lambda: step(devices=["a", "b"])),
    Remedy(
        "SK330",
        "Give the actions without messages.",
        lambda: offloading(order_messages(TWO, "1f1b", 4).order),
        offloading,
    ),
    Remedy(
        "SK330",
        'Use "rank" or "pair".',
        lambda: order_messages(TWO, pipeline_order("1f1b", 2, 4), communicators="own"),
        (
            lambda: order_messages(TWO, pipeline_order("1f1b", 2, 4), communicators="rank"),
            lambda: order_messages(TWO, pipeline_order("1f1b", 2, 4), communicators="pair"),
        ),
    ),
    Remedy(
        "SK330",
        "Put a stage there.",
        lambda: order_messages([STAGE], own_order(["0F0 0B0", ""])),
        lambda: order_messages(TWO, own_order(["0F0 0B0", "1F0 1B0"])),
    ),
    Remedy(
        "SK330",
        "Each rank has the same number of stages: split into a multiple of the number of ranks.",
        lambda: synthesize([STAGE] * 3, 4, ranks=2),
        lambda: synthesize([STAGE] * 4, 4, ranks=2),
    ),
    Remedy(
        "SK302",
        "objective must be 'step' or 'span'.",
        lambda: synthesize(TWO, 2, objective="fast"),
        (lambda: synthesize(TWO, 2, objective="step"), lambda: synthesize(TWO, 2, objective="span")),
    ),
    Remedy(
        "SK302",
        "effort must be a number above 0 and at most {...}.",
        lambda: synthesize(TWO, 2, effort=0),
        lambda: synthesize(TWO, 2, effort=0.1),
    ),
    Remedy(
        "SK302",
        "placement must be 'loop' or 'V'.",
        lambda: synthesize([STAGE] * 4, 2, placement="U"),
        (lambda: synthesize([STAGE] * 4, 2, placement="loop"), lambda: synthesize([STAGE] * 4, 2, placement="V")),
    ),
    # ------------------------------------------------------------ SK331: orders that cannot run
    Remedy(
        "SK331",
        "Give stage, F, B, I or W, and microbatch.",
        lambda: actions([Action(0, "X", 0)]),
        lambda: actions([Action(0, "F", 0), Action(0, "B", 0)]),
    ),
    Remedy("SK331", "Number stages and microbatches from 0.", lambda: order("0F7 0B7"), lambda: order("0F0 0B0")),
    Remedy("SK331", "Number them from 0, and give at least one.", lambda: order("1F0 1B0"), lambda: order("0F0 0B0")),
    Remedy(
        "SK331",
        "Give every microbatch of every stage one F, and one B or one I and later one W, on one rank.",
        lambda: order("0F0 0F0 0B0"),
        (lambda: order("0F0 0B0"), lambda: order("0F0 0I0 0W0")),
    ),
    Remedy(
        "SK331",
        "Change the order so that the action that is waited for comes first.",
        lambda: order("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"),
        lambda: order("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"),
    ),
    Remedy(
        "SK331",
        "Write stage, F, B, I or W, and microbatch: 3F0; or leave the cell empty for idle time.",
        lambda: order_from_csv("0F0,what,0B0"),
        (lambda: order_from_csv("0F0,0B0"), lambda: order_from_csv("0F0,,0B0")),
    ),
    Remedy("SK331", "Give a row for each rank.", lambda: messages(FIRST), lambda: messages(FIRST, LAST)),
    Remedy(
        "SK331",
        "Write it as torch does: 3F0, 3SEND_F0, 4RECV_F0.",
        half("1RECV_F0", "1F0", "1B0", "1GIVE_B0"),
        half(LAST),
    ),
    Remedy(
        "SK331",
        "Leave it out: stages on one rank pass on values by themselves.",
        half("1RECV_F0", "1F0", "1SEND_F0", "1B0", "1SEND_B0"),
        half(LAST),
    ),
    Remedy(
        "SK331",
        "Move it to row {...}.",
        lambda: messages("0F0 0SEND_F0 1SEND_B0 0RECV_B0 0B0", LAST),
        lambda: messages(FIRST, LAST),
    ),
    Remedy(
        "SK331",
        "Leave all messages out, or let splitkit.order_messages place them.",
        half("1F0", "1B0", "1SEND_B0"),
        (
            lambda: order("0F0 0B0", "1F0 1B0"),
            lambda: sk.order_messages(TWO, own_order(["0F0 0B0", "1F0 1B0"])),
        ),
    ),
    Remedy(
        "SK331",
        "Correct its order=.",
        lambda: registered(lambda s, m, r: one_by_one(s, m - 1, r)),
        lambda: registered(one_by_one),
    ),
    Remedy(
        "SK331",
        "Correct its order= or placement=.",
        lambda: registered(lambda s, m, r: one_by_one(s, m, r)[::-1]),
        lambda: registered(one_by_one),
    ),
    Remedy("SK331", "Set divided=True.", lambda: registered(divided), lambda: registered(divided, divided=True)),
    Remedy(
        "SK331",
        "Use 1 or more.",
        lambda: registered(window=lambda stages, stage: 0),
        lambda: registered(window=lambda stages, stage: 1),
    ),
    Remedy(
        "SK331",
        "Let earlier stages have at least as many in flight.",
        lambda: registered(window=lambda stages, stage: 1 + stage),
        lambda: registered(window=lambda stages, stage: 2 - stage),
    ),
    # ------------------------------------------------------------ SK332: costs of stages
    Remedy(
        "SK332", "Give {...}, 0 or more, {...} at most.", lambda: StageCosts(-1.0, 1.0), lambda: StageCosts(0.0, 0.0)
    ),
    Remedy(
        "SK332",
        "Give a whole number, 1 or more.",
        lambda: StageCosts(1.0, 1.0, replicas=0),
        lambda: StageCosts(1.0, 1.0, replicas=1),
    ),
    Remedy(
        "SK332",
        'Give a text: "s", "nodes".',
        lambda: StageCosts(1.0, 1.0, unit=3),
        (lambda: StageCosts(1.0, 1.0, unit="s"), lambda: StageCosts(1.0, 1.0, unit="nodes")),
    ),
    Remedy(
        "SK332",
        "Give StageCopies or None.",
        lambda: StageCosts(1.0, 1.0, copies=3),
        lambda: StageCosts(1.0, 1.0, copies=None),
    ),
    # ------------------------------------------------------------ SK333: schedules that contradict themselves
    Remedy(
        "SK333", "Give a splitkit.extend.Schedule.", lambda: register_schedule("1f1b"), lambda: registered(one_by_one)
    ),
    Remedy(
        "SK333",
        "Give the schedule another name or word.",
        lambda: register_schedule(Schedule("1F1B", one_by_one)),
        (lambda: register_schedule(Schedule("mine too", one_by_one)), lambda: registered(one_by_one, word="another")),
    ),
    Remedy(
        "SK333",
        "Give order= in place of window=.",
        lambda: registered(window=lambda stages, stage: 1, divided=True),
        lambda: registered(divided, divided=True),
    ),
    Remedy(
        "SK333",
        "Give order=, or window= and no order.",
        lambda: Schedule("mine"),
        (lambda: registered(one_by_one), lambda: registered(window=lambda stages, stage: 1)),
    ),
    Remedy(
        "SK333",
        'Use "loop", or "V" with two stages on each rank.',
        lambda: Schedule("mine", one_by_one, placement="V"),
        (
            lambda: Schedule("mine", one_by_one, placement="loop"),
            lambda: Schedule("mine", one_by_one, placement="V", stages_per_rank=2),
        ),
    ),
    Remedy(
        "SK333",
        "Use a number >= 1, or None.",
        lambda: Schedule("mine", one_by_one, stages_per_rank=0),
        (lambda: registered(one_by_one, stages_per_rank=1), lambda: Schedule("mine", one_by_one, stages_per_rank=None)),
    ),
    Remedy("SK333", "Use letters and digits.", lambda: Schedule("?!", one_by_one), lambda: registered(one_by_one)),
]


@pytest.mark.parametrize("remedy", SIMPLE, ids=lambda r: f"{r.code} {r.told[:40]}")
def test_remedy(remedy):
    remedy.carry_out()


NUMBER = re.compile(r"\d+")


def numbers(error):
    return [int(found) for found in NUMBER.findall(error.value.remedy)]


def test_the_numbers_that_a_schedule_takes():
    with refusal("SK330", "Split into {...} stages{...}") as error:
        pipeline_order("zbv", 3, 8)
    for stages in numbers(error):
        pipeline_order("zbv", stages, 8)
    with refusal("SK330", "{...} has {...} stage{...} on each rank: {...}.") as error:
        pipeline_order("1f1b", 4, 8, ranks=2)
    ranks, stages = re.search(r"use (\d+) ranks, or split into (\d+) stages", error.value.remedy).groups()
    assert pipeline_order("1f1b", 4, 8, ranks=int(ranks)) and pipeline_order("1f1b", int(stages), 8, ranks=2)
    with refusal("SK330", "All ranks have the same number of stages: split into {...}{...}.") as error:
        pipeline_order("interleaved1f1b", 5, 8, ranks=2)
    for stages in numbers(error):
        pipeline_order("interleaved1f1b", stages, 8, ranks=2)
    with refusal("SK330", "A V has two stages on each rank: split into {...}.") as error:
        synthesize([STAGE] * 3, 4, placement="V")
    assert synthesize([STAGE] * numbers(error)[0], 4, placement="V")


def test_names_that_are_near():
    with refusal("SK330", "Known: {...}."):
        schedule_named("qqqqqq")
    with refusal("SK330", "Did you mean {...}?") as error:
        schedule_named("1f1")
    assert error.value.remedy.startswith("Did you mean 1F1B?")
    known = error.value.remedy.split("Known: ")[1].rstrip(".").split(", ")
    assert all(schedule_named(name).name == name for name in known)


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), [("DualPipeV", 8, 3), ("interleaved1f1b", 8, 9)])
def test_what_a_schedule_itself_refuses(schedule, stages, microbatches):
    with refusal("SK330", "{...}") as error:
        pipeline_order(schedule, stages, microbatches)
    told = re.search(r"Use ([\d or]+) microbatches", error.value.remedy)[1]
    for number in map(int, NUMBER.findall(told)):
        assert pipeline_order(schedule, stages, number)


def test_a_rank_without_room():
    with refusal("SK303", "Give it {...} bytes ({...}), smaller microbatches, or more stages.") as error:
        synthesize([StageCosts(1, 2, saved_bytes=1000007)] * 2, 4, memory="3KiB")
    need = numbers(error)[0]
    assert synthesize([StageCosts(1, 2, saved_bytes=1000007)] * 2, 4, memory=need)
    assert synthesize([StageCosts(1, 2, saved_bytes=100)] * 2, 4, memory="3KiB")  # smaller microbatches, or stages


def test_a_file_of_an_order(tmp_path):
    with refusal("SK504", "Name a CSV file with a row of actions for each rank."):
        load_order(tmp_path / "nothing.csv")
    (tmp_path / "order.csv").write_text("0F0,0B0\n1F0,1B0\n")
    with refusal("SK331", "Change the order so that the action that is waited for comes first."):
        order("0B0 0F0")
    assert load_order(tmp_path / "order.csv").microbatches == 1


def test_more_bytes_on_the_host_than_are_saved():
    copies = StageCopies(200, 1.0, 1.0, 1.0, 1.0)
    with refusal("SK332", "Give at most that many."):
        StageCosts(1.0, 2.0, saved_bytes=100, copies=copies)
    assert StageCosts(1.0, 2.0, saved_bytes=200, copies=copies)
