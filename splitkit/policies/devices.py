"""Parts for given devices: the most loaded one as little loaded as possible, or one sample as soon as possible."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch.fx import Node

from splitkit.activations import activations
from splitkit.costs import Costs, Device, Links, roofline, training
from splitkit.costs.devices import find_device
from splitkit.dataflow import Dataflow
from splitkit.errors import PolicyError
from splitkit.plan import Claim, Part, PartKey, Plan
from splitkit.plancosts import Optimizer, StagePrices, checked_optimizer, run_order
from splitkit.policies.amounts import Memory, links_of, memory_of
from splitkit.policies.by_name import ByName
from splitkit.policies.fitting import Fitting
from splitkit.policies.holding import Holding
from splitkit.policies.parameters import enough_nodes, seconds_above_zero
from splitkit.policies.placing import Placing, Travel
from splitkit.policies.staging import NEAR, bad_problems
from splitkit.rewrite import refine
from splitkit.solvers.placement import problem as placement
from splitkit.solvers.placement.contiguous import contiguous
from splitkit.solvers.placement.latency import latency
from splitkit.solvers.placement.memory import sets_fit, stages_fit
from splitkit.solvers.placement.noncontiguous import noncontiguous
from splitkit.solvers.placement.problem import Floats, Ints, Problem
from splitkit.solvers.placement.solution import Solution

OBJECTIVES = ("throughput", "latency")


@dataclass(frozen=True)
class Devices:
    """Parts for devices that may differ in speed, memory and links; each may stay empty.

    ``objective="throughput"`` makes the most loaded device as little loaded as possible: the time between two samples
    of a full pipeline. A device's load is its work and, with ``links``, each value that it sends or receives, once.
    ``objective="latency"`` makes the time of one sample as short as possible: a piece starts when all that it takes is
    there and gives when it ends.

    Where all devices are alike, the given costs are the prices; where they differ, each has those of its roofline. A
    CPU among accelerators is the host of the placement literature (Tarnawski et al. 2020): no limit on memory and
    nothing to pay for what it sends, unless ``memory`` says how much it has.

    Attributes:
        devices: names that `splitkit.costs.devices` knows, or `splitkit.costs.Device`; parts are then ``0, 1 ...``.
            Or a mapping ``{"cuda:0": "h200"}``: parts have its keys, and run on the torch devices of these names.
        memory: bytes of each device, one for all or one each; by default what the devices have.
        links: between the parts' keys, or the name of a preset; ``None``: values cross for nothing.
        objective: ``"throughput"`` or ``"latency"``.
        pieces: how many convex pieces a device may run: 1; with latency also more; ``None``: any number (throughput).
        optimizer: whose state is held; ``None``: the model is not trained.
        together: patterns of module paths as in `ByName`; what one matches goes to one device.
        only: pattern of module paths -> the keys of the devices that can run what it matches.
        seconds: about how long to search; counted in steps, so that the plan is the same on a slower machine.
    """

    devices: Sequence[str | Device] | Mapping[PartKey, str | Device]
    memory: Memory = None
    links: str | Links | None = None
    objective: str = "throughput"
    pieces: int | None = 1
    optimizer: Optimizer = None
    together: Sequence[str] = ()
    only: Mapping[str, Collection[PartKey]] = field(default_factory=dict)
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if isinstance(self.devices, str) or not isinstance(self.devices, Sequence | Mapping) or not self.devices:
            raise PolicyError("SK302", f"Devices: devices is {self.devices!r}", 'List one at least: ["h200", "h200"].')
        for device in self._given.values():
            find_device(device)
        memory_of(self, self.memory, len(self._given))
        links_of(self.links)
        checked_optimizer(self.optimizer)
        seconds_above_zero(self, self.seconds)
        if self.objective not in OBJECTIVES:
            raise PolicyError("SK302", f"Devices: objective is {self.objective!r}", f"Use {' or '.join(OBJECTIVES)}.")
        self._check_pieces()
        for pattern, keys in self.only.items():
            if unknown := [key for key in keys if key not in self._given]:
                known = ", ".join(map(str, self._given))
                raise PolicyError("SK302", f"Devices: only[{pattern!r}] names {unknown[0]!r}", f"Devices are {known}.")

    def _check_pieces(self) -> None:
        pieces, remedy = self.pieces, "Use 1, or None for any number."
        if self.objective == "latency":
            remedy = "Use a whole number >= 1."
            fine = isinstance(pieces, int) and not isinstance(pieces, bool) and pieces >= 1
        else:
            fine = pieces is None or (pieces == 1 and not isinstance(pieces, bool))
        if not fine:
            raise PolicyError("SK302", f"Devices: pieces={pieces!r} with objective {self.objective!r}", remedy)

    @property
    def _given(self) -> Mapping[PartKey, str | Device]:
        return self.devices if isinstance(self.devices, Mapping) else dict(enumerate(self.devices))

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Parts have the devices' keys; a device that runs several pieces has parts ``(key, 0), (key, 1) ...``.

        Raises:
            NoPlanError: SK303 when nothing fits; names what no device supports, or says how much memory would do.
        """
        enough_nodes(flow, 1)
        return _Search(self, flow, costs, tuple(self._given)).plan()


