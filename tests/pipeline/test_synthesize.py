"""`splitkit.synthesize`: never worse than a known order, within memory, its bounds true, and its files torch's."""

from __future__ import annotations

from itertools import permutations, product

import pytest
from campaigns import these_first
from test_order_file import rows_of, torchs

import splitkit as sk
from splitkit.errors import NoPlanError, PolicyError, ScheduleError
from splitkit.extend import Action, PipelineOrder, StageCosts
from splitkit.pipeline.synthesize import load_order, synthesize


def stages_of(count, saved=100, waiting=40, **more):
    return [StageCosts(2.0, 3.0, 1.5, saved_bytes=saved, deferred_bytes=waiting, **more) for _ in range(count)]


class Slow:
    def seconds(self, source, target, nbytes):
        return 0.25 + nbytes / 100


def all_orders(stages, microbatches):
    """All orders of stages on ranks of their own, in which the microbatches come in any turn."""
    rows = []
    for stage in range(stages):
        actions = [Action(stage, kind, m) for m in range(microbatches) for kind in "FIW"]
        rows.append(
            [row for row in permutations(actions) if all(row.index(a) < row.index(b) for a, b in pairs(actions))]
        )
    return product(*rows)


def pairs(actions):
    return [(a, b) for a in actions for b in actions if a[2] == b[2] and a[1] + b[1] in ("FI", "IW")]


def test_no_order_of_microbatches_in_any_turn_is_better():
    """All 8,100 orders of two stages and microbatches, with messages: the proven value is the least of them."""
    first = StageCosts(2.0, 3.0, 1.5, saved_bytes=100, deferred_bytes=60, activation_bytes=10)
    stages = [first, StageCosts(1.0, 1.0, 4.0, saved_bytes=80, deferred_bytes=30)]
    found = {limit: synthesize(stages, 2, limit, links=Slow()) for limit in (None, 165, 130)}
    least = dict.fromkeys(found, float("inf"))
    for rows in all_orders(2, 2):
        try:
            run = sk.simulate_schedule(stages, PipelineOrder("any", rows), links=Slow())
        except ScheduleError:
            continue
        for limit in found:
            if limit is None or max(run.peaks) <= limit:
                least[limit] = min(least[limit], run.seconds)
    for limit, one in found.items():
        assert one.value == pytest.approx(least[limit]) and one.bound <= least[limit] + 1e-9
    assert found[None].optimal and found[130].value > found[None].value


@pytest.mark.parametrize(
    ("placement", "ranks", "static", "names"),
    these_first(
        [("loop", 4, False, ["1f1b", "gpipe"]), ("V", 2, False, ["v-half"]), ("V", 2, True, ["zbv"])],
        [("V", 2, False, ["zbv", "v-min"])],
    ),
)
def test_it_keeps_to_memory_and_is_not_worse_than_a_known_schedule_that_does(placement, ranks, static, names):
    stages = stages_of(4, activation_bytes=8, temporary_bytes=5, parameter_bytes=50)
    shared = {"ranks": ranks, "links": Slow(), "static_buffers": static}
    for name in names:
        known = sk.simulate_schedule(stages, name, 4, **shared)
        found = synthesize(stages, 4, known.peaks, placement=placement, effort=0.1, **shared)
        assert all(peak <= limit for peak, limit in zip(found.peaks, known.peaks, strict=True))
        assert found.bound <= found.value <= known.seconds + 1e-9, name
        assert found.value == max(found.ends) == found.run.seconds and found.placement == placement


def test_less_memory_takes_longer_and_too_little_is_refused():
    stages = stages_of(3)
    values = [synthesize(stages, 3, limit, effort=0.1).value for limit in (100, 140, 180, 300, None)]
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    with pytest.raises(NoPlanError, match="rank 0 takes 100 B for one microbatch at a time, and has 99 B") as caught:
        synthesize(stages, 3, 99)
    assert caught.value.code == "SK303" and caught.value.excess == 1 and "Give it 100 bytes" in caught.value.remedy


def test_what_it_writes_torch_reads(tmp_path):
    found = synthesize(stages_of(4), 3, "450 B", ranks=2, effort=0.05)
    found.save(tmp_path / "order.csv")
    assert load_order(tmp_path / "order.csv").ranks == found.order.ranks
    made = torchs(2, 4, 3)
    made._load_csv(tmp_path / "order.csv")
    assert rows_of(made.pipeline_order) == [[str(a) for a in row] for row in found.order.ranks]


def test_the_same_arguments_give_the_same_order_and_numbers_tell_what_it_is():
    found, again = (synthesize(stages_of(3), 4, 260, objective="span", effort=0.1) for _ in range(2))
    assert found.order.ranks == again.order.ranks
    told = found.to_dict()
    assert told["value"] == found.value == max(found.ends) and found.value <= found.run.seconds
    assert told["limits"] == [260] * 3 and told["actions"][0].startswith("0F0 ")
    assert found.claim.objective == "span" and found.gap == pytest.approx(1 - told["bound"] / told["value"])
    assert str(found).startswith("span of ") and "within 260 B per rank" in str(found)
    assert found.optimal == ("optimal" in str(found).splitlines()[0])


def test_the_published_orders_of_zero_bubble_are_not_better():
    """The first row of their table: at 2p their search found 4.33 %, which the path bound proves to be the best."""
    saved = 34 * 2304 + 5 * 24 * 1024
    stages = [StageCosts(18522, 18086, 9337, saved_bytes=saved, deferred_bytes=32 * 2304)] * 8

    class Constant:
        def seconds(self, source, target, nbytes):
            return 601.0

    found = synthesize(stages, 24, 16 * saved, links=Constant(), objective="span")
    assert found.optimal and 1 - 24 * 45945 / found.value == pytest.approx(0.0433, abs=5e-5)
    assert max(found.peaks) <= 16 * saved


def test_replicas_count_with_their_all_reduce():
    stages = [StageCosts(1.0, 1.0, 1.0, gradient_bytes=100, replicas=2)] * 2
    found = synthesize(stages, 2, links=Slow())
    assert found.value == found.run.seconds > max(found.run.ends) and found.bound <= found.value
    assert found.run.replicas == (2, 2)


@pytest.mark.parametrize(
    ("words", "error", "code"),
    [
        ({"objective": "time"}, PolicyError, "SK302"),
        ({"placement": "W"}, PolicyError, "SK302"),
        ({"effort": 0}, PolicyError, "SK302"),
        ({"effort": float("nan")}, PolicyError, "SK302"),
        ({"memory": "much"}, PolicyError, "SK302"),
        ({"memory": [1, 2]}, PolicyError, "SK302"),
        ({"ranks": 2}, ScheduleError, "SK330"),
        ({"placement": "V"}, ScheduleError, "SK330"),
        ({"ranks": 0}, ScheduleError, "SK330"),
        ({"microbatches": 0}, ScheduleError, "SK330"),
        ({"stages": []}, ScheduleError, "SK330"),
        ({"stages": [1, 2]}, ScheduleError, "SK330"),
    ],
)
def test_bad_arguments_are_refused(words, error, code):
    given = {"stages": stages_of(3), "microbatches": 2, **words}
    with pytest.raises(error) as caught:
        synthesize(**given)
    assert caught.value.code == code and caught.value.remedy
