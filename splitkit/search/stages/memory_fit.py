"""Placements whose true peaks fit: a solver sees sums over nodes; what they omit is taken off its capacities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import numpy as np
from torch.fx import Node

from splitkit.errors import CostError, NoPlanError, listed
from splitkit.graph.dataflow import module_path
from splitkit.pipeline.memory import ByteBreakdown
from splitkit.pipeline.purpose import purpose
from splitkit.plans.record import Plan
from splitkit.prices import Optimizer
from splitkit.search.placement_model import PlacementModel
from splitkit.solvers.clock import Clock, endless_clock
from splitkit.solvers.placement.packing import FitCheck, least_capacity
from splitkit.solvers.placement.problem import BadProblemError, Ints, Problem
from splitkit.solvers.placement.solution import InfeasibleError, Solution
from splitkit.units import size

_ROUNDS = 12  # of ten requests, six were enough for all, and one for nine


@dataclass(frozen=True, eq=False)
class MemoryFit:
    """How a placement is found, and what it truly holds. A *place* is a device of the problem.

    Attributes:
        policy: the policy that asks, for errors.
        units: the nodes of the problem, for errors.
        solve: problem -> its best placement and the plan.
        held_by: plan -> the bytes of each memory at its peak, by kind.
        held: placement -> (places,) bytes by the solver's sums.
        memory_of: place -> its memory; several stages of a pipeline may share one.
        limits: bytes of each memory, None for no limit.
        fit: problem -> whether a placement of this kind exists.
        truly: a fallback that searches by true peaks; it returns a plan that fits, or one that needs the least memory.
        optimizer: the optimizer whose state counts, for errors.
        devices: how many devices with the same memory would do, more than there are, verified; None if not known.
        clock: the deadline.
        replicas: the devices that have one memory each, for errors.
    """

    policy: object
    units: Sequence[Node]
    solve: Callable[[Problem], tuple[Solution, Plan]]
    held_by: Callable[[Plan], Sequence[ByteBreakdown]]
    held: Callable[[Solution], Ints]
    memory_of: Sequence[int]
    limits: Sequence[int | None]
    fit: FitCheck
    optimizer: Optimizer = None
    truly: Callable[[Solution, Plan], tuple[Solution, Plan]] | None = None
    devices: Callable[[], int | None] | None = None
    clock: Clock = field(default_factory=endless_clock)
    replicas: int = 1

    def best(self, problem: Problem) -> tuple[Solution, Plan]:
        """Return the best placement that fits; its bound is that of the problem with sums alone, a relaxation.

        Raises:
            NoPlanError: SK303 if there is none, or none was found; the message says what would fit.
        """
        if all(limit is None for limit in self.limits):
            return self._solved(problem)
        bound, now, seen = 0.0, problem, list[Plan]()
        half = Clock(self.clock.left / 2, self.clock)  # the rest is for the placements with the least memory
        try:
            for number in range(_ROUNDS):
                found, plan = self.solve(now)
                bound = bound if number else found.bound
                over = self._over(plan)
                if max(over) <= 0:
                    return replace(found, bound=bound), plan
                seen.append(plan)
                if half.is_over():
                    self.clock.timed_out = True
                    break
                now = self._tightened(now, self.held(found), over)
        except InfeasibleError as error:
            if now is problem and error.cause in ("support", "devices"):
                raise self._refused(error) from None
        found, plan = self._start(problem)
        if self.truly is not None and not self.fits(plan):
            found, plan = self.truly(found, plan)
        if self.fits(plan):
            return replace(found, bound=bound), plan
        raise self._lacking(problem, min([plan, *seen], key=self.lacks))

    def _start(self, problem: Problem) -> tuple[Solution, Plan]:
        """Return the placement with the least memory by sums, or any placement if none is found."""
        with suppress(NoPlanError):
            return self.thrifty(problem)
        roomy = tuple(replace(device, capacity=np.inf) for device in problem.devices)
        return self._solved(replace(problem, devices=roomy))

    def _solved(self, problem: Problem) -> tuple[Solution, Plan]:
        try:
            return self.solve(problem)
        except InfeasibleError as error:
            raise self._refused(error) from None

    def fits(self, plan: Plan) -> bool:
        """Return whether every memory is large enough for a plan."""
        return all(limit is None for limit in self.limits) or not self.lacks(plan)

    def lacks(self, plan: Plan) -> int:
        """Return the most bytes that a memory lacks for a plan."""
        return max(0, *self._over(plan))

    def _over(self, plan: Plan) -> list[int]:
        """Return the bytes by which each memory is too small."""
        held = self.held_by(plan)
        return [0 if limit is None else one.total - limit for one, limit in zip(held, self.limits, strict=True)]

    def thrifty(self, problem: Problem) -> tuple[Solution, Plan]:
        """Return the placement with the least memory by sums; its true peak is a memory that would do."""
        capacity = float(least_capacity(problem, self.fit, self.clock))
        devices = [
            device if np.isinf(device.capacity) else replace(device, capacity=capacity) for device in problem.devices
        ]
        return self._solved(replace(problem, devices=tuple(devices)))

    def _tightened(self, problem: Problem, held: Ints, over: Sequence[int]) -> Problem:
        """Return the problem with less capacity for the places of memories that hold too much."""
        total = np.zeros(len(self.limits))
        np.add.at(total, list(self.memory_of), held)
        devices = list(problem.devices)
        for place, memory in enumerate(self.memory_of):
            if over[memory] > 0:
                share = held[place] / total[memory] if total[memory] else 1.0
                now = min(devices[place].capacity, float(held[place]))
                devices[place] = replace(devices[place], capacity=max(0.0, now - over[memory] * share))
        return replace(problem, devices=tuple(devices))

    def _refused(self, error: InfeasibleError) -> NoPlanError:
        """Return the error for a problem that no amount of memory would solve."""
        nodes = [self.units[unit] for unit in error.units]
        reason, remedy = str(error), "Let `only` name more devices, or allow more `pieces`."
        if error.cause == "support":
            reason = "no device supports all nodes that must be together"
            remedy = "Let `only` name more devices, or put fewer nodes `together`."
        elif error.cause != "devices":
            reason += "; more `seconds` may find a plan"
        return NoPlanError("SK303", f"{type(self.policy).__name__}: {reason}{nodes_listed(nodes)}", remedy, nodes)

    def _lacking(self, problem: Problem, plan: Plan) -> NoPlanError:
        """Return the error for too little memory: what the best plan holds, what needs most, and what would do."""
        given = ", ".join("no limit" if limit is None else size(limit) for limit in dict.fromkeys(self.limits))
        alone = problem.nbytes + min(problem.in_flight, default=0) * problem.saved
        largest = int(alone.argmax())
        node = self.units[largest]
        known = [one for one, limit in zip(self.held_by(plan), self.limits, strict=True) if limit is not None]
        most = max(known, key=lambda one: one.total)
        reason = f"what the parts hold does not fit {given}, for {purpose(self.optimizer)}: the fullest of the best "
        reason += f"plan found holds {most.told}; {named(node)} alone holds {size(int(alone[largest]))}"
        remedy = f"Give {most.total} bytes ({size(most.total)}) to each of {len(self.limits) * self.replicas} devices"
        remedy += ": for that there is a plan"
        if self.clock.is_over():
            reason += "; time ended the search: more `seconds` may find a plan"
        more = self.devices and self.devices()
        remedy += f"; with what each has, there is one for {more} devices." if more else "."
        error = NoPlanError("SK303", f"{type(self.policy).__name__}: {reason}", remedy, [node])
        error.excess = self.lacks(plan)
        return error


def nodes_listed(nodes: Sequence[Node]) -> str:
    """Return text such as ``: a (layers.0), b (layers.1) and 3 more``; empty for no nodes."""
    return f": {listed([*map(named, nodes)], 3)}" if nodes else ""


def named(node: Node) -> str:
    """Return text such as ``a (layers.0)``."""
    path = module_path(node)
    return f"{node.name} ({path})" if path else node.name


@contextmanager
def bad_problems(policy: object, placing: PlacementModel) -> Iterator[None]:
    """Translate a solver's refusal into the user's terms.

    Raises:
        CostError: SK323 for senseless prices, SK322 for links, SK320 for devices.
    """
    try:
        yield
    except BadProblemError as error:
        nodes = [placing.units[unit] for unit in error.units]
        who = f" (devices {', '.join(map(str, error.devices))})" if error.devices else ""
        reason = f"{type(policy).__name__}: {error}{nodes_listed(nodes) or who}"
        code, remedy = _BAD.get(error.field, _BAD["seconds"])
        raise CostError(code, reason, remedy, nodes) from error


_BAD = {
    "seconds": ("SK323", "Give every node a price of 0 seconds or more."),
    "net_costs": ("SK323", "Give every value a size of 0 bytes or more."),
    "links": ("SK322", "Give every two devices a link; for objective='latency', links that are alike."),
    "devices": ("SK320", "For objective='latency', give CPUs of one kind."),
}
"""Field of a placement problem -> code and remedy."""
