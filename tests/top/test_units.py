"""Numbers as people write and read them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.costs import unit
from splitkit.policies import Budget, MinCut, Stages
from splitkit.units import TFLOP, bounded, duration, in_words, measure, quantity, read_percent, read_size, size
from splitkit.view.renderers import svg


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("512", 512),
        (" 7 b ", 7),
        ("1.5 KiB", 1536),
        ("2kB", 2000),
        ("1.001 kB", 1001),  # as a float it is a little less
        ("3GiB", 3 * 2**30),
        ("1pib", 2**50),
        ("9" * 400, int("9" * 400)),
        ("1e6", 10**6),
        ("1.5e+3", 1500),
        ("2E1 kB", 20_000),
    ],
)
def test_sizes_are_read_exactly(text, nbytes):
    assert read_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "much", "2 XiB", "-1", "1.5.2", "nan", "1e-3", "1.25e1", "1e", "GiB", ".5", "\u0663"]
)
def test_what_is_no_size(text):
    assert read_size(text) is None


def test_percentages():
    assert [read_percent(text) for text in ("80%", " 12.5 % ", "100%", "0%")] == [0.8, 0.125, 1.0, 0.0]
    assert [read_percent(text) for text in ("101%", "80", "-5%", "%", "8 0%", "nan%")] == [None] * 6


@pytest.mark.parametrize("nbytes", [1, 1536, 5 * 2**20, 7 * 2**40, 3 * 2**50])
def test_what_is_printed_is_read_again(nbytes):
    assert read_size(size(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (12345.6, "12346 s"),
        (1234, "1234 s"),
        (99.96, "100 s"),
        (0.0123, "12.3 ms"),
        (0.9996e-3, "1 ms"),
        (4.021e-6, "4.02 us"),
        (1.5e-8, "15 ns"),
        (1e-12, "1 ps"),
        (3e-13, "0.3 ps"),
        (-2e-3, "-2 ms"),
    ],
)
def test_times_are_printed_in_a_unit_of_their_size(seconds, text):
    assert duration(seconds) == text and "e" not in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (7.0, "7"), (0.5, "0.50"), (999, "999"), (99.5, "99.50"), (999.4, "999"), (999.5, "1.00 k"),
        (1000, "1.00 k"), (99_994, "99.99 k"), (100_400, "100 k"), (999_500, "1.00 M"), (1234567, "1.23 M"),
        (2.5e9, "2.50 G"), (2e12, "2.00 T"), (3e15, "3.00 P"), (4e18, "4.00 E"), (5e21, "5000 E"), (-1500, "-1.50 k"),
    ],
)  # fmt: skip
def test_numbers_are_printed_with_three_digits(value, text):
    assert quantity(value) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (100 * 1024, "100 KiB"),
        (2**20, "1.00 MiB"), (2**20 - 1, "1.00 MiB"), (3 * 2**30, "3.00 GiB"), (2**40, "1.00 TiB"), (2**50, "1.00 PiB"),
        (2**61, "2048 PiB"), (0.5, "0.50 B"), (-2048, "-2.00 KiB"),
    ],
)  # fmt: skip
def test_bytes_are_printed_by_powers_of_1024(nbytes, text):
    assert size(nbytes) == text


def test_flops_are_printed_in_a_unit_of_their_size():
    texts = {
        0: "0 FLOP",
        7e-12: "7 FLOP",
        1e-3: "1.00 GFLOP",
        0.0123: "12.30 GFLOP",
        1: "1.00 TFLOP",
        2e6: "2.00 EFLOP",
    }
    assert {flops: duration(flops, TFLOP) for flops in texts} == texts
    assert duration((0.1 + 0.2 - 0.3) * 1e-12, TFLOP) == "0 FLOP"  # a rounding error of a sum


def test_which_side_a_number_of_bytes_errs_on():
    assert [bounded(1536, above, below) for above in ((), "a") for below in ((), "b")] == [
        "1.50 KiB", "at least 1.50 KiB", "at most 1.50 KiB", "about 1.50 KiB",
    ]  # fmt: skip
    assert bounded(0, {}) == "0 B"


def test_words_are_listed_as_people_do():
    assert [in_words("abc"[:n]) for n in range(4)] == ["", "a", "a and b", "a, b and c"]


def test_what_a_unit_measures():
    assert [measure(unit) for unit in ("s", TFLOP, "nodes")] == ["time", "FLOPs", "nodes"]


def test_what_is_no_time_keeps_its_unit():
    assert duration(3, "nodes") == "3 nodes" and duration(1234567.0, "FLOPs") == "1.23 M FLOPs"


def test_prices_that_count_nodes_are_not_printed_as_seconds():
    x = torch.randn(2, 8)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
    joint = sk.capture_joint(model, x, loss=torch.sum)
    prices = unit(joint.graph_module)
    frontier = sk.Frontier(joint, prices)
    texts = [str(frontier), frontier.points[0].plan.note, svg(frontier)]
    recomputing = MinCut(price=0.0), Budget("least", "saved"), Budget(0.3, "saved")
    texts += [joint.split(policy, prices).plan.note for policy in recomputing]
    with pytest.raises(sk.errors.NoPlanError) as refused:
        joint.split(Budget(1), prices)
    graph = sk.capture(model, x)
    prices = unit(graph)
    stages = sk.plan(graph, Stages(2, schedule="1f1b"), prices)
    step = sk.simulate_schedule(sk.stage_costs(sk.analyze(graph), stages, prices), "gpipe", 4)
    rows = sk.sweep(graph, prices, stages=(2,), microbatches=(4,), schedules=("gpipe",))
    for text in (*texts, str(refused.value), stages.note, str(step), str(rows)):
        assert " nodes" in text
        assert not re.search(r"\d (s|ms|us)\b", text)


def test_flops_are_never_printed_as_time():
    assert [duration(x, "TFLOP") for x in (0.0, 5.12e-10, 3.7e-11, 1.234e-6, 0.0035, 2.5, 1e4)] == [
        "0 FLOP", "512 FLOP", "37 FLOP", "1.23 MFLOP", "3.50 GFLOP", "2.50 TFLOP", "10.00 PFLOP",
    ]  # fmt: skip
    assert [measure(unit) for unit in ("s", "TFLOP", "nodes", "joules")] == ["time", "FLOPs", "nodes", "joules"]
