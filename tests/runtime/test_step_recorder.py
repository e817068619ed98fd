"""What the ranks did is told by one clock, whatever theirs say."""

from __future__ import annotations

from launch import launch

from splitkit.pipeline.schedules import pipeline_order
from splitkit.pipeline.trace import Event
from splitkit.runtime.ranks.measurements import held_by_group, median_step


def test_clocks_that_are_hours_apart_give_one_step():
    first, second = launch("runtime/clocks.py", 2)
    for told in (first, second):
        assert told["refused"].startswith("SK802: no step has run yet")
        assert 0 < told["seconds"] < told["took"] < 60 and told["recorded"] == 3 and told["memory"] == []
        assert told["late"] > -0.005  # no stage starts before the one above has ended, but for the clocks' difference
        order = pipeline_order("1f1b", 2, 4, 2)
        assert told["ranks"] == [[list(action) for action in row] for row in order.ranks]
    assert first["seconds"] == second["seconds"]


def test_the_median_step_is_the_shorter_of_two_in_the_middle():
    def step(start, seconds):
        return [Event(0, "F", 0, 0, start, start + 1), Event(1, "F", 1, 0, start + 1, start + seconds)]

    steps = [step(0, 9), step(20, 3), step(40, 5), step(60, 4)]
    assert median_step(steps) is steps[3] and median_step(steps[:3]) is steps[2]


def test_bytes_of_each_action_go_on_from_those_before_it():
    assert held_by_group([[10, -5], [20, -1], [], [-24, 3]]) == [(10, 5), (25, 24), (24, 24), (24, 3)]
