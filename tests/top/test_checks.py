"""What users write: counts, seconds, fractions and bytes, with one text for what is none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit import checks, costs
from splitkit.errors import CostError, PolicyError
from splitkit.policies import Buckets, Budget, Random, RoundRobin, Stages

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("read", "given", "found"),
    [
        (checks.count, 3, 3),
        (checks.count, np.int64(3), 3),
        (checks.seconds, np.float32(0.5), 0.5),
        (checks.seconds, INF, INF),
        (checks.fraction, 1, 1.0),
        (checks.fraction, np.float64(0.0), 0.0),
        (checks.nbytes, 0, 0),
        (checks.nbytes, np.uint8(7), 7),
        (checks.nbytes, "80GiB", 80 * 2**30),
        (checks.nbytes, "1.5 kB", 1500),
    ],
)
def test_what_is_taken_comes_back_as_plain_python(read, given, found):
    read = read("here", "it", given)
    assert read == found and type(read) is type(found)


@pytest.mark.parametrize(
    ("read", "bad", "must"),
    [
        (checks.count, [0, -1, 1.0, "3", True, None, np.bool_(True)], "a whole number >= 1"),
        (checks.seconds, [0, -1.0, NAN, "1", True, None], "seconds, a number above 0"),
        (checks.fraction, [-0.1, 1.1, NAN, "half", True, None], "a number from 0 to 1"),
        (checks.nbytes, [-1, 1.5, "much", "0.5", "-1GiB", False, None, [1]], "bytes, 0 or more"),
    ],
)
def test_what_is_none_is_refused_with_one_text(read, bad, must):
    for given in bad:
        with pytest.raises(PolicyError) as caught:
            read("Here", "it", given)
        assert caught.value.code == "SK302"
        assert caught.value.reason == f"Here(it={given!r})"
        assert caught.value.remedy.startswith(f"it must be {must}")


def test_whole_numbers_numbers_and_words():
    assert [checks.is_whole(v) for v in (0, 3, np.int8(3), -1, True, np.bool_(1), 1.0, "1", None)] == [True] * 3 + [
        False
    ] * 6
    assert [checks.is_whole(v, 3) for v in (2, 3)] == [False, True] and checks.is_whole(-2, -2)
    numbers = (0, 1.5, np.float32(2), INF, np.int64(3))
    assert all(map(checks.is_number, numbers)) and not any(
        map(checks.is_number, (-1, NAN, -INF, True, "1", 10**400, 1j))
    )
    assert checks.is_word("a", "a", "b") and not any(
        checks.is_word(v, "a", "b") for v in ("c", "", None, np.array(["a"]))
    )
    assert [checks.are_texts(v) for v in (["a"], set(), ("a", 1), "a", None)] == [True, True, False, False, False]
    assert (
        checks.items_of(torch.tensor(3))
        is checks.items_of("ab")
        is checks.items_of(b"ab")
        is checks.items_of(3)
        is None
    )
    assert checks.items_of(torch.tensor([3])) == [3] and checks.items_of({"a": 1}) == ["a"]
    assert checks.plain_name(" RTX_40 9-0 ") == "rtx4090"


def test_counts_times_and_degrees_have_a_limit():
    assert checks.count("here", "it", checks.MOST) == checks.MOST
    with pytest.raises(PolicyError) as caught:
        checks.count("here", "it", checks.MOST + 1)
    assert str(caught.value) == "SK302: here(it=1000001)\n  it must be a whole number >= 1, and at most 1000000."
    year = checks.LONGEST
    assert (
        checks.seconds("here", "it", year, endless=False) == year and checks.seconds("here", "it", year + 1) == year + 1
    )
    with pytest.raises(
        PolicyError, match=r"it must be seconds, a number above 0 that is not infinite, at most a year\."
    ):
        checks.seconds("here", "it", year + 1, endless=False)
    with pytest.raises(PolicyError, match=r"it must be seconds, 0 or more\."):
        checks.seconds("here", "it", -1, zero=True)
    assert checks.degrees("here", "it", [4, np.int64(1), 4], 4, "of four") == (1, 4) and checks.degrees(
        "here", "it", 3, 4, ""
    ) == (3,)
    for wrong in ([], 0, 5, [1, 5], "12", [1.0], None, [True]):
        with pytest.raises(PolicyError, match=r"it must be whole numbers from 1 to 4, of four, such as \(1, 2, 4\)\."):
            checks.degrees("here", "it", wrong, 4, "of four")
    assert checks.whole("here", "it", -3) == -3 and type(checks.whole("here", "it", np.int8(2))) is int
    for wrong in (True, 1.0, None):
        with pytest.raises(PolicyError, match=r"it must be a whole number\."):
            checks.whole("here", "it", wrong)
    assert checks.nbytes("here", "it", 2**1000 - 1) == 2**1000 - 1
    with pytest.raises(PolicyError, match="it must be bytes, 0 or more"):
        checks.nbytes("here", "it", 2**1000)


def test_a_value_is_shown_on_one_line_of_bounded_length():
    class Fails:
        def __repr__(self):
            raise RuntimeError

    assert (
        checks.shown("a\n  b") == "'a\\n b'"
        and checks.shown(Fails()) == "a Fails"
        and checks.shown(10**5000) == "a int"
    )
    assert [len(checks.shown("x" * n)) for n in (197, 198, 199, 300)] == [199, 200, 200, 200]
    assert checks.shown("x" * 199) == "'" + "x" * 196 + "..."


def test_memory_of_each_device():
    assert checks.memory_of("here", ["1KiB", None, 3], 3) == (1024, None, 3) and checks.memory_of("here", None, 2) == (
        None,
        None,
    )
    with pytest.raises(PolicyError) as caught:
        checks.memory_of(Stages(2), [1], 2)
    assert str(caught.value) == (
        "SK302: Stages: memory has 1 sizes for 2 devices\n  Give one size for all devices, or one for each."
    )


def test_zero_and_less_where_the_caller_says_so():
    assert checks.seconds("here", "it", 0, zero=True) == 0.0
    with pytest.raises(PolicyError, match="1 or more.*, or 'least'"):
        checks.nbytes("here", "it", 0, least=1, besides=", or 'least'")


def test_a_field_of_a_frozen_dataclass_is_held_as_plain_python():
    @dataclass(frozen=True)
    class Mine:
        n: int
        m: int | None = None

        def __post_init__(self):
            checks.settle(self, "n", checks.count)
            checks.settle(self, "m", checks.count, optional=True)

    mine = Mine(np.int32(4))
    assert type(mine.n) is int and mine == Mine(4) and mine.m is None
    with pytest.raises(PolicyError, match=r"Mine\(m=0\)"):
        Mine(1, 0)
    with pytest.raises(PolicyError, match=r"Mine\(n=None\)"):
        Mine(None)


def test_policies_take_the_ints_of_numpy_and_bytes_as_texts():
    four = np.int64(4)
    for policy in (RoundRobin, Random, Stages):
        assert policy(four) == policy(4)
    assert Buckets("25MiB")._caps() == (25 * 2**20,) * 2 == Buckets(25 * 2**20)._caps()
    assert Buckets("25MiB", "1MiB")._caps() == (2**20, 25 * 2**20)
    assert Budget(np.int64(512))._bytes(0) == Budget("0.5KiB")._bytes(0) == Budget(np.float32(0.5))._bytes(1024) == 512
    assert checks.memory_of(Stages(4), np.int64(80), 4) == checks.memory_of(Stages(4), "80", 4) == (80,) * 4
    assert Stages(4, memory=np.int64(80)) == Stages(4, memory=80)


@pytest.mark.parametrize(
    "ask",
    [
        lambda gm: sk.policies.Stages(2, memory="9" * 5000),
        lambda gm: sk.policies.Stages(2, memory="1" + "0" * 400 + "GiB"),
        lambda gm: sk.policies.Devices(["h200"] * 4, memory=b"1GiB"),  # type: ignore[arg-type]
        lambda gm: sk.policies.Best([sk.policies.Stages(2)], memory="lots"),
        lambda gm: sk.policies.Budget(np.array([1, 2])),  # type: ignore[arg-type]
        lambda gm: sk.sweep(gm, costs.flops(gm), memory="lots"),
    ],
    ids=["digits", "zeros", "bytes", "best", "array", "sweep"],
)
def test_what_is_no_size_is_refused_by_the_name_of_what_takes_it(ask):
    gm = sk.capture(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(PolicyError, match=r"SK302: (Stages|Devices|Best|Budget|sweep)\("):
        ask(gm)


@pytest.mark.parametrize(
    "policy", [sk.policies.Stages, lambda n, seconds: sk.policies.Devices(["h200"] * n, seconds=seconds)]
)
def test_endless_seconds_are_refused(policy):
    with pytest.raises(PolicyError, match=r"SK302: (Stages|Devices)\(seconds=inf\)"):
        policy(2, seconds=float("inf"))


def test_bytes_of_a_device_and_of_an_allocators_block_may_be_text(tmp_path):
    device = sk.costs.Device("mine", {"float32": 1e12}, 1e12, "80GiB")
    assert device.memory == 80 * 2**30 and device == sk.costs.Device("mine", {"float32": 1e12}, 1e12, 80 * 2**30)
    (tmp_path / "d.toml").write_text('[d]\nmemory = "1GiB"\nbandwidth = 1e12\npeak = {float32 = 1e12}\n')
    assert sk.costs.load_devices(tmp_path / "d.toml")["d"].memory == 2**30
    with pytest.raises(CostError, match="SK320.*memory"):
        sk.costs.Device("mine", {"float32": 1e12}, 1e12, "lots")


def test_half_a_byte_is_refused_as_a_limit():
    with pytest.raises(PolicyError, match="SK302.*'0.5'"):
        Stages(2, memory="0.5")