@dataclass(frozen=True, eq=False)
class _Search:
    """One search.

    Attributes:
        policy: what is wanted.
        flow: facts about the graph.
        costs: of its nodes.
        keys: of the devices.
        sends: shared nodes are computed once and sent.
    """

    policy: Devices
    flow: Dataflow
    costs: Costs
    keys: tuple[PartKey, ...]
    sends: bool = False

    def plan(self) -> Plan:
        """The best plan; see `Staging.plan` for shared nodes."""
        found, plan = self._found()
        value = self._value(found)
        if self._placing.shared_seconds > NEAR * value and value > found.bound * (1 + NEAR):
            sending = replace(self, sends=True)
            other, sent = sending._found()
            if sending._value(other) < value:
                return sending._described(replace(other, bound=max(found.bound, other.bound)), sent)
        return self._described(found, plan)

    def _found(self) -> tuple[Solution, Plan]:
        with bad_problems(self.policy, self._placing):
            return self._fitted(self._problem())

    def _described(self, found: Solution, plan: Plan) -> Plan:
        value, name = self._value(found), "makespan" if self.policy.objective == "latency" else "bottleneck"
        limiting = self.keys[int(self._loads(found).argmax())]
        claim = Claim(name, value, min(value, found.bound), found.solver, limiting, found.tolerance)
        used = len(set(found.device.tolist()))
        return replace(plan, note=f"{used} of {len(self.keys)} devices: {claim}", claim=claim)

    def _value(self, found: Solution) -> float:
        return found.value if self.policy.objective == "latency" else float(self._loads(found).max())

    @cached_property
    def _specs(self) -> tuple[Device, ...]:
        return tuple(find_device(self.policy._given[key]) for key in self.keys)

    @cached_property
    def _kinds(self) -> tuple[int, ...]:
        """The row of prices of each device."""
        distinct = list(dict.fromkeys(spec.name for spec in self._specs))
        return tuple(distinct.index(spec.name) for spec in self._specs)

    @cached_property
    def _limits(self) -> tuple[int | None, ...]:
        """Bytes of each device; None for hosts, and for no limit."""
        given = memory_of(self.policy, self.policy.memory, len(self.keys))
        if self.policy.memory is not None:
            return given
        return tuple(None if self._is_host(place) else spec.memory for place, spec in enumerate(self._specs))

    def _is_host(self, place: int) -> bool:
        """A CPU among accelerators."""
        is_cpu = [spec.name == "cpu" for spec in self._specs]
        return self.policy.memory is None and is_cpu[place] and not all(is_cpu)

    @cached_property
    def _placing(self) -> Placing:
        flow, distinct = self.flow, dict(zip(self._kinds, self._specs, strict=True))
        if len(distinct) == 1:
            prices = [self._trained(self.costs)]
        else:
            prices = [self._trained(roofline(flow.root, distinct[kind])) for kind in range(len(distinct))]
        rows = [{n: price.seconds(n) for n in flow.nodes} for price in prices]
        bound = {*self._groups, *self._supported}
        repeat = self._links is not None and self.policy.objective == "throughput" and not self.sends
        return Placing(flow, prices[0], rows, repeat=repeat, keep=bound)

    def _trained(self, costs: Costs) -> Costs:
        known = self.policy.optimizer is None or hasattr(costs, "backward")
        return costs if known else training(costs, self.flow.root)

    @cached_property
    def _links(self) -> Links | None:
        return links_of(self.policy.links)

    @cached_property
    def _travel(self) -> Travel | None:
        if self._links is None:
            return None
        return Travel.over(self._links, self.keys, training=self.policy.optimizer is not None)

    @cached_property
    def _groups(self) -> Mapping[Node, PartKey]:
        """Node -> the number of the pattern that it goes together by."""
        patterns = {pattern: number for number, pattern in enumerate(self.policy.together)}
        return self._matched(patterns)

    @cached_property
    def _supported(self) -> Mapping[Node, PartKey]:
        """Node -> the keys of the devices that can run it, where not all can."""
        return self._matched({pattern: tuple(keys) for pattern, keys in self.policy.only.items()})

    def _matched(self, patterns: Mapping[str, PartKey]) -> dict[Node, PartKey]:
        found = ByName(patterns).assign(self.flow, self.costs) if patterns else {}
        return {node: key for node, (key,) in found.items()}

    @cached_property
    def _stage_prices(self) -> StagePrices:
        return StagePrices(self.flow, self.costs, self.policy.optimizer, activations(self.flow.root))

    @cached_property
    def _holding(self) -> Holding:
        return Holding.of(self._placing, self._stage_prices.activations, self.policy.optimizer)

    def _problem(self) -> Problem:
        placing = self._placing
        row_of: dict[tuple[int, frozenset[Node]], int] = {}
        rows: list[Floats] = []
        specs: list[placement.Device] = []
        for place, key in enumerate(self.keys):
            barred = frozenset(n for n, keys in self._supported.items() if key not in keys)  # type: ignore[operator]
            kind = (self._kinds[place], barred)
            if kind not in row_of:
                row_of[kind] = len(rows)
                can = np.array([n not in barred for n in placing.units])
                rows.append(np.where(can, placing.seconds[kind[0]], np.inf))
            limit = self._limits[place]
            capacity = np.inf if limit is None else float(limit)
            specs.append(placement.Device(row_of[kind], capacity, host=self._is_host(place)))
        colours = np.array([self._groups.get(n, -1) for n in placing.units], np.int64)
        limited = any(limit is not None for limit in self._limits)
        return placing.problem(
            specs,
            self._travel,
            seconds=np.array(rows, np.float64),
            nbytes=self._holding.fixed + self._holding.saved if limited else None,
            colours=colours,
        )

    def _solved(self, problem: Problem) -> tuple[Solution, Plan]:
        if self.policy.objective == "latency":
            found = latency(problem, seconds=self.policy.seconds, pieces=self.policy.pieces or 1)
        else:
            solver = noncontiguous if self.policy.pieces is None else contiguous
            found = solver(problem, seconds=self.policy.seconds, advise=False)
        return found, self._plan_of(found)

    def _plan_of(self, found: Solution) -> Plan:
        """The plan; devices that are visited several times have numbered parts."""
        labels = self._placing.labels(found.device, self.keys)
        plan = Plan.of({n: labels[n] for n in self.flow.nodes})
        if found.order:
            visits = {key: key for key in self.keys}
        else:
            plan = refine(self.flow, plan)
            visits = {key: key[0] for key in plan.parts}  # type: ignore[index]
            if len(set(visits.values())) == len(visits):
                plan = Plan.of({n: [visits[k] for k in keys] for n, keys in plan.items()})
                visits = {key: key for key in self.keys}
        parts = {key: Part(key, self._torch_device(visits[key])) for key in plan.parts}
        return replace(plan, parts=parts)

    def _torch_device(self, key: PartKey) -> torch.device | None:
        """The device that the key of a mapping names."""
        if not isinstance(self.policy.devices, Mapping) or not isinstance(key, str | torch.device):
            return None
        try:
            return torch.device(key)
        except RuntimeError:
            return None

    def _fitted(self, problem: Problem) -> tuple[Solution, Plan]:
        fitting = Fitting(
            policy=self.policy,
            units=self._placing.units,
            solve=self._solved,
            peaks=self._peaks,
            held=self._held,
            memory_of=range(len(self.keys)),
            limits=self._limits,
            fit=sets_fit if self.policy.pieces is None or self.policy.objective == "latency" else stages_fit,
        )
        return fitting.best(problem)

    def _held(self, found: Solution) -> Ints:
        sums = self._holding.fixed + self._holding.saved
        return np.bincount(found.device, sums, len(self.keys)).astype(np.int64)

    def _peaks(self, plan: Plan) -> tuple[int, ...]:
        """Bytes of each device at its peak: what all its parts hold, and the most that one of them takes besides."""
        stages = self._stage_prices.of(plan)
        held, besides = [0] * len(self.keys), [0] * len(self.keys)
        for key, stage in zip(run_order(self.flow, plan), stages, strict=True):
            own = key[0] if isinstance(key, tuple) and key not in self.keys else key
            place = self.keys.index(own)
            held[place] += stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes + stage.saved_bytes
            besides[place] = max(besides[place], stage.temporary_bytes)
        return tuple(h + b for h, b in zip(held, besides, strict=True))

    def _loads(self, found: Solution) -> Floats:
        labels = self._placing.labels(found.device, self.keys)
        plan = Plan.of({n: labels[n] for n in self.flow.nodes})
        hosts = [place for place in range(len(self.keys)) if self._is_host(place)]
        return self._placing.loads(plan, self.keys, self._kinds, self._travel, hosts)
