"""The searches that `solver_components` runs: published workloads, real models, and random graphs.

Models are those of `stages`, on paper; where a search takes long, smaller ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import graphs
import numpy as np
import placement
import stages
from small_nets import loss_or_sum

import splitkit as sk
from splitkit.policies import Devices, MemoryBudget, Stages
from splitkit.search.recompute.plan_pool import Pool
from splitkit.search.recompute.recompute_search import RecomputeSearch
from splitkit.solvers.clock import Clock
from splitkit.solvers.placement.stages.contiguous import contiguous
from splitkit.testing import models
from splitkit.training.choices import savings
from splitkit.training.peaks import Peaks


@contextmanager
def without_clock() -> Iterator[None]:
    """Let steps alone end the searches: then a busy machine finds what an idle one finds."""
    with patch.object(Clock, "left", property(lambda _: 1e6)):
        yield


@dataclass(frozen=True)
class Outcome:
    """What a search found.

    Attributes:
        values: what is to be small, the most important first: the objective, then the simulated step if there is one.
        bound: no plan has a smaller objective.
        solver: what found the plan, and what proved the bound, by its own account.
    """

    values: tuple[float, ...]
    bound: float
    solver: str


Case = Callable[[float], Outcome]
"""Seconds for the search -> what it found."""

MODELS = tuple(stages.LARGE)
UNEQUAL = sk.costs.Links.matrix([[0, 5e10, 6e9], [5e10, 0, 6e9], [6e9, 6e9, 0]], devices=["a", "b", "c"])
THREE = {"a": "h200", "b": "a100", "c": "a100"}
POLICIES: dict[str, Callable[[float], Any]] = {
    "4 stages, work": lambda s: Stages(4, seconds=s),
    "4 stages, nvlink4": lambda s: Stages(4, links="nvlink4", seconds=s),
    "8 stages, nvlink4": lambda s: Stages(8, links="nvlink4", seconds=s),
    "4 stages, nvlink4, 1f1b": lambda s: Stages(4, "1f1b", 16, links="nvlink4", seconds=s),
    "8 stages, nvlink4, 1f1b": lambda s: Stages(8, "1f1b", 16, links="nvlink4", seconds=s),
    "6 stages, pcie4, 1f1b": lambda s: Stages(6, "1f1b", 16, links="pcie4", seconds=s),
    "4 stages, nvlink4, 1f1b, least memory": lambda s: Stages(4, "1f1b", 16, "least", "nvlink4", seconds=s),
    "8 stages on 4 ranks, pcie4": lambda s: Stages(8, "interleaved1f1b", 16, links="pcie4", seconds=s),
    "6 stages, nodes of 3, 1f1b": lambda s: Stages(6, "1f1b", 16, links=NODES, seconds=s),
    "6 devices, pcie4, 1f1b, replicas": lambda s: Stages(6, "1f1b", 16, links="pcie4", replicas=(1, 2, 4), seconds=s),
    "2 devices, pcie5": lambda s: Devices({"a": "h200", "b": "a100"}, links="pcie5", seconds=s),
    "3 devices, unequal links": lambda s: Devices(THREE, links=UNEQUAL, seconds=s),
    "3 devices, unequal links, sets": lambda s: Devices(THREE, links=UNEQUAL, pieces=None, seconds=s),
    "3 devices, pcie5, latency": lambda s: Devices(THREE, links="pcie5", objective="latency", seconds=s),
}
"""What each model is planned with."""
NODES = sk.costs.Links.nodes(3, "nvlink4", "pcie4")
SHARES = (0.6, 0.4)
JOINT = ("gpt2", "t5")


def cases() -> dict[str, Case]:
    """All searches by name; models are captured when they are first asked for."""
    found: dict[str, Case] = {}
    for objective, folder in placement.FOLDERS.items():
        for path in sorted((placement.WORKLOADS / folder).glob("*.json")):
            found[f"{objective}: {path.stem}"] = partial(_workload, objective, path)
    for model in MODELS:
        for name, policy in POLICIES.items():
            found[f"{model}: {name}"] = partial(_planned, model, policy)
        for share in SHARES:
            found[f"{model}: memory budget {share}"] = partial(_budgeted, model, share)
    for model in JOINT:
        for share in SHARES:
            found[f"{model}: recompute {share}"] = partial(_recomputed, model, share)
        found[f"{model}: recompute least"] = partial(_recomputed, model, 0.0)
    for kind in graphs.KINDS:
        for count in (1_000, 4_000):
            found[f"random: {kind} {count}"] = partial(_random, kind, count)
    return found


def _workload(objective: str, path: Any, seconds: float) -> Outcome:
    found = placement.SOLVERS[objective](placement.read(path).problem, seconds=seconds)
    return Outcome((found.value,), found.bound, found.solver)


@cache
def _case_of(model: str) -> stages.Case:
    return stages.Case(stages.on_paper(model, stages.LARGE[model]), measure=False)


def _planned(model: str, of: Callable[[float], Any], seconds: float) -> Outcome:
    case, policy = _case_of(model), of(seconds)
    costs = None if isinstance(policy, Devices) else case.costs
    plan = sk.plan(case.gm, policy, costs)
    claim = plan.claim
    assert claim is not None
    if getattr(policy, "schedule", None) is None:
        return Outcome((claim.value,), claim.bound, claim.solver)
    prices = sk.stage_costs(case.flow, plan, case.costs)
    run = sk.simulate_schedule(prices, policy.schedule, policy.microbatches, links=policy.links)
    least = policy.memory == "least"
    values = (float(max(run.peaks)), claim.value) if least else (claim.value, run.seconds)
    return Outcome(values, 0.0 if least else claim.bound, claim.solver)


def _budgeted(model: str, share: float, _: float) -> Outcome:
    """A share of the memory of a single part: the fewest parts, then as many with the least traffic."""
    case, memory = _case_of(model), int(share * _whole(model))
    fewest = sk.plan(case.gm, MemoryBudget(memory), case.costs).claim
    assert fewest is not None
    traffic = sk.plan(case.gm, MemoryBudget(memory, parts=int(fewest.value)), case.costs).claim
    assert traffic is not None
    return Outcome((fewest.value, traffic.value), fewest.bound, f"{fewest.solver}")


@cache
def _whole(model: str) -> int:
    case = _case_of(model)
    (part,) = sk.stage_costs(case.flow, sk.plan(case.gm, MemoryBudget(2**60), case.costs), case.costs)
    return part.fixed_bytes + part.saved_bytes + part.temporary_bytes


@cache
def _joint_of(model: str) -> Pool:
    example = models.build(model, layers=4)
    joint = sk.capture_joint(example.model, *example.args, loss=loss_or_sum, **example.kwargs)
    return Pool(savings(joint.flow, sk.costs.roofline(joint.graph_module, device="a100")), Peaks(joint.flow))


def _recomputed(model: str, share: float, seconds: float) -> Outcome:
    """Seconds computed again within a share of what can be saved; of none the least peak."""
    search = RecomputeSearch(_joint_of(model).fresh())
    if not share:
        low = search.lowest_peak()
        return Outcome((float(low.peak), search.cheapest_at(low).seconds), float(search.least_peak()), "least peak")
    whole, least = _ends(model)
    limit = least + int(share * (whole - least))
    bound = search.peak(limit)
    best = search.pool.best(lambda seen: seen.peak <= limit)
    return Outcome((best.seconds if best else float("inf"),), bound, "recompute")


@cache
def _ends(model: str) -> tuple[int, int]:
    """The peak of the plan that saves all, and a low one."""
    pool = _joint_of(model).fresh()
    whole = pool.see(np.zeros(len(pool.savings.ops), np.bool_)).peak
    return whole, RecomputeSearch(pool).low_peak().peak


def _random(kind: str, count: int, seconds: float) -> Outcome:
    found = contiguous(graphs.problem(kind, count, 8), seconds=seconds)
    return Outcome((found.value,), found.bound, found.solver)
