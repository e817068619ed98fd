"""Links: presets, nodes, matrices; arrays for solvers; what is refused."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch

from splitkit.costs import Link, Links
from splitkit.costs.links import as_links, fit
from splitkit.errors import CostError
from splitkit.hardware.link_specs import PRESETS

GB = 10**9


def test_a_message_takes_latency_and_bytes_over_bandwidth():
    links = Links.uniform(10 * GB, latency=2e-6)
    assert links.seconds(0, 1, 10**6) == pytest.approx(2e-6 + 1e-4)
    assert links.seconds(0, 1, 0) == 2e-6
    assert links.seconds("cuda:1", torch.device("cuda:1"), 10**9) == 0
    assert links.seconds("cuda:1", torch.device("cuda:2"), 0) == 2e-6


def test_nodes_of_eight():
    links = Links.nodes(8, inside="nvlink4", between="ethernet400")
    assert links.link(0, 7) is PRESETS["nvlink4"] and links.link(8, 15) is PRESETS["nvlink4"]
    assert links.link(7, 8) is PRESETS["ethernet400"]
    assert links.link("cuda:3", torch.device("cuda:5")) is PRESETS["nvlink4"]
    assert links.seconds(7, 8, GB) > links.seconds(6, 7, GB) > links.seconds(7, 7, GB) == 0
    alone = Links.nodes(1, inside="nvlink4", between=Link(GB))
    assert alone.link(0, 1) == Link(GB)


def test_arrays_for_solvers():
    latency, bandwidth = Links.nodes(2, inside=Link(4.0, 1.0), between=Link(2.0, 3.0)).to_arrays(range(4))
    inf = math.inf
    assert bandwidth.tolist() == [[inf, 4, 2, 2], [4, inf, 2, 2], [2, 2, inf, 4], [2, 2, 4, inf]]
    assert latency.tolist() == [[0, 1, 3, 3], [1, 0, 3, 3], [3, 3, 0, 1], [3, 3, 1, 0]]
    assert latency.dtype == bandwidth.dtype == np.float64


def test_a_matrix_is_by_row_to_column_and_comes_back_as_it_was():
    speeds = np.array([[0, 1.0, 2.0], [3.0, 0, 4.0], [5.0, 6.0, 0]])
    waits = np.arange(9.0).reshape(3, 3)
    names = ["cuda:0", torch.device("cuda:1"), "cpu"]
    links = Links.matrix(speeds, waits, names)
    assert links.link("cuda:0", "cpu") == Link(2.0, 2.0) and links.link("cpu", "cuda:0") == Link(5.0, 6.0)
    latency, bandwidth = links.to_arrays(names)
    off = ~np.eye(3, dtype=bool)
    assert (latency[off] == waits[off]).all() and (bandwidth[off] == speeds[off]).all()
    assert Links.matrix([[0, 7.0], [8.0, 0]], latency=0.5).link(1, 0) == Link(8.0, 0.5)


def test_links_are_values():
    links = Links.matrix([[0, 7.0], [8.0, 0]])
    assert pickle.loads(pickle.dumps(links)) == links
    assert hash(links) == hash(Links.matrix([[0, 7.0], [8.0, 0]]))


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: Links.preset("nvlink44"), r"no link is called 'nvlink44'\n  Did you mean nvlink4\?"),
        (lambda: Links.preset(4), "4 is not a link"),
        (lambda: Links.uniform(0), "bandwidth is 0"),
        (lambda: Links.uniform(math.nan), "bandwidth is nan"),
        (lambda: Links.uniform("fast"), "bandwidth is 'fast'"),
        (lambda: Links.uniform(1, -1), "latency is -1"),
        (lambda: Links.uniform(1, math.inf), "latency is inf"),
        (lambda: Links.nodes(0, "nvlink4", "pcie4"), "a node of 0 devices"),
        (lambda: Links.nodes(2.5, "nvlink4", "pcie4"), "a node of 2.5 devices"),
        (lambda: Links.nodes(2, "nvlink4", "pcie4").link("left", 1), "'left' is on no node"),
        (lambda: Links.nodes(2, "nvlink4", "pcie4").link(-1, 1), "-1 is on no node"),
        (lambda: Links.matrix([1, 2]), r"bandwidth has shape \(2,\)"),
        (lambda: Links.matrix([[1, 2], [3, 4]], [1, 2]), r"latency has shape \(2,\)"),
        (lambda: Links.matrix([[1, 2], [0, 4]]), "from 1 to 0: bandwidth is 0"),
        (lambda: Links.matrix([[1, 2], [3, 4]], devices=["a", "a"]), "2 rows have 1 distinct devices"),
        (lambda: Links.matrix([[1, 2], [3, 4]]).link(0, 2), "there is no link from 0 to 2"),
        (lambda: Links.uniform(1).seconds(0, 1, -1), "-1 bytes from 0 to 1"),
    ],
)
def test_what_is_refused(make, reason):
    with pytest.raises(CostError, match=f"SK322: .*{reason}"):
        make()


@pytest.mark.parametrize("latency, bandwidth", [(5e-6, 20e9), (0.0, 1e9), (1e-3, 1e6)])
def test_a_fit_finds_the_link_that_made_the_times(latency, bandwidth):
    sizes = [1 << 12, 1 << 16, 1 << 20, 1 << 24]
    link = fit(sizes, [latency + n / bandwidth for n in sizes])
    assert link.bandwidth == pytest.approx(bandwidth) and link.latency == pytest.approx(latency, abs=1e-9)


def test_a_fit_of_times_that_no_link_makes():
    faster_in_bulk = fit([10, 1000], [20e-9, 1000e-9])  # a line through both starts above 0
    assert faster_in_bulk.latency == pytest.approx(10.1e-9, rel=0.01)
    slower_in_bulk = fit([10, 1000], [10e-9, 2000e-9])  # that line starts below 0
    assert slower_in_bulk.latency == 0 and 0.5e9 < slower_in_bulk.bandwidth < 1e9
    only_latency = fit([10, 1000], [2e-6, 1e-6])
    assert only_latency.bandwidth == math.inf and only_latency.latency == pytest.approx(1.5e-6)
    assert only_latency.seconds(10**9) == only_latency.latency


@pytest.mark.parametrize(
    "make",
    [
        lambda: Links.matrix([[1, 2], [3]]),
        lambda: Links.matrix([[0, 1], [1, 0]], latency="soon"),
        lambda: Links.uniform(1e9).seconds(0, 1, "5"),
    ],
)
def test_links_described_wrongly_are_refused(make):
    with pytest.raises(CostError, match="SK322"):
        make()


def test_links_are_given_as_they_are_or_by_name():
    own = Links(Link(1e9))
    assert as_links(own) is own and as_links(None) is None
    assert as_links("nvlink4").seconds(0, 1, 10**9) == Links.preset("nvlink4").seconds(0, 1, 10**9)
