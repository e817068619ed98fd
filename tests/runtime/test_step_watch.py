"""The watch of a step on an accelerator: when it ends the process, and when it does not."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from splitkit.runtime.ranks import faults

BEAT = 0.02


class Store:
    """A store in this process; its copies are itself."""

    def __init__(self):
        self.held = dist.HashStore()

    def clone(self):
        return self.held


@pytest.fixture
def step(monkeypatch):
    """A step whose device can be made to be done; ``ended`` has what the process would have ended with."""
    made = SimpleNamespace(done=False, ended=[], over=threading.Event(), store=Store(), silent="")
    stream = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: made.done))
    monkeypatch.setattr(faults, "BEAT", BEAT)
    monkeypatch.setattr(faults, "PATIENCE", 2 * BEAT)
    monkeypatch.setattr(faults._torch, "default_store", lambda: made.store)
    monkeypatch.setattr(faults, "has_streams", lambda device: True)
    monkeypatch.setattr(faults, "stream_of", lambda device: stream)
    monkeypatch.setattr(faults, "first_cause", lambda *_: made.silent)

    def end(message, rank, ranks):
        made.ended.append(message)
        made.progress.watch.set()

    monkeypatch.setattr(faults, "_end", end)
    yield made
    made.progress.watch.set()


def watched(step, limit=100.0, state=lambda: None):
    progress = SimpleNamespace(
        rank=0, ranks=[0, 1], device=torch.device("meta"), limit=limit, failed=False, watch=step.over, state=state,
        waits=lambda: "waits", waited_for=lambda: 1,
    )  # fmt: skip
    step.progress = progress
    return faults.watched(progress)


def soon(happens):
    end = time.monotonic() + 10
    while not happens() and time.monotonic() < end:
        time.sleep(BEAT / 4)
    return happens()


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "watch"]


def test_a_device_that_waits_after_the_host_has_left_the_step_is_watched(step):
    with watched(step):
        pass
    assert soon(lambda: step.store.held.add("splitkit: beats of rank 0", 0) > 1), "it does not beat"
    assert not step.ended
    step.store.held.set(faults.KEY, "rank 1 failed")
    assert soon(lambda: step.ended == ["SK805: rank 1 failed; rank 0 waits"])


def test_the_watch_ends_when_the_device_has_done_the_step(step):
    with watched(step):
        pass
    step.done = True
    assert soon(lambda: not threads())
    step.store.held.set(faults.KEY, "rank 1 failed")
    assert not step.ended


def test_a_rank_that_gets_an_error_by_itself_raises_it(step):
    step.store.held.set(faults.KEY, "rank 1 failed")
    with pytest.raises(ValueError, match="mine"), watched(step):
        raise ValueError("mine")
    assert soon(lambda: not threads()) and not step.ended


def test_silent_ranks_are_looked_for_only_if_nothing_goes_on(step):
    step.silent = "rank 1 does not answer"
    with watched(step, 10 * BEAT, time.monotonic):
        time.sleep(30 * BEAT)
        assert not step.ended


def test_silent_ranks_are_named_before_the_time_limit(step):
    step.silent = "rank 1 does not answer"
    with watched(step, 10 * BEAT):
        assert soon(lambda: step.ended == ["SK805: rank 1 does not answer; rank 0 waits"])


def test_a_device_without_streams_has_done_the_step_when_the_host_has(step, monkeypatch):
    monkeypatch.setattr(faults, "has_streams", lambda device: False)
    with watched(step):
        assert threads()
    assert soon(lambda: not threads()) and not step.progress.watch.is_set()
