"""The tables of the laws, which name every policy: `LAWS` for forward graphs, `JOINT_LAWS` for joint ones."""

from __future__ import annotations

import json
import re
from functools import cache

from torch.fx import Node
from zoographs import every_specimen

import splitkit as sk
from splitkit import policies
from splitkit.errors import NoPlanError
from splitkit.graph.fake_runs import propagate
from splitkit.graph.node_values import nodes_without_values
from splitkit.plans.policy import Policy, as_plan
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import refine
from splitkit.policies import (
    AroundOps,
    AtMarkers,
    Best,
    Buckets,
    Budget,
    ByDevice,
    ByName,
    ByParameterBytes,
    BySupport,
    Devices,
    Expert,
    MemoryBudget,
    MinCut,
    Pipeline,
    Precompute,
    Random,
    RecomputeAll,
    Remat,
    RoundRobin,
    SaveAll,
    SplitBackward,
    Stages,
)


class Mapped:
    """A mapping by node name, refined: what a user's own policy does."""

    def assign(self, flow, costs):
        return refine(flow, as_plan({n.name: len(n.name) % 3 for n in flow.nodes}, flow, costs))


class Half:
    """Every other run of three nodes is left in the parent."""

    def assign(self, flow, costs):
        return refine(flow, Plan.of({n: i // 3 % 2 for i, n in enumerate(flow.nodes) if i // 3 % 2}))


def by_letter(node: Node) -> str:
    return f"cuda:{len(node.name) % 2}"


def every_third(node: Node) -> bool:
    """A third of the nodes, spread by name."""
    return sum(map(ord, node.name)) % 3 == 0


PLACERS: dict[str, Policy] = {
    "Devices(pieces=None)": Devices(["h100", "a100"], pieces=None, seconds=60),
    "Stages(2, schedule)": Stages(2, schedule="1f1b", memory="1GiB", links="nvlink4", seconds=60),
    "Stages(4, replicas)": Stages(4, replicas=(1, 2), seconds=60),
    "Stages(4, replicas, schedule)": Stages(
        4, replicas=(1, 2), schedule="1f1b", memory="1GiB", links="nvlink4", seconds=60
    ),
    "Devices": Devices(["h100", "h100", "a100"], links="pcie4", seconds=60),
    "Devices('latency')": Devices({"cuda:0": "h100", "cuda:1": "l4"}, links="pcie4", objective="latency", seconds=60),
    "Stages(3, links)": Stages(3, links="pcie4", seconds=60),
    "MemoryBudget(parts=2)": MemoryBudget("1GiB", parts=2),
    "Best": Best([Stages(3), RoundRobin(2)], links="nvlink4"),
}
"""Policies that need to know the sizes of values, and search long; their searches end by counts, long before the clock
would end them on a busy machine, where each search would find another plan.
"""

LAWS: dict[str, Policy] = {
    **{f"RoundRobin({n})": RoundRobin(n) for n in (1, 2, 3, 5)},
    **{f"Stages({n})": Stages(n) for n in (1, 2, 3, 4)},
    **PLACERS,
    **{f"Random(seed={s})": Random(4, seed=s) for s in range(6)},
    "ByDevice": ByDevice(by_letter),
    "ByName": ByName({"*": "in a module"}),
    "ByName(blocks)": ByName({"embedding": "first", "blocks.[01]*": "first", "blocks.2*": "second"}),
    "Expert(2)": Expert(2),
    "Expert(modules)": Expert(["blocks.1", "blocks.2"]),
    "AroundOps": AroundOps(every_third),
    "AtMarkers": AtMarkers(every_third),
    "Buckets": Buckets(200, first=50),
    "ByParameterBytes": ByParameterBytes(1344),
    "BySupport": BySupport(every_third),
    "BySupport(unsupported='parts')": BySupport(every_third, unsupported="parts", min_size=2),
    "Mapped": Mapped(),
    "Half": Half(),
}

LIKE_ANOTHER = [
    *(f"RoundRobin({n})" for n in (1, 2, 5)),
    *(f"Stages({n})" for n in (1, 2, 4)),
    *(f"Random(seed={s})" for s in (0, 2, 3, 4, 5)),
]
"""Those of `LAWS` that are another one with another number: each graph has one of them in turn."""


class Lower(Budget):
    """A budget, or the smallest that there is if that is larger."""

    def assign(self, flow, costs):
        try:
            return super().assign(flow, costs)
        except NoPlanError as error:
            return Budget(int(re.search(r"Budget\((\d+)", error.remedy)[1]), of=self.of).assign(flow, costs)


PRODUCTS = ["aten.mm", "aten.addmm", "aten.bmm", "aten.convolution"]

JOINT_LAWS: dict[str, Policy] = {
    "SaveAll": SaveAll(),
    "RecomputeAll": RecomputeAll(),
    "Remat ops": Remat(PRODUCTS),
    "Remat rule": Remat(lambda node: len(node.name) % 2),
    "Remat modules": Remat(modules="*"),
    "MinCut": MinCut(),
    "MinCut, fewest bytes": MinCut(0.0),
    "Precompute": Precompute(),
    "Precompute of recompute": Precompute(RecomputeAll()),
    "Budget, all": Budget(1.0),
    "Budget, peak": Lower(0.97, of="peak"),
    "Budget, saved": Lower(0.6, of="saved"),
    "Budget, tight": Budget(0.5, of="saved"),
    "Budget, offload": Budget(0.6, offload=1e15),
}

STAGED_LAWS: dict[str, Policy] = {
    "SplitBackward": SplitBackward(),
    "SplitBackward, price": SplitBackward(1e9),
    "SplitBackward, of recompute": SplitBackward(policy=MinCut()),
    "Pipeline": Pipeline(2, microbatches=4),
    "Pipeline, gpipe": Pipeline(3, "gpipe", microbatches=2, links="nvlink4"),
    "Pipeline, zbv": Pipeline(2, "zbv", microbatches=4),
    "Pipeline, offload": Pipeline(2, "gpipe", microbatches=4, memory="1TiB", offload=1e15),
}
"""Policies of training steps whose plans have other parts than forward and backward."""


def policies_there_are():
    """The names of all policies that splitkit has."""
    return {name for name in policies.__all__ if hasattr(getattr(policies, name), "assign")}


def policies_in(table):
    """The names of splitkit's policies that a table holds."""
    found = {cls.__name__ for policy in table.values() for cls in type(policy).__mro__}
    return found & policies_there_are()


@cache
def sized(name):
    """The graph of a specimen with ``meta["val"]`` on its nodes; one of its own, since sizes change what is done."""
    specimen = _own_specimens()[name]
    if nodes_without_values(specimen.graph.graph):
        propagate(specimen.graph, *specimen.inputs)
    return specimen.graph


@cache
def _own_specimens():
    return {specimen.name: specimen for specimen in every_specimen()}


def written(plan):
    """A plan as a text, byte for byte."""
    return json.dumps(plan.to_dict())


def asked(policy, flow, costs):
    """The plan of a policy; None where it says that there is none for this graph, or that a name is not in it."""
    try:
        return policy.assign(flow, costs)
    except sk.errors.PolicyError as error:
        assert error.code in ("SK302", "SK303", "SK304") and error.remedy
        return None
