"""The pieces of still pictures: widths of texts, marks of axes, colours, escaping."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from svgtexts import overlaps

from splitkit.view.page.bundle import script
from splitkit.view.svg.drawing import COLOURS, Drawing, colour, ink_on, mixed, shortened, width
from splitkit.view.svg.scatter import round_size, thinned, tick_values


def test_a_text_is_cut_where_its_room_ends():
    text = "transformer.h.10.attn.c_proj"
    for room in range(0, 200, 7):
        shown = shortened(text, room)
        assert width(shown) <= room and (shown == text or shown == "" or shown.endswith("…"))
    assert shortened(text, 1000) == text and width(text, 11, True) > width(text) > width(text[:-1])
    assert width("漢") >= width("m")


@pytest.mark.parametrize("most", [0.0, 1e-9, 0.37, 1.0, 7, 999, 1e6, 3.2e11])
def test_marks_of_an_axis_are_few_and_round(most):
    found = tick_values(most)
    assert found[0] == 0 and len(found) <= 7 and found[-1] <= most * (1 + 1e-6)
    assert not most or found[-1] > 0.5 * most


def test_marks_of_bytes_are_round_in_their_units():
    assert [round_size(b) for b in tick_values(1.1 * 2**30, binary=True)] == [
        "0 B",
        "256 MiB",
        "512 MiB",
        "768 MiB",
        "1 GiB",
    ]
    assert [round_size(b) for b in tick_values(70 * 2**20, binary=True)] == ["0 B", "20 MiB", "40 MiB", "60 MiB"]
    assert tick_values(3, binary=True) == [0, 1, 2, 3] and tick_values(float("inf")) == [0.0]


def test_thinned_stairs_keep_peaks_and_ends():
    points = [(i / 100, float(i % 7)) for i in range(5000)]
    found = thinned(points)
    assert len(found) < 500 and found[0] == points[0] and found[-1] == points[-1]
    assert {y for _, y in found} >= {0.0, 6.0} and set(found) <= set(points)


def test_text_stays_text():
    draw = Drawing(200)
    draw.text(0, 10, "<script>alert(1)</script>\x00&\"'", room=60)
    draw.rect(0, 0, 10, 10, colour(0), "</title><script>")
    picture = draw.to_svg(20, '"><script>')
    assert "<script" not in picture
    texts = [e.text for e in ET.fromstring(picture).iter()]
    assert any(t and t.startswith("<scrip") for t in texts) and "</title><script>" in texts


def test_a_spare_text_gives_way():
    draw = Drawing(200)
    assert draw.text(10, 20, "first") and not draw.text(12, 22, "second", spare=True)
    assert not draw.text(12, 29, "third", spare=True)  # it would touch what hangs below the first line
    draw.keep(100, 20, 5)
    assert not draw.text(96, 22, "point", spare=True) and draw.text(10, 60, "second", spare=True)
    assert overlaps(draw.to_svg(80, "")) == []


def test_parts_have_the_colours_of_the_page():
    assert json.dumps(COLOURS) in script() and colour(len(COLOURS)) == COLOURS[0]
    assert ink_on("#000000") == "#ffffff" != ink_on("#ffffff") and mixed("#000000", 0) == "#ffffff"
