"""The published workloads: known optima, and the definition in words counted again from the file."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from campaigns import some_of_all
from capturedmodels import captured_example

from splitkit.solvers import clock
from splitkit.solvers.placement import mip as rows
from splitkit.solvers.placement import packing as sets
from splitkit.solvers.placement.anneal import DeviceTable
from splitkit.solvers.placement.core import colour_groups, core_of
from splitkit.solvers.placement.latency_solver import latency
from splitkit.solvers.placement.mip import Rows
from splitkit.solvers.placement.packing import SetProgram
from splitkit.solvers.placement.set_solver import noncontiguous
from splitkit.solvers.placement.solution import InfeasibleError
from splitkit.solvers.placement.stages.contiguous import contiguous

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("placement_benchmark", BENCHMARKS / "placement.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def loads_in_the_file(data, device):
    """Load of each device, straight from the nodes and edges of a file."""
    nodes = {node["id"]: node for node in data["nodes"]}
    loads = {}
    for node, place in device.items():
        price = nodes[node]["cpuLatency" if place.startswith("cpu") else "fpgaLatency"]
        loads[place] = loads.get(place, 0.0) + price
    paid = set()
    for edge in data["edges"]:
        a, b = device[edge["sourceId"]], device[edge["destId"]]
        if a != b:
            paid |= {(place, edge["sourceId"], edge["cost"]) for place in (a, b) if place.startswith("acc")}
    for place, _, cost in paid:
        loads[place] += cost
    return loads


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LayerGraphs_bert24_inference", 17.7899),
        ("LayerGraphs_bert24_training", 41.7458),
        ("LayerGraphs_resnet50_inference", 33.7747),
        ("LayerGraphs_resnet50_training", 78.6318),
        ("OperatorGraphs_bert_l-3_inference", 27.9186),
        ("OperatorGraphs_bert_l-3_training", 65.3031),
    ],
)
def test_the_contiguous_optimum_is_proven(benchmark, name, value):
    path = BENCHMARKS / "workloads" / "throughput" / f"{name}.json"
    row = benchmark.row(benchmark.read(path), "contiguous", None)
    assert row["optimal"] and row["value"] == pytest.approx(value, abs=1e-4)
    data = json.loads(path.read_text())
    device = {node["id"]: row["devices"][str(node["id"])] for node in data["nodes"]}
    assert max(loads_in_the_file(data, device).values()) == pytest.approx(row["value"])
    for place in {place for place in device.values() if place.startswith("acc")}:
        held = sum(node["size"] for node in data["nodes"] if device[node["id"]] == place)
        assert held <= data["maxSizePerFPGA"]


@pytest.mark.parametrize(
    ("name", "spare"),
    some_of_all(["LayerGraphs_resnet50_training", "OperatorGraphs_bert_l-3_training"], [1.1, 1.02, 1.3], always=()),
)
def test_optima_in_tight_memory_are_proven_and_do_not_depend_on_numbers(benchmark, tmp_path, name, spare):
    path = BENCHMARKS / "workloads" / "throughput" / f"{name}.json"
    data = json.loads(path.read_text())
    data["maxSizePerFPGA"] = spare * sum(node["size"] for node in data["nodes"]) / data["maxFPGAs"]
    tight, other = tmp_path / "tight.json", tmp_path / "other.json"
    tight.write_text(json.dumps(data))
    number = np.random.default_rng(0).permutation(10_000)
    for node in data["nodes"]:
        node["id"] = int(number[node["id"]])
        node["fpgaLatency"], node["cpuLatency"] = 3 * node["fpgaLatency"], 3 * node["cpuLatency"]
    for edge in data["edges"]:
        edge.update(sourceId=int(number[edge["sourceId"]]), destId=int(number[edge["destId"]]), cost=3 * edge["cost"])
    data["nodes"].sort(key=lambda node: node["id"])
    other.write_text(json.dumps(data))
    one, two = (benchmark.row(benchmark.read(file), "contiguous", None) for file in (tight, other))
    assert one["optimal"] and two["optimal"]
    assert two["value"] == pytest.approx(3 * one["value"], rel=1e-9)


def test_nothing_but_the_answer_is_printed():
    code = f"""
import os, runpy, sys
from splitkit.solvers.placement.stages import stage_solver as search
run = search.StageSearch.run
def loud(self, **options):
    os.write(1, b"a line of a library in C")
    run(self, **options)
