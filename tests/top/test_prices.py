"""The protocol of costs: what they are called, what counts as a price, and the text for what does not."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit import prices
from splitkit.errors import CostError, PolicyError, ViewError
from splitkit.price_record import LazyPrices, PriceRecord, printable
from splitkit.units import TFLOP

PIB = 2**50


class Mine:
    """Costs whose prices are given."""

    def __init__(self, **given):
        self.__dict__.update(given)

    def seconds(self, node):
        return self.price

    flops = nbytes = param_bytes = backward = seconds


@pytest.fixture(scope="module")
def node():
    return next(n for n in sk.capture(nn.ReLU(), torch.ones(2)).graph.nodes if n.op == "call_function")


def test_what_people_call_costs():
    assert prices.price_name(Mine(note="by hand", unit="x")) == "by hand"
    assert [prices.price_name(Mine(unit=unit)) for unit in ("s", TFLOP, "nodes")] == ["Mine", "FLOPs", "nodes"]
    assert prices.price_name(prices.checked(Mine())) == "Mine"
    assert [prices.unit_of(one) for one in (Mine(), Mine(unit=3), prices.checked(Mine(unit="nodes")))] == [
        "s",
        "3",
        "nodes",
    ]


def test_a_schedule_needs_times():
    prices.require_times(Mine(), Mine(unit="s"))
    with pytest.raises(
        ViewError, match="^SK903: a schedule is drawn over time, but the prices are FLOPs\n  Give prices in"
    ):
        prices.require_times(Mine(), Mine(unit=TFLOP))


def test_costs_that_include_backward_and_those_of_a_device():
    assert prices.includes_backward(Mine()) and not prices.includes_backward(SimpleNamespace())
    device = SimpleNamespace(device=SimpleNamespace(kernels="sm90"))
    assert (
        prices.kernels_of(device)
        == prices.kernels_of(SimpleNamespace(costs=prices.checked(Mine(costs=device))))
        == "sm90"
    )
    assert prices.kernels_of(Mine()) is prices.kernels_of(SimpleNamespace(device=SimpleNamespace(kernels=90))) is None


def test_costs_are_asked_for_their_methods_once():
    mine = Mine()
    assert prices.require_costs(mine) is mine
    held = prices.checked(mine)
    assert prices.checked(held) is held and prices.as_given(held) is mine is prices.as_given(mine)
    for wrong in (Mine, None, SimpleNamespace(seconds=len, flops=len, nbytes=len)):
        with pytest.raises(
            CostError, match="^SK323: .* does not price nodes\n  Give costs of the graph, such as splitkit"
        ):
            prices.require_costs(wrong)
    for wrong in (Mine, None, SimpleNamespace(seconds=3)):
        with pytest.raises(CostError, match="^SK323: .* does not price nodes"):
            prices.checked(wrong)


def test_a_copy_of_checked_costs_asks_the_same():
    held = prices.checked(Mine(price=2, other=7))
    for same in (copy.copy(held), copy.deepcopy(held), pickle.loads(pickle.dumps(held))):
        assert (same.other, same.seconds(None)) == (7, 2.0)


@pytest.mark.parametrize(("given", "found"), [(0, 0.0), (3, 3.0), (np.float32(0.5), 0.5), (0.25, 0.25), (1e100, 1e100)])
def test_prices_that_are_numbers(node, given, found):
    held = prices.checked(Mine(price=given))
    for value in (held.seconds(node), held.flops(node), held.backward_ratio(node)):
        assert value == found and type(value) is float


@pytest.mark.parametrize(("given", "found"), [(0, 0), (np.int64(7), 7), (5.0, 5), (PIB, PIB), (float(PIB), PIB)])
def test_prices_that_are_bytes(node, given, found):
    held = prices.checked(Mine(price=given))
    assert [held.nbytes(node), held.param_bytes(node)] == [found] * 2 and type(held.nbytes(node)) is int


@pytest.mark.parametrize("wrong", [-1, -0.5, float("nan"), float("inf"), 1.1e100, None, "3", True])
def test_prices_that_are_no_numbers(node, wrong):
    held = prices.checked(Mine(price=wrong))
    for what in ("seconds", "flops", "backward"):
        with pytest.raises(CostError) as caught:
            getattr(held, "backward_ratio" if what == "backward" else what)(node)
        must = "a backward as a multiple of its forward" if what == "backward" else "a number"
        assert str(caught.value) == (
            f"SK323: Mine.{what}(relu) is {wrong!r}\n  Give every node {must}, 0 or more and 1e+100 at most."
        )
        assert caught.value.nodes == ("relu",)


@pytest.mark.parametrize("wrong", [-1, 0.5, PIB + 1, float(2 * PIB), float("nan"), None, "3", True])
def test_prices_that_are_no_bytes(node, wrong):
    for what in ("nbytes", "param_bytes"):
        with pytest.raises(CostError) as caught:
            getattr(prices.checked(Mine(price=wrong)), what)(node)
        assert str(caught.value) == (
            f"SK323: Mine.{what}(relu) is {wrong!r}\n"
            "  Give every node a whole number of bytes, 0 or more and 1 PiB at most."
        )


def test_costs_that_fail_name_the_node_and_errors_of_the_family_pass(node):
    with pytest.raises(CostError) as caught:
        prices.checked(Mine()).seconds(node)
    assert str(caught.value) == (
        "SK323: Mine.seconds(relu) fails: AttributeError: 'Mine' object has no attribute 'price'\n"
        "  Costs must price every node of their graph."
    )

    class Refuses(Mine):
        def seconds(self, node):
            raise PolicyError("SK302", "mine")

    with pytest.raises(PolicyError, match="^SK302: mine$"):
        prices.checked(Refuses()).seconds(node)


def test_prices_that_are_read_late_are_found_once():
    asked = []

    def find():
        asked.append(1)
        return {"a": 1.0, "b": 2.0}

    late = LazyPrices(find)
    assert not asked
    assert (late["b"], [*late], len(late), dict(late)) == (2.0, ["a", "b"], 2, {"a": 1.0, "b": 2.0}) and asked == [1]
    read = pickle.loads(pickle.dumps(late))
    assert type(read) is dict and read == late


def test_a_record_of_prices_leaves_what_lives_in_its_process():
    record = PriceRecord("mine", table={"a": 1.0}, live=(object(), object()))
    read = pickle.loads(pickle.dumps(record))
    assert read == record and read.live is None and read.table == {"a": 1.0}
    assert repr(record) == "PriceRecord(name='mine', kind='table', unit='s', device=None, tf32=False, training=False)"


def test_a_text_for_people_is_printable_and_not_too_long():
    assert printable("a\x1b[31m\nb\u202e") == "a [31m b "
    assert [printable("abcdef", most) for most in (5, 6, 7)] == ["ab...", "abcdef", "abcdef"]
    assert printable(12) == "12" and len(printable("x" * 300)) == 200
