"""``splitkit synthesize``: the order of the library for a plan, in a file that `train` runs."""

from __future__ import annotations

import pytest
from capturedmodels import captured_example

import splitkit as sk
from splitkit.pipeline.synthesize import load_order

TINY = ["--size", "layers=2,width=16,heads=2", "--size", "vocab=32,seq=4"]
FEW = ["--microbatches", "2", "--effort", "0.01"]


@pytest.fixture(scope="module")
def plan():
    gm = captured_example("gpt2", layers=2, width=16, heads=2, vocab=32, seq=4).graph
    return gm, sk.plan(gm, sk.policies.Stages(4))


def test_the_order_is_that_of_the_library_and_in_the_file(call, data, plan, tmp_path):
    gm, made = plan
    file, order = tmp_path / "plan.json", tmp_path / "order.csv"
    assert call("plan", "gpt2", *TINY, "--stages", "4", "-o", file)[0] == 0
    code, found = data("synthesize", file, *FEW, "--ranks", "2", "--placement", "V", "-o", order)
    assert code == 0 and found["command"] == "synthesize" and found["placement"] == "V"
    stages = sk.stage_costs(sk.analyze(gm), made)
    same = sk.synthesize(stages, 2, ranks=2, placement="V", effort=0.01)
    assert found["actions"] == [" ".join(map(str, row)) for row in same.order.ranks]
    assert found["value"] == same.value and found["bound"] == same.claim.bound and found["order"] == str(order)
    assert load_order(order).ranks == same.order.ranks
    limit = found["step"]["peak"]
    code, out, _ = call("synthesize", file, *FEW, "--memory", f"{limit}B", "--ranks", "2", "--links", "nvlink4")
    assert code == 0 and out.count("per rank") == 2 and "rank  stages" in out and "nvlink4" in out
    code, _, error = call("synthesize", file, *FEW, "--memory", "1KiB")
    assert code == 3 and "for one microbatch at a time, and has 1.00 KiB" in error


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        (["gpt2", "--stages", "3", "--ranks", "2"], 2, "3 stages on 2 ranks"),
        (["gpt2", "--stages", "3", "--placement", "V"], 2, "3 stages in a V"),
        (["gpt2", "--stages", "2", "--memory", "80%"], 2, "--memory is a share"),
        (["gpt2", "--stages", "2", "--memory", "much"], 2, "--memory much is not a size"),
        (["gpt2"], 2, "gpt2 needs a policy"),
    ],
)
def test_mistakes_are_told(call, words, code, reason):
    ended, _, error = call("synthesize", *words, *([*TINY, *FEW] if len(words) > 1 else FEW))
    assert ended == code and reason in error
