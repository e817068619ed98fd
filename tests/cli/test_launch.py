"""``splitkit train --nproc`` leaves no process behind, however it ends."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from splitkit.cli import launch

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
        return launch.ranks(["train"], 2, wait)

    def pids():
        path = tmp_path / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    return started, pids


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
def test_a_signal_ends_all_ranks(ranks, number, raises):
    """SIGTERM and SIGHUP left them running."""
    started, pids = ranks
    before = signal.getsignal(number)

    def send():
        while len(pids()) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(raises):
        started("sleep 100")
    assert len(pids()) == 2 and not any(map(alive, pids())) and signal.getsignal(number) is before


def test_ranks_that_wait_for_one_that_failed_are_ended(ranks, monkeypatch):
    started, pids = ranks
    monkeypatch.setattr(launch, "GRACE", 0.1)
    code, out = started("if [ $RANK = 1 ]; then exit 3; fi; echo said; sleep 100", wait=0.1)
    assert code == 3 and out == "said\n" and not any(map(alive, pids()))


def test_what_rank_0_writes_is_handed_on(ranks):
    started, _ = ranks
    assert started('echo "rank $RANK of $WORLD_SIZE"') == (0, "rank 0 of 2\n")