search.StageSearch.run = loud
sys.argv = ["placement.py", "--json", {str(BENCHMARKS / "workloads/throughput/LayerGraphs_bert24_inference.json")!r}]
runpy.run_path({str(BENCHMARKS / "placement.py")!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["summary"]["proven"] == 1
    assert "a line of a library in C" in done.stderr


class Fast:
    """A clock that runs faster, as it seems to run to who shares a processor."""

    def __init__(self, factor):
        self._factor, self._start = factor, time.thread_time()

    def thread_time(self):
        return self._start + self._factor * (time.thread_time() - self._start)


def test_the_same_workload_gives_the_same_placement_however_busy_the_machine(benchmark, monkeypatch):
    problem = benchmark.read(BENCHMARKS / "workloads/throughput/LayerGraphs_resnet50_training.json").problem
    assert np.array_equal(contiguous(problem).device, contiguous(problem).device)
    problem = benchmark.read(BENCHMARKS / "workloads/throughput/LayerGraphs_bert24_training.json").problem
    stopped = Rows.solve
    monkeypatch.setattr(
        Rows, "solve", lambda self, *args, **options: stopped(self, *args[:-2], 0.1, args[-1], **options)
    )
    first = noncontiguous(problem, seconds=2)
    monkeypatch.setattr(clock, "time", Fast(factor=0.5))  # idle: more time must not be more search
    second = noncontiguous(problem, seconds=2)
    assert np.array_equal(first.device, second.device) and first.value == second.value
    assert first.value < contiguous(problem).value


def test_what_the_clock_cut_off_is_no_result_but_its_bound_is(benchmark, monkeypatch):
    monkeypatch.setattr(rows, "GRACE", 0.0)
    monkeypatch.setattr(sets, "_FAR", 2.0)
    problem = benchmark.read(BENCHMARKS / "workloads/throughput/LayerGraphs_bert24_training.json").problem
    core = core_of(problem, colour_groups(problem))
    program = SetProgram(core, DeviceTable.of_problem(problem, core), 50.0)
    late = clock.Clock(10)
    assert program.solve(0.2, late)[0] is None and late.timed_out
    assert program.solve(0.2, clock.Clock(10), any_will_do=True)[1] > 0


def test_a_note_says_where_the_clock_ended_a_search(monkeypatch):
    """A clock that runs a million times as fast: the plan is still one, its note tells."""
    import splitkit as sk

    gm = captured_example("gpt2", layers=2, width=32, heads=2, batch=2, seq=16, vocab=50).graph
    policy = sk.policies.Devices(["h200"] * 3, links="nvlink4", pieces=None)
    assert "cut short" not in sk.plan(gm, policy).note
    monkeypatch.setattr(clock, "time", Fast(factor=1e6))
    assert sk.plan(gm, policy).note.endswith("cut short by time: another machine may find another plan")


def test_the_latency_of_the_published_greedy_is_reached(benchmark):
    problem = benchmark.read(BENCHMARKS / "workloads/latency/LayerGraphs_bert24_inference.json").problem
    assert latency(problem, seconds=2).value == pytest.approx(100.219, abs=1e-3)


def test_a_row_of_an_infeasible_workload_has_no_value(benchmark):
    workload = benchmark.read(BENCHMARKS / "workloads/throughput/LayerGraphs_resnet50_inference.json")
    devices = tuple(replace(device, capacity=3e9) for device in workload.problem.devices if not device.cpu)
    problem = replace(workload.problem, devices=devices)
    with pytest.raises(InfeasibleError, match="no placement was found within the memory"):
        contiguous(problem)
    row = benchmark.row(replace(workload, problem=problem), "contiguous", None)
    assert row["value"] is None and row["infeasible"] == "no placement was found within the memory"


def test_a_program_is_run_again_where_others_had_the_processor(monkeypatch):
    """HiGHS stops by the clock on the wall; a thread that slept through it has not had its time."""
    asked: list[float] = []
    worked = [0.0]
    milp = rows.milp

    def halted(*args, **options):
        """Ended by time at first, though the thread had done little."""
        asked.append(options["options"]["time_limit"])
        result = milp(*args, **options)
        if len(asked) == 1:
            result.status, result.x = 1, None
            worked[0] += 1.0
        return result

    def solved(late):
        program = Rows()
        x = program.block(1)
        program.add([(x, 1.0)], low=0.5)
        return program.solve(np.ones(1), np.ones(1, np.bool_), np.zeros(1), np.ones(1), 1.0, late)

    monkeypatch.setattr(rows, "milp", halted)
    monkeypatch.setattr(clock, "time", SimpleNamespace(thread_time=lambda: worked[0]))
    late = clock.Clock(10)
    found = solved(late)
    assert found.x.tolist() == [1.0] and not late.timed_out
    assert len(asked) == 2 and asked[1] == pytest.approx(2 * asked[0])
    assert late.left == 10, "and meet the clock"
