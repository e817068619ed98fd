"""``splitkit train --nproc`` leaves no process behind, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from splitkit.cli import launcher
from splitkit.cli.launcher import remembered_interrupts
from splitkit.errors import PipelineError

RANK = """#!/bin/sh
echo $$ >> "{folder}/pids"
{body}
"""


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Ranks that are a shell script; a function that starts two, and one that says which of them are there."""

    def started(body, wait=30.0):
        script = tmp_path / "rank.sh"
        script.write_text(RANK.format(folder=tmp_path, body=body))
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return launcher.ranks(["train"], 2, wait)

    def pids():
        path = tmp_path / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    return started, pids


@pytest.fixture
def own_handler():
    """Handle a signal as if nothing had told this process otherwise; gives what handles it then."""
    before = {}

    def use(number, handler=None):
        if handler is None:
            handler = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        before[number] = signal.signal(number, handler)
        return handler

    yield use
    for number, handler in before.items():
        signal.signal(number, handler)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("number", "raises"),
    [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit)],
)
def test_a_signal_ends_all_ranks(ranks, own_handler, number, raises):
    """SIGTERM and SIGHUP left them running."""
    started, pids = ranks
    before = own_handler(number)

    def send():
        while len(pids()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(raises):
        started("sleep 100")
    assert len(pids()) == 2 and not any(map(alive, pids())) and signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_rank_that_is_just_being_started(ranks, own_handler, monkeypatch, number):
    """The signal comes when the process is there already, and not yet known."""
    started, pids = ranks
    own_handler(number)

    def late(*given, **options):
        process = Popen(*given, **options)
        while not pids():
            time.sleep(0.01)
        os.kill(os.getpid(), number)
        return process

    Popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", late)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        started("sleep 100")
    assert pids() and not any(map(alive, pids()))


def test_an_interrupt_that_an_import_has_swallowed_ends_the_command_before_it_starts_ranks(ranks, own_handler):
    """Torch's import of numpy clears KeyboardInterrupt: the ranks were started, and trained to the end."""
    started, pids = ranks
    before = own_handler(signal.SIGINT)
    with remembered_interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            started("exit 0")
    assert not pids() and signal.getsignal(signal.SIGINT) is before


def test_a_signal_that_nohup_has_ignored_stays_ignored(ranks, own_handler):
    started, _ = ranks
    own_handler(signal.SIGHUP, signal.SIG_IGN)
    assert started("kill -HUP $PPID; exit 3") == (3, "")


def test_ranks_that_wait_for_one_that_failed_are_ended(ranks, monkeypatch):
    started, pids = ranks
    monkeypatch.setattr(launcher, "GRACE", 0.1)
    code, out = started("if [ $RANK = 1 ]; then exit 3; fi; echo said; sleep 100", wait=0.1)
    error = json.loads(out)["error"]
    assert code == 3 and error["code"] == "SK805" and error["reason"] == "rank 0 hangs"
    assert not any(map(alive, pids()))


@pytest.mark.parametrize(("ending", "says"), [("KILL", "was ended by SIGKILL"), ("STOP", "is stopped (SIGSTOP)")])
def test_a_rank_that_cannot_say_how_it_ended_is_named(ranks, ending, says):
    """Only lost connections were reported. A stopped rank was waited for until the time limit was over twice."""
    started, pids = ranks
    said = "echo '" + said_by("SK805", "another rank does not answer") + "'"
    code, out = started(f"if [ $RANK = 1 ]; then kill -{ending} $$; fi; {said}; exit 1", wait=60.0)
    error = json.loads(out)["error"]
    assert code and error["reason"] == f"another rank does not answer; rank 1 {says}"
    assert not any(map(alive, pids()))


KILLED = """
import sys
from splitkit.cli import launcher
sys.argv = ["splitkit", "train"]
sys.executable = {script!r}
launcher.ranks(["train"], 2, 30.0)
"""
RANK_OF_KILLED = """#!{python}
import os, sys
sys.path.insert(0, {root!r})
from splitkit.cli.launcher import end_with_launcher
end_with_launcher()
child = os.fork()
with open({folder!r} + "/pids", "a") as file:
    file.write(str(os.getpid()) + chr(10))
import time
time.sleep(100)
"""


def test_a_launcher_that_is_killed_takes_the_ranks_with_it(tmp_path):
    """They waited for each other until their time limit, or trained on; so did what they had started."""
    script, root = tmp_path / "rank.py", str(Path(__file__).parents[2])
    script.write_text(RANK_OF_KILLED.format(python=sys.executable, root=root, folder=str(tmp_path)))
    script.chmod(0o755)
    code = KILLED.format(script=str(script))
    with subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root}) as process:
        until(lambda: (tmp_path / "pids").exists() and len((tmp_path / "pids").read_text().split()) == 4)
        process.kill()
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    until(lambda: not any(map(running, pids)))


