"""The memory of each rank by stage and kind adds up to the bytes of the simulation at every instant."""

from __future__ import annotations

from dataclasses import replace

import pytest

import splitkit as sk
from splitkit.pipeline.memory import memory_over_time
from splitkit.pipeline.memory_by_stage import UNITS, memory_by_stage
from splitkit.pipeline.stage_costs import StageCosts

LINKS = sk.costs.Links.uniform(1e3, 1e-3)
STAGES = [
    StageCosts(
        forward=1 + 0.3 * k,
        backward_input=0.7,
        backward_weight=0.9,
        saved_bytes=1000 + k,
        deferred_bytes=(600, 1500, 1002, 3000)[k],
        activation_bytes=70 + k,
        temporary_bytes=(5000, 300, 4000, 10)[k],
        parameter_bytes=90,
        gradient_bytes=80 * k,
        optimizer_bytes=160 * k,
    )
    for k in range(4)
]


def steps(points):
    """Time -> the most bytes then, and the bytes after it."""
    found = {}
    for time, nbytes in points:
        most, _ = found.get(time, (nbytes, nbytes))
        found[time] = max(most, nbytes), nbytes
    return found


def filled(points, times):
    """`steps` at all of the times; where nothing is said, nothing changes."""
    known, now, found = steps(points), 0, {}
    for time in times:
        most, now = known.get(time, (now, now))
        found[time] = most, now
    return found


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("gpipe", {}),
        ("gpipe", {"replicas": 3}),
        ("1f1b", {"replicas": 3, "static_buffers": True}),
        ("zbv", {"replicas": 3, "ranks": 2}),
        ("1f1b", {"links": LINKS}),
        ("1f1b", {"links": LINKS, "static_buffers": True}),
        ("eager-1f1b", {"links": LINKS, "static_buffers": True}),
        ("interleaved-1f1b", {"links": LINKS, "ranks": 2}),
        ("interleaved-1f1b", {"static_buffers": True, "ranks": 2}),
        ("interleaved-zero-bubble", {"links": LINKS, "ranks": 2}),
        ("zbv", {"links": LINKS, "ranks": 2}),
        ("v-min", {"links": LINKS, "ranks": 2}),
        ("dualpipev", {"links": LINKS, "ranks": 2}),
        ("zbv", {"ranks": 2, "static_buffers": True}),
    ],
)
def test_stages_and_kinds_add_up_to_the_bytes_of_the_simulation(schedule, options):
    replicas = options.get("replicas", 1)
    stages = [replace(stage, replicas=replicas) for stage in STAGES]
    rest = {name: value for name, value in options.items() if name != "replicas"}
    run = sk.simulate_schedule(stages, schedule, 8, **rest)
    held = memory_by_stage(run)
    for rank, points in enumerate(memory_over_time(run)):
        own = held.nbytes(rank)
        times = sorted({time for time, _ in (*points, *own)})
        assert filled(points, times) == filled(own, times)
        peak = run.memory[rank]
        time, messages, *counts = held.points[rank][max(range(len(own)), key=lambda i: (own[i][1], -i))]
        assert time == peak.seconds and messages == peak.messages
        of = list(zip(*[iter(counts)] * len(UNITS), strict=True))
        units = [held.units[stage] for stage in held.owned[rank]]
        saved = sum(n[0] * u[1] + n[2] * u[3] + n[3] * u[4] for n, u in zip(of, units, strict=True))
        assert saved == peak.saved
        assert sum(n[1] * u[2] for n, u in zip(of, units, strict=True)) == peak.temporaries
