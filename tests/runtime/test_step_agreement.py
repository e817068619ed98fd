"""Ranks that are about to run different things are all told so before anything runs, and can go on after that."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from launch import launch

from splitkit.runtime.ranks.step_agreement import PipelineCall, _are_same, _described, _difference, _with_row


@pytest.fixture(scope="module")
def told() -> dict[str, dict[int, dict[str, Any]]]:
    """Case -> rank -> what it was told."""
    found: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in launch("runtime/disagreeing.py", 2, check=False):
        if "case" in line:
            found[line["case"]][line["rank"]] = line
        else:
            assert not line["code"], line["error"]
    return found


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("batch", "SK804: x has other values on rank 1 than on rank 0\n"),
        ("target", "SK804: the target has other values on rank 1 than on rank 0\n"),
        ("kind", "SK804: step is called on rank 1, and infer on rank 0\n"),
        ("number", "SK804: the number of training steps so far is 5 on rank 1, and 0 on rank 0\n"),
        ("alone", "SK804: layers.3.bias has other values on rank 1 than on rank 0\n"),
        ("all", "SK804: head.weight has other values on rank 1 than on rank 0; 5 of 6 tensors differ, on rank 1\n"),
        ("frozen", "SK804: layers.3.bias is float32[8] on rank 1, and float32[8] with gradient on rank 0\n"),
        ("copies", "SK804: head.weight has other values on rank 1 than on rank 0\n"),
        ("replica", "SK804: layers.0.bias has other values on rank 1 than on rank 0\n"),
        ("other cut", "SK804: layers.1.weight has other values on rank 1 than on rank 0; 2 of "),
        ("later", "SK804: head.weight has other values on rank 1 than on rank 0\n"),
        ("changed", "SK804: head.weight has other values on rank 1 than on rank 0\n"),
        ("replica later", "SK804: layers.0.bias has other values on rank 1 than on rank 0\n"),
        ("option at once", "SK804: the optimizer's momentum is 0.5 on rank 1, and 0 on rank 0\n"),
        ("option later", "SK804: the optimizer's lr is 0.2 on rank 1, and 0.1 on rank 0\n"),
        ("forgotten", "SK804: the optimizer has made 2 steps on rank 1, and 3 on rank 0\n"),
    ],
)
def test_a_difference_is_said_on_all_ranks(told, case, says):
    assert [told[case][rank]["said"].startswith(says) for rank in (0, 1)] == [True, True], told[case]


@pytest.mark.parametrize(
    ("case", "code", "did", "says"),
    [
        ("rows", "SK802", "refused the call", "x is int64[6, 5]\n  Give int64[8, 5]: 4 microbatches of [2, 5]"),
        ("argument", "SK802", "refused the call", "the graph does not take these arguments: "),
        ("stages", "SK801", "could not prepare its stages", "these stages cannot be made"),
        ("lacks", "SK505", "could not prepare its stages", ""),
    ],
)
def test_what_one_rank_refuses_is_said_on_the_others(told, case, code, did, says):
    first, own = (told[case][rank]["said"] for rank in (0, 1))
    assert first.startswith(f"{code}: rank 1 {did}: {says}") and own.startswith(f"{code}: {says}")


def test_an_error_without_a_code_stays_as_it_is_on_its_rank(told):
    assert told["bug"][1]["said"] == "KeyError('no such target')"
    assert told["bug"][0]["said"].startswith("SK805: rank 1 refused the call: KeyError: 'no such target'")


def test_after_refusals_the_pipeline_trains_as_if_there_had_been_none(told):
    """Both steps were compared with those of the unsplit model, whose dropout depends on the number of the step."""
    for rank, needs in ((0, ["x"]), (1, ["target"])):
        assert told["right"][rank]["said"] == "" and told["right"][rank]["more"] == [2, 2, *needs]
    assert [told["copies"][rank]["more"] for rank in (0, 1)] == [[0], [0]]


@pytest.mark.parametrize("case", ["loaded", "alike", "folder", "bare", "meta", "sharded", "agree"])
def test_ranks_that_agree_as_far_as_they_can_be_compared_train(told, case):
    assert [told[case][rank]["said"] for rank in (0, 1)] == ["", ""]


def test_a_rank_that_is_gone_before_a_call_is_missed(told):
    assert list(told["gone"]) == [0]
    assert "rank 0 waited for all ranks to begin the call" in told["gone"][0]["said"]
    assert told["gone"][0]["sk"] == "SK805"


def call(x: object, target: object = None, **more: Any) -> PipelineCall:
    return PipelineCall("step", 0, {"x": x} if x is not None else {}, {} if target is None else {"y": target}, **more)


def row(given: PipelineCall) -> list[int]:
    return _with_row(given, None)[0]


def test_rows_are_the_same_if_and_only_if_the_calls_are():
    x = torch.arange(6.0).view(2, 3)
    same = call(x.t().contiguous().t(), outputs=True, weights=True)  # in another layout; these flags may differ
    assert _are_same([row(call(x)), row(same)])
    others = [x + 1, x.view(3, 2), x.int(), x.flip(0), x.to(torch.float64), 1, "1", None]
    different = [row(call(other)) for other in others[:-1]]
    assert not any(_are_same([row(call(x)), other]) for other in different)
    assert len({tuple(other) for other in different}) == len(different)


def test_what_a_rank_is_not_given_matches_everything():
    zeros = torch.zeros(4)
    assert _are_same([row(call(None)), row(call(zeros, zeros)), row(call(zeros))])
    assert not _are_same([row(call(None)), row(call(zeros, zeros)), row(call(zeros, zeros + 1))])


def test_all_ranks_that_differ_are_named():
    x = torch.zeros(2)
    found = _difference([_described(call(each)) for each in (x, x + 1, x, x + 1)])
    assert found.reason == "x has other values on ranks 1, 3 than on rank 0"
    found = _difference([_described(call(each)) for each in (None, x, x, torch.zeros(3))])
    assert found.reason == "x is float32[3] on rank 3, and float32[2] on rank 1"
