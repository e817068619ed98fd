"""`splitkit doctor --device`: one check that fails ends no other, and each check finds what it looks for."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch

from splitkit.cli.selftest import check_runs
from splitkit.cli.selftest import device_checks as checks
from splitkit.cli.selftest.check_runs import FAILED, NOT_RUN, OK, SECONDS, Finding, run_checks
from splitkit.cli.selftest.device_checks import exact_products

WORKER = """
import json, os, signal, sys, time
for name in json.loads(sys.argv[-1]):
    def say(verdict, trace=""):
        found = {"check": name, "what": "a", "figure": "1", "limit": "", "verdict": verdict, "trace": trace}
        print(json.dumps(found), flush=True)
    print("words of a library", flush=True)
    say("ok")
    if name == "equal: llama":
        print("the driver is gone", file=sys.stderr, flush=True)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "equal: t5":
        time.sleep(60)
    if name == "equal: conv net":
        say("FAILED", "Traceback")
        print(json.dumps({"end": name}), flush=True)
        sys.exit(0)
    print(json.dumps({"end": name}), flush=True)
"""


def test_checks_go_on_after_one_that_crashes_hangs_or_raises(monkeypatch, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/worker.py "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(check_runs.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setitem(SECONDS, "equal: t5", 0.5)
    shown: list[Finding] = []
    names = ["equal: gpt2", "equal: llama", "equal: t5", "equal: conv net", "memory: forward"]
    found = run_checks(["cpu"], shown.append, names)
    assert shown == found
    assert [(one.check, one.verdict) for one in found] == [
        ("equal: gpt2", OK),
        ("equal: llama", OK),
        ("equal: llama", FAILED),
        ("equal: t5", OK),
        ("equal: t5", FAILED),
        ("equal: conv net", OK),
        ("equal: conv net", FAILED),
        ("memory: forward", OK),
    ]
    assert found[2].figure == "killed by SIGSEGV" and "the driver is gone" in found[2].trace
    assert found[4].figure == "not done after 0 s"


def test_checks_for_which_no_time_is_left_are_not_run(monkeypatch):
    monkeypatch.setattr(check_runs, "WHOLE", 0.0)
    found = run_checks(["cpu"], lambda finding: None, ["equal: gpt2", "equal: t5"])
    assert [(one.check, one.verdict) for one in found] == [("equal: gpt2", NOT_RUN), ("equal: t5", NOT_RUN)]


def test_a_sanitizer_watches_the_same_check(monkeypatch, tmp_path):
    tool, cuda = tmp_path / "compute-sanitizer", torch.device("cuda:0")
    monkeypatch.setattr(checks.shutil, "which", lambda name: str(tool))
    for code, verdict in ((0, OK), (9, FAILED)):
        tool.write_text(f'#!/bin/sh\necho "$@" "$SPLITKIT_UNDER_SANITIZER"\nexit {code}\n')
        tool.chmod(0o755)
        found = checks._races("streams: offload", cuda)
        assert found.verdict == verdict
    words = f"--tool racecheck --error-exitcode 9 {sys.executable} -m splitkit.cli.selftest.device_checks"
    assert found.trace == f'{words} ["cuda:0"] ["streams: offload"] 1\n'
    assert checks._races("streams: offload", torch.device("cpu")).verdict == NOT_RUN


def test_a_worker_prints_what_a_check_finds_and_where_it_raised(monkeypatch, capsys):
    def check(name, devices):
        yield Finding("equal: gpt2", "numbers", f"on {devices[0]}")
        raise ValueError("no such kernel\nand more")

    monkeypatch.setitem(checks.CHECKS, "equal: gpt2", check)
    assert checks.run("equal: gpt2", [torch.device("cpu")])
    first, second, end = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["figure"] == "on cpu" and first["verdict"] == OK
    assert second["figure"] == "ValueError: no such kernel" and second["verdict"] == FAILED
    assert "raise ValueError" in second["trace"] and end == {"end": "equal: gpt2"}


def test_a_wrong_number_is_found(monkeypatch):
    cpu = [torch.device("cpu")]
    found = list(checks.CHECKS["equal: conv net"]("equal: conv net", cpu))
    assert [one.verdict for one in found] == [OK] * 6
    monkeypatch.setattr(checks, "_ADDED", 0)
    real = checks.sk.split

    def wrong(gm, policy):
        made = real(gm, policy)
        for part in made.parts.values():
            part.register_forward_hook(lambda module, given, out: out if isinstance(out, tuple) else out * 1.01)
        return made

    monkeypatch.setattr(checks.sk, "split", wrong)
    assert FAILED in [one.verdict for one in checks.CHECKS["equal: conv net"]("equal: conv net", cpu)]


def test_memory_above_the_plan_is_found():
    measured = checks.MeasuredMemory(120, None, 0, 0, (), (), (), {"cuda:0": 110}, {"cuda:0": 121, "cpu": 5})
    cuda = torch.device("cuda:0")
    exact = list(checks._bytes("memory: forward", "net", 110, measured, cuda))
    assert [one.verdict for one in exact] == [OK, FAILED]
    assert exact[1].figure == "121 B allocated, +10.0% of the plan"
    least = list(checks._bytes("memory: budgets", "net", 100, measured, cuda, exact=False))
    assert [one.verdict for one in least] == [FAILED, FAILED]
    elsewhere = checks._bytes("memory: forward", "net", 0, measured, torch.device("mps"))
    assert [one.verdict for one in elsewhere] == [OK, NOT_RUN]


def test_a_loop_runs_on_a_card_of_the_planned_size(monkeypatch):
    """What torch may reserve is limited while it runs, and no longer."""
    said = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=400))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: said.append("emptied"))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: said.append(share))
    with checks._card_of(100, torch.device("cuda:0")):
        assert said == ["emptied", 0.25]
    assert said[2:] == [1.0]


def test_ranks_share_one_device_and_have_two():
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    assert checks._on([torch.device("cpu")]) == ("gloo", ["cpu", "cpu"])
    assert checks._on([first]) == ("host", ["cuda:0", "cuda:0"])
    assert checks._on([first, second]) == ("nccl", ["cuda:0", "cuda:1"])


def test_a_device_that_is_not_there_is_refused(call):
    for option, name in (
        ("--device", "cuda:99"),
        ("--devices", "cuda:0,cuda:99"),
        ("--device", "meta"),
        ("--device", "cpu,"),
    ):
        code, _, err = call("doctor", option, name)
        assert code == 2 and "SK602" in err and "Try --device cpu" in err


def test_exact_products_where_the_flags_of_the_process_are_frozen(monkeypatch):
    """As they are after an import of torch's own helpers for tests."""
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", False)
    assert torch.backends.flags_frozen()
    flags, before = torch.backends.cudnn, torch.backends.cudnn.allow_tf32
    with exact_products():
        assert not flags.allow_tf32
    assert flags.allow_tf32 == before
