"""Whatever goes wrong on one rank, all end in bounded time, and each says what happened and what it waited for."""

from __future__ import annotations

import re
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from launch import launch
from ownorders import own_order

from splitkit import _torch
from splitkit.runtime.ranks import faults
from splitkit.runtime.ranks.faults import Progress, heard_key, is_of_network, leave
from splitkit.runtime.ranks.replicas import Replicas

RANKS = 3
ALWAYS = ("raise", "shape", "plan", "replicas")
WAITING = ("die_last", "stop_last", "slow", "elsewhere")
"""In which ranks wait for seconds: these are tried at once."""


@pytest.fixture(scope="module")
def always() -> dict[str, list[str]]:
    """What the ranks said of the faults that are tried always."""
    found, said, log = {}, [""] * RANKS, [""] * RANKS
    lines = launch("runtime/faulty.py", RANKS, *" -- ".join(ALWAYS).split(), check=False, seconds=300)
    lines += launch("runtime/faulty.py", RANKS, *" -- ".join(WAITING).split(), check=False, seconds=300, at_once=True)
    for line in lines:
        if "next" in line:
            (what,) = line["next"]
            found[what] = said = [""] * RANKS
            found[f"{what}: log"] = log = [""] * RANKS
        elif "said" in line:
            said[line["rank"]], log[line["rank"]] = _in_time(line), "\n".join(line["log"])
    return found


def told(what: str) -> list[str]:
    """What the ranks said, in their order; nothing for one that died."""
    said = [""] * RANKS
    for line in launch("runtime/faulty.py", RANKS, what, check=False, seconds=100):
        if "said" in line:
            said[line["rank"]] = _in_time(line)
    return said


def _in_time(line: dict[str, Any]) -> str:
    assert line["took"] < 60
    return line["said"]


def test_an_op_that_fails_is_said_on_every_rank(always):
    first, own, last = always["raise"]
    assert own.startswith("SK805: rank 1 failed in forward of microbatch 2 in stage 1: ValueError: no such thing")
    assert "rank 1 failed in forward of microbatch 2 in stage 1: ValueError: no such thing" in first
    assert "rank 0 waited for gradients of relu from stage 1 (rank 1)" in first
    assert "rank 2 waited for relu_1 from stage 1 (rank 1), for forward of microbatch 2 in stage 2" in last


def test_a_replica_that_fails_is_said_with_the_microbatch_of_the_step(always):
    first, own, last = always["replicas"]
    says = "SK805: rank 1 failed in forward of microbatch 5 in stage 0: ValueError: no such thing"
    assert own.startswith(says) and first.startswith(says) and last.startswith(says)


@pytest.mark.campaign
def test_a_rank_that_dies_is_missed():
    first, own, last = told("die")
    assert not own and "SK805: rank 1 is gone; rank 0 waited" in first
    assert "SK805: rank 1 is gone; rank 2 waited for relu_1 from stage 1" in last


@pytest.mark.parametrize(("what", "says"), [("die_last", "is gone"), ("stop_last", "does not answer")])
def test_ranks_that_wait_for_each_other_all_name_the_first_cause(always, what, says):
    """Rank 0, which waits for rank 1, which waits for rank 2, said that another rank is gone, or does not answer."""
    first, middle, last = always[what]
    assert not last
    # a time limit may close the connections of others before they reach their own
    for rank, text in enumerate((first, middle)):
        assert re.match(f"SK805: rank 2 (is gone|{says}); rank {rank} waited for gradients of", text), text


def test_a_rank_that_keeps_others_waiting_is_named_long_before_the_time_limit(always):
    """By default the limit is half an hour, in which nobody could tell which rank had left its loop or was stopped."""
    assert always["slow"] == [""] * RANKS
    for rank in (0, 2):
        log = always["slow: log"][rank]
        assert re.match(rf"rank {rank} has waited \d+ s for all ranks to begin the call: ", log)
        assert "rank 1 is stopped, or busy with something else" in log


def test_ranks_that_wait_for_different_things_say_so(always):
    """A rank whose loop was shorter went on to another call: all waited for each other, and named no rank."""
    first, own, last = always["elsewhere"]
    for rank, text in ((0, first), (2, last)):
        says = f"rank 1 waits for all ranks to clip gradients; rank {rank} waited for all ranks to begin the call"
        assert text.startswith(f"SK805: {says}"), text
        assert "for all ranks to begin the call: rank 1 waits for all ranks to clip" in always["elsewhere: log"][rank]
    assert "rank 1 waited for all ranks to clip gradients" in own and "rank 0 waits for all ranks to begin" in own


def test_a_rank_that_failed_goes_when_the_others_know_why(monkeypatch):
    """The store may end with it; rank 2, which is gone, never hears anything."""
    store = dist.HashStore()
    monkeypatch.setattr(_torch, "default_store", lambda: SimpleNamespace(clone=lambda: store))
    Timer(0.2, store.set, (heard_key(1), "")).start()
    leave(0, [0, 1, 2])
    assert store.check([heard_key(0), heard_key(1)]) and not store.check([heard_key(2)])