def until(holds, seconds=60.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def running(pid):
    """Whether a process is there and no zombie, which an ancestor has yet to collect."""
    found = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], text=True, capture_output=True).stdout.strip()
    return bool(found) and not found.startswith("Z")


def test_what_rank_0_writes_is_handed_on(ranks):
    started, _ = ranks
    assert started('echo "rank $RANK of $WORLD_SIZE"') == (0, "rank 0 of 2\n")


def said_by(code, reason):
    return json.dumps({"error": {"code": code, "reason": reason, "remedy": "", "nodes": []}})


LOST = said_by(None, "RuntimeError: Connection closed by peer [127.0.0.1]:5")
TOLD = said_by("SK804", "rank 1 captured a different graph")


@pytest.mark.parametrize(
    ("first", "other", "shown"),
    [
        (LOST, TOLD, TOLD),
        (said_by("SK805", "another rank is gone"), TOLD, TOLD),
        (LOST, said_by("SK805", "rank 1 failed"), said_by("SK805", "rank 1 failed")),
        (LOST, said_by(None, "ValueError: no such thing"), said_by(None, "ValueError: no such thing")),
        ("", TOLD, TOLD),
        (
            said_by("SK805", "rank 1 failed; rank 0 waited"),
            said_by("SK805", "rank 1 failed"),
            said_by("SK805", "rank 1 failed"),
        ),
        (
            said_by("SK805", "another rank is gone"),
            said_by("SK805", "rank 3 is gone; rank 1 waited for it"),
            said_by("SK805", "rank 3 is gone; rank 1 waited for it"),
        ),
        (TOLD, LOST, TOLD),
        ('{"command": "train"}', "", '{"command": "train"}'),
    ],
)
def test_the_error_that_tells_most_is_shown(ranks, first, other, shown):
    """A rank that fails takes the others with it: rank 0's lost connection was all that was shown."""
    started, _ = ranks
    code, out = started(f"test $RANK = 0 && echo '{first}' || echo '{other}'\nexit 1")
    assert code == 1 and out.strip() == shown


def test_ranks_have_one_hash_seed(ranks, monkeypatch):
    """A loop over a set of strings runs in the order that the seed gives it."""
    started, _ = ranks
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seeds = "echo $PYTHONHASHSEED"
    assert started(seeds)[1].strip() == "0"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert started(seeds)[1].strip() == "7"


def test_what_the_ranks_answer_is_data_or_the_error_of_a_rank(ranks, monkeypatch):
    for code, out, data in (
        (0, '{"loss": 1.5}', {"loss": 1.5}),
        (0, "", None),
        (4, '{"same": false}', {"same": False}),
    ):
        monkeypatch.setattr(launcher, "ranks", lambda words, *_, told=(code, out): told)
        assert launcher.answer(["train"], 2, 1.0) == (code, data)
    for told, expected in ((TOLD, "SK804"), (LOST, "SK805")):
        monkeypatch.setattr(launcher, "ranks", lambda words, *_, told=told: (1, told))
        with pytest.raises(PipelineError) as caught:
            launcher.answer(["train"], 2, 1.0)
        assert caught.value.code == expected
