"""Placements whose true peaks fit: a solver sees sums over nodes, what they leave out is taken off its capacities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch.fx import Node

from splitkit.dataflow import module_path
from splitkit.errors import NoPlanError
from splitkit.plan import Plan
from splitkit.solvers.placement.problem import Ints, Problem
from splitkit.solvers.placement.solution import InfeasibleError, Solution
from splitkit.units import size

_ROUNDS = 12


@dataclass(frozen=True, eq=False)
class Fitting:
    """How a placement is made, and what it truly holds. A *place* is a device of the problem.

    Attributes:
        policy: on whose behalf, for errors.
        units: the nodes of the problem, for errors.
        solve: a problem -> its best placement and the plan.
        peaks: a plan -> bytes of each memory at its peak.
        held: a placement -> (places,) bytes by the sums that the solver goes by.
        memory_of: place -> the memory that it uses; several stages of a pipeline may share one.
        limits: bytes of each memory, None for no limit.
    """

    policy: object
    units: Sequence[Node]
    solve: Callable[[Problem], tuple[Solution, Plan]]
    peaks: Callable[[Plan], Sequence[int]]
    held: Callable[[Solution], Ints]
    memory_of: Sequence[int]
    limits: Sequence[int | None]

    def best(self, problem: Problem) -> tuple[Solution, Plan]:
        """The best placement that fits; its bound is that of the problem with sums alone, a relaxation.

        Raises:
            NoPlanError: SK303 if there is none, or none was found; says what would fit.
        """
        bound: float | None = None
        least: Sequence[int] | None = None
        for _ in range(_ROUNDS):
            try:
                found, plan = self.solve(problem)
            except InfeasibleError as error:
                raise self._lacking(error, least) from None
            bound = found.bound if bound is None else bound
            if all(limit is None for limit in self.limits):
                return found, plan
            peaks = self.peaks(plan)
            over = [0 if limit is None else peak - limit for peak, limit in zip(peaks, self.limits, strict=True)]
            if max(over) <= 0:
                return replace(found, bound=bound), plan
            least = peaks if least is None or max(peaks) < max(least) else least
            problem = self._tightened(problem, self.held(found), over)
        raise self._lacking(None, least)

    def _tightened(self, problem: Problem, held: Ints, over: Sequence[int]) -> Problem:
        """Less capacity for the places of the memories that hold too much."""
        total = np.zeros(len(self.limits))
        np.add.at(total, list(self.memory_of), held)
        devices = list(problem.devices)
        for place, memory in enumerate(self.memory_of):
            if over[memory] > 0:
                share = held[place] / total[memory] if total[memory] else 1.0
                now = min(devices[place].capacity, float(held[place]))
                devices[place] = replace(devices[place], capacity=max(0.0, now - over[memory] * share))
        return replace(problem, devices=tuple(devices))

    def _lacking(self, error: InfeasibleError | None, least: Sequence[int] | None) -> NoPlanError:
        name = type(self.policy).__name__
        given = ", ".join("no limit" if limit is None else size(limit) for limit in dict.fromkeys(self.limits))
        if least is not None:
            reason = f"{name}: no plan that fits {given} was found; the lowest peak found is {size(max(least))}"
            return NoPlanError("SK303", reason, f"Give {max(least)} bytes ({size(max(least))}), or more devices.")
        assert error is not None
        if error.capacity is None:
            nodes = [self.units[unit] for unit in error.units]
            remedy = "Let more devices support these nodes, put fewer together, or ask for fewer parts."
            return NoPlanError("SK303", f"{name}: {error}{listed(nodes)}", remedy, nodes)
        sure = "at least" if error.exact else "about"
        more = "" if error.devices is None else f"; or have {error.devices} devices or more"
        return NoPlanError(
            "SK303",
            f"{name}: what the parts hold does not fit {given}: {sure} {size(error.capacity)} a device is needed",
            f"Give each {error.capacity} bytes ({size(error.capacity)}), and room for what is held for a while{more}.",
        )


def listed(nodes: Sequence[Node]) -> str:
    """``: a (layers.0), b (layers.1) and 3 more``; nothing for none."""
    more = f" and {len(nodes) - 3} more" if len(nodes) > 3 else ""
    return f": {', '.join(map(_named, nodes[:3]))}{more}" if nodes else ""


def _named(node: Node) -> str:
    path = module_path(node)
    return f"{node.name} ({path})" if path else node.name