@pytest.mark.campaign
def test_an_error_of_a_user_is_none_of_the_network_whatever_its_words():
    """An error in backward that speaks of a connection was taken for that of a rank that is gone."""
    says = "rank 1 failed in backward of microbatch 0 in stage 1: RuntimeError: connection to the tokenizer timed out"
    assert all(text.startswith(f"SK805: {says}") for text in told("words"))


@pytest.mark.parametrize(
    ("error", "network"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 8000ms for recv"), True),
        (dist.DistNetworkError("Broken pipe"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (ConnectionResetError("Connection reset by peer"), False),
        (RuntimeError("the socket timed out"), False),
        (TimeoutError("timeout"), False),
    ],
)
def test_errors_of_the_network_are_known_by_who_raises_them(error, network):
    assert is_of_network(error) == network


@pytest.mark.campaign
def test_a_rank_that_hangs_is_not_waited_for_for_ever():
    first, _, last = told("hang")
    assert re.match("SK805: (rank 1 runs, but does|another rank does) not answer; rank 0 waited for", first)
    assert "waited for relu_1" in last


def test_a_shape_that_is_not_the_plans_is_caught_at_the_border(always):
    first, own, last = always["shape"]
    wrong = "relu_1 is float32[1, 8] after stage 1, in microbatch 2; the next stage expects float32[2, 8]"
    assert own.startswith(f"SK803: {wrong}") and f"SK803 on rank 1: {wrong}" in first and wrong in last


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("dtype", "relu_1 is float64[2, 8] after stage 1"),
        ("backward", "rank 1 failed in backward of microbatch 0 in stage 1: ValueError: no such gradient"),
        ("count", "SK804: rank 2 has a different number of microbatches than rank 0: 8, not 4"),
        ("batch", "Give float32[8, 8]: 4 microbatches of [2, 8]"),
        ("once", "SK303: 300 parts were asked for"),
    ],
)
def test_what_differs_or_fails_is_said_on_every_rank(what, says):
    assert all(says in text for text in told(what))


def test_another_plan_is_caught_before_the_first_step(always):
    assert all(text.startswith("SK804: rank 1 has a different plan than rank 0") for text in always["plan"])


def test_what_a_rank_waits_for_goes_by_its_order():
    order = own_order(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    at = Progress(order.ranks[0], order.rank_of, Replicas(((0,), (1,)), 0, 0, None), (("x", "mask"),), rank=0)
    assert at.waits() == "was about to run forward of microbatch 0 in stage 0"
    with at.computing(0, "F", 1):
        pass
    wanted = "waited for gradients of x, mask from stage 1 (rank 1), for backward of microbatch 0 in stage 0"
    assert at.waits() == wanted
    at.begun(0, "B", 1)
    assert at.waits() == "waited for the others to end the step"
    behind = Progress(order.ranks[1], order.rank_of, Replicas(((0,), (1,)), 1, 0, None), (("x", "mask"),), rank=1)
    assert behind.waits() == "waited for x, mask from stage 0 (rank 0), for forward of microbatch 0 in stage 1"
    order = own_order(["0F0 0I0 0W0", "1F0 1I0 1W0"])  # a weight part waits for nobody
    last = Progress(order.ranks[0], order.rank_of, Replicas(((0,), (1,)), 0, 0, None), (("x",),), rank=0)
    last.begun(0, "I", 0)
    assert last.waits() == "waited for the others to end the step"


@pytest.mark.parametrize(
    ("heard", "waited_for", "gone", "says"),
    [
        (("rank 3 failed", [False, False], [1, 1]), 1, False, "rank 3 failed"),
        (("", [False, False], [0, 0]), 2, False, "rank 2 does not answer"),
        (("", [False, False], [0, 0]), 2, True, "rank 2 is gone"),
        (("", [True, False], [0, 0]), 1, True, "rank 2 is gone"),
        (("", [False, False], [0, 0]), None, False, "one of the ranks 1, 2 does not answer"),
        (("", [False, True], [1, 0]), 1, False, "rank 2 runs, but does not answer"),
        (("", [False, True], [1, 0]), 1, True, ""),
        (("", [True, True], [0, 0]), 1, False, ""),
        (None, 1, True, "rank 0, which holds the store, is gone"),
    ],
)
def test_the_first_cause_is_what_was_reported_or_who_has_fallen_silent(monkeypatch, heard, waited_for, gone, says):
    """Ranks 1 and 2 of a pipeline are heard, or miss another one, as rank 0 finds it; ranks of the job are others."""
    own, ranks = (0, [4, 5, 6]) if heard else (1, [0, 4, 5])
    store = dist.HashStore()
    monkeypatch.setattr(_torch, "default_store", lambda: SimpleNamespace(clone=lambda: store))
    monkeypatch.setattr(faults, "_listened", lambda store, own, others: heard)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert faults.first_cause(ranks, own, waited_for, gone) == says
    if heard and says and not heard[0]:
        assert store.get(faults.KEY) == says.encode(), "the others say the same"
