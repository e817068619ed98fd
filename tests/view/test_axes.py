"""Where the marks of axes are, and where values lie between them."""

from __future__ import annotations

import pytest

from splitkit.view.svg.drawing import mixed
from splitkit.view.svg.scatter import PlotArea, round_size, tick_values, visible_limit


@pytest.mark.parametrize(
    ("most", "binary", "expected"),
    [
        (10, False, [0, 2, 4, 6, 8, 10]),
        (9.9, False, [0, 2, 4, 6, 8]),
        (0.5, False, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (26, False, [0, 10, 20]),
        (5 * 1024, True, [0, 1024, 2048, 3072, 4096, 5120]),
        (1536, True, [0, 512, 1024, 1536]),
        (3, True, [0, 1, 2, 3]),
        (0, False, [0]),
        (float("inf"), False, [0]),
    ],
)
def test_marks_are_round_numbers(most, binary, expected):
    assert tick_values(most, binary=binary) == pytest.approx(expected)


def test_a_limit_is_drawn_where_it_leaves_room_for_the_rest():
    assert visible_limit(30.0, 10) == 30 and visible_limit(30.1, 10) is None and visible_limit(None, 10) is None
    assert round_size(20 * 2**20) == "20 MiB" and round_size(1.5 * 2**20) == "1.50 MiB"


def test_values_lie_between_the_ends_of_a_plane():
    plane = PlotArea(10, 20, 110, 70, (4.0, 5.0))
    assert [plane.x(value) for value in (0, 1, 4)] == [10, 35, 110]
    assert [plane.y(value) for value in (0, 1, 5)] == [70, 60, 20]
    assert PlotArea(10, 20, 110, 70, (0.0, 0.0)).x(3) == 10 and PlotArea(10, 20, 110, 70, (0.0, 0.0)).y(3) == 70


def test_a_colour_is_mixed_with_white():
    assert mixed("#000000", 1.0) == "#000000" and mixed("#123456", 0.0) == "#ffffff"
    assert mixed("#0040ff", 0.5) == "#80a0ff"
