"""Links: what a message takes, the presets and their names, and the limits of figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from splitkit.costs import Link, Links
from splitkit.errors import CostError
from splitkit.hardware.link_specs import LONGEST_WAIT, PRESETS, SLOWEST, find_link

GB = 10**9
NAMES = (
    "nvlink2, nvlink3, nvlink4, nvlink5, infinity-fabric, pcie3, pcie4, pcie5, ethernet100, ethernet400, shared-memory"
)


def test_presets_are_peaks_of_one_direction():
    expected = {
        "nvlink2": 150, "infinity-fabric": 64, "pcie3": 15.75,
        "nvlink3": 300, "nvlink4": 450, "nvlink5": 900, "pcie4": 31.5, "pcie5": 63.0,
        "ethernet100": 12.5, "ethernet400": 50, "shared-memory": 10,
    }  # fmt: skip
    assert {name: pytest.approx(link.bandwidth / GB, rel=1e-2) for name, link in PRESETS.items()} == expected
    assert all(link.source and link.latency > 0 for link in PRESETS.values())


def test_a_preset_is_found_in_any_spelling():
    for name, link in PRESETS.items():
        for text in (name, name.upper(), name.replace("-", "_"), f" {name} ", name.replace("-", "")):
            assert find_link(text) is link
    assert Links.preset("NVLink 4").link(0, 1) is PRESETS["nvlink4"]
    assert Links.preset("shared_memory").link("a", "b") is PRESETS["shared-memory"]
    own = Link(1.0)
    assert find_link(own) is own


@pytest.mark.parametrize(
    "given, text",
    [
        ("nvlnk4", "SK322: no link is called 'nvlnk4'\n  Did you mean nvlink4?"),
        ("?", f"SK322: no link is called '?'\n  Known are {NAMES}; or give a Link."),
        (None, f"SK322: None is not a link\n  Give a Link, or one of {NAMES}."),
    ],
)
def test_a_link_that_nobody_knows(given, text):
    with pytest.raises(CostError) as caught:
        find_link(given)
    assert str(caught.value) == text


def test_seconds_and_the_expression_that_makes_a_link_again():
    link = Link(np.float32(4.0), 3, "a cable")
    assert (type(link.bandwidth), type(link.latency)) == (float, float)
    assert [link.seconds(nbytes) for nbytes in (0, 2, 8)] == [3.0, 3.5, 5.0]
    assert link.expression == "Link(4.0, 3.0, 'a cable')"
    assert [eval(one.expression, {"Link": Link}) for one in PRESETS.values()] == [*PRESETS.values()]


def test_the_limits_of_figures_are_allowed_themselves():
    assert Link(SLOWEST, LONGEST_WAIT).seconds(1) == 2e12
    for bandwidth in (SLOWEST / 2, 0, -1.0, math.nan, "fast", None, True):
        with pytest.raises(CostError) as caught:
            Link(bandwidth)
        assert str(caught.value) == (
            f"SK322: bandwidth is {bandwidth!r}\n  Give a positive number of bytes a second, 1e-12 or more."
        )
    for latency in (2 * LONGEST_WAIT, -1, math.inf, "soon"):
        with pytest.raises(CostError) as caught:
            Link(1, latency)
        assert str(caught.value) == f"SK322: latency is {latency!r}\n  Give seconds, 0 or more, 1e+12 at most."
