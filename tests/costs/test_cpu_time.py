"""On a busy machine prices are the time that ops take by themselves, and say that it was busy."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from capturedmodels import captured_example
from torch import fx, nn

from splitkit.costs import measuring_run
from splitkit.costs.measuring_run import MeasuredRuns, OwnTime, measured, waiting_seconds
from splitkit.frontends.joint_capture import capture
from splitkit.graph.dataflow import analyze
from splitkit.graph.ops import declare, declared


class Machine:
    """Counters that move when an op works: of the time that passes, others have a part."""

    def __init__(self, *, others: float) -> None:
        self.others = others  # seconds that others have for each second of work
        self.worked = self.passed = self.waited = 0.0
        self.slept = 0

    def work(self, seconds: float) -> None:
        self.worked += seconds
        self.waited += self.others * seconds
        self.passed += (1 + self.others) * seconds

    def sleep(self, seconds: float) -> None:
        self.passed += seconds
        self.slept += 1

    def put_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make these the counters, on top of what the thread really works."""
        real = time.thread_time
        counters = {
            "perf_counter": lambda: self.passed + real(),
            "thread_time": lambda: self.worked + real(),
            "process_time": lambda: self.worked + real(),
        }
        monkeypatch.setattr(measuring_run, "time", SimpleNamespace(**counters))
        monkeypatch.setattr(measuring_run, "waiting_seconds", lambda: self.waited)
        monkeypatch.setattr(measuring_run, "voluntary_switches", lambda: self.slept)


@pytest.fixture
def one_thread():
    """Torch with one thread, and what it had afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


NOW = {0: Machine(others=0)}


def works(x: torch.Tensor) -> torch.Tensor:
    NOW[0].work(1e-2)
    return x + 1


def sleeps(x: torch.Tensor) -> torch.Tensor:
    NOW[0].sleep(4e-2)
    return x + 2


fx.wrap("works")
fx.wrap("sleeps")


class Both(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sleeps(works(x))


@pytest.fixture
def graph(monkeypatch, one_thread):
    """A graph of both ops, of which it is known that they do nothing else."""
    monkeypatch.setattr(declared, "_DECLARED", dict(declared._DECLARED))
    for op in (works, sleeps):
        declare(op)
    return capture(Both(), torch.zeros(2), how="symbolic_trace")


@pytest.mark.parametrize("others", [0, 6.0])
def test_prices_leave_out_what_others_take(others, graph, monkeypatch):
    """A sleeping op takes its time, though its thread holds no processor meanwhile."""
    monkeypatch.setitem(NOW, 0, Machine(others=others))
    NOW[0].put_in(monkeypatch)
    costs = measured(graph, torch.zeros(2), min_run_time=1e-4)
    work, sleep = (n for n in graph.graph.nodes if n.op == "call_function")
    assert costs.seconds(work) == pytest.approx(1e-2, rel=0.3)
    assert costs.seconds(sleep) == pytest.approx(4e-2, rel=0.3)
    assert costs.busy == bool(others) == costs.note.endswith("busy with other work: the prices may be too high")


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return works(x * self.weight).sum()


def test_steps_say_that_the_machine_was_busy(graph, monkeypatch):
    monkeypatch.setitem(NOW, 0, Machine(others=6.0))
    NOW[0].put_in(monkeypatch)
    gm = capture(Trained(), torch.zeros(2), how="symbolic_trace")
    costs = measured(gm, torch.zeros(2), min_run_time=1e-4, backward=True)
    work = next(n for n in gm.graph.nodes if n.target is works)
    assert costs.busy and "busy with other work" in costs.note and costs.seconds(work) == pytest.approx(1e-2, rel=0.3)


def test_runs_that_nothing_disturbed_are_the_ones_that_count(graph):
    node = next(n for n in graph.graph.nodes if n.target is works)
    runs = MeasuredRuns(analyze(graph), torch.device("cpu"), (), False, lambda: None)
    runs._groups = {node: "group"}
    runs.busy.append(({node: 1.0}, {}))
    assert runs.seconds() == {node: (1.0, 0.0)} and not runs.enough
    runs.quiet += [({node: 3.0}, {node: 1.0}), ({node: 2.0}, {node: 4.0})]
    assert runs.seconds() == {node: (2.0, 1.0)} and runs.enough


def test_with_several_threads_the_time_that_passes_counts(monkeypatch):
    machine = Machine(others=6.0)
    machine.put_in(monkeypatch)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    clock = OwnTime()
    start = clock.now()
    machine.work(1.0)
    assert clock.now() - start == pytest.approx(7.0, rel=0.3) and clock.is_busy()


@pytest.mark.parametrize("others", [0, 1.0])
def test_a_kernel_that_counts_no_waiting_shows_it_by_the_work(others, monkeypatch):
    machine = Machine(others=others)
    machine.put_in(monkeypatch)
    monkeypatch.setattr(measuring_run, "waiting_seconds", lambda: None)
    clock = OwnTime()
    machine.work(1.0)
    assert clock.is_busy() == bool(others)


@pytest.mark.campaign
@pytest.mark.skipif(waiting_seconds() is None, reason="this kernel does not count how long threads wait")
def test_prices_beside_endless_loops_are_near_the_truth(one_thread):
    """They were 5 to 9 times too high."""
    example, gm = captured_example("gpt2", layers=2, width=256, heads=4, vocab=1000, seq=64)

    def price(beside: bool) -> float:
        costs = measured(gm, example.kwargs, backward=True)
        assert costs.busy or not beside
        return sum(map(costs.seconds, gm.graph.nodes))

    alone = price(beside=False)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * (os.cpu_count() or 1))]
    try:
        beside = price(beside=True)
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
    assert beside < 2 * alone
