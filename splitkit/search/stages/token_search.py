"""The search for stages that hold the largest cache: the most tokens for which every stage has room.

A stage has room for (memory - weights - activations) / (bytes of cache per token) tokens, and the pipeline for the
least of these. Over given borders this is a bottleneck problem along a chain, which `LazyChains` solves exactly;
memory is computed only of stages that may matter. Of the plans with the most tokens the one with the fastest slowest
stage is taken, then the most even one.

If all borders of the graph are known, the result is the optimum. Otherwise the bound is of a relaxation by sums over
nodes, in any order of them: it leaves activations out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from torch import fx
from torch.fx import Node

from splitkit.checks import Memory
from splitkit.costs import unit_of
from splitkit.errors import NoPlanError
from splitkit.graph.node_values import cache_bytes
from splitkit.pipeline.decoder_step import DecoderSteps, graph_of_nodes
from splitkit.pipeline.memory import ByteBreakdown, cache_room
from splitkit.plans.parts import Claim, PartKey
from splitkit.plans.record import Plan
from splitkit.search.additive_memory import AdditiveMemory
from splitkit.search.placement_model import PlacementModel, TransferTimes
from splitkit.search.stages.candidate_borders import BorderSet, ideal_borders, loads_between, order_borders
from splitkit.search.stages.memory_fit import bad_problems
from splitkit.search.stages.stage_search import StagePlanner
from splitkit.solvers.line.border_chains import LazyChains
from splitkit.solvers.placement.packing import stages_fit
from splitkit.solvers.placement.problem import Bools, Floats, Ints, Slot
from splitkit.units import duration, size

_NEAR, _TESTS = 1e-3, 4  # relative: how far above the tokens found the relaxation is tested first; how often
_MOST = 2.0**53  # tokens; up to here floats are exact


@dataclass(frozen=True, eq=False)
class InferenceStages:
    """One search.

    Attributes:
        staging: the search for fast stages, which knows the request.
        cache: node -> bytes of cache per token.
        tokens: the tokens for which there must be room, for throughput.
        chunk: for the graph of a decoder, the most new tokens of a step, of all sequences together.
    """

    staging: StagePlanner
    cache: Mapping[Node, int]
    tokens: int
    chunk: int = 1
    _known: dict[int, int] = field(init=False, default_factory=dict, repr=False)
    _rooms: dict[tuple[PartKey, ...], list[int]] = field(init=False, default_factory=dict, repr=False)
    _parts: dict[tuple[PartKey, ...], list[fx.GraphModule]] = field(init=False, default_factory=dict, repr=False)

    def plan(self, objective: str) -> Plan:
        """Return the plan for ``"tokens"`` or ``"throughput"``.

        Raises:
            NoPlanError: SK303 if no stages have room; it says what would do.
        """
        if objective != "tokens":
            return self._fastest()
        plan = self.most()
        return self.described(self.staging.plan()) if plan is None else plan

    def _fastest(self) -> Plan:
        """Return the fastest stages with room for the tokens.

        If a step with so many tokens needs more than the capture, it is searched again with that much less memory.
        """
        demand = self.staging.demand
        limits = [limit for limit in demand.limits(len(self.staging.keys)) if limit is not None]
        try:
            plan = self._fastest_within(demand.memory)
            if not self.tokens or not limits or self.fits(plan, self.tokens):
                return plan
        except NoPlanError:
            if not self.tokens or self.steps is None:
                raise
            plan = self._fastest_within(None)
        more = self.beside_cache(plan, self.tokens).tolist()
        less = [max(1, limit - nbytes) for limit, nbytes in zip(limits, more, strict=True)]
        with suppress(NoPlanError):
            if self.fits(again := self._fastest_within(less), self.tokens):
                return again
        with suppress(NoPlanError):
            if (most := self.most()) is not None and self.fits(most, self.tokens):
                return self._holding(demand.memory).described(most)
        need = max(self.peaks(plan, self.tokens))
        reason = f"{type(demand.policy).__name__}: for inference, a step with {self.tokens:,} tokens does not fit"
        remedy = f"Give {need} bytes ({size(need)}) to each of {len(limits)} devices: for that there is a plan."
        raise NoPlanError("SK303", reason, remedy)

    def _fastest_within(self, memory: Memory) -> Plan:
        """Return the better of two plans: of all that `StagePlanner` searches, and of cuts of the graph's order."""
        staging = self._holding(memory)
        limits = staging.demand.limits(len(staging.keys))
        limited = any(limit is not None for limit in limits)
        cuts = replace(self, staging=staging).fastest(self.tokens) if staging.demand.cache and limited else None
        try:
            plan = staging.plan()
        except NoPlanError:
            if cuts is None:
                raise
            return staging.described(cuts)
        return plan if cuts is None else staging.better(plan, cuts)

    def _holding(self, memory: Memory) -> StagePlanner:
        """Return the search for fast stages beside the cache, within some memory."""
        cache = {node: self.tokens * nbytes for node, nbytes in self.cache.items()} if self.tokens else {}
        steps = self.steps if self.tokens else None
        demand = replace(self.staging.demand, cache=cache, memory=memory, steps=steps, tokens=self.tokens)
        return replace(self.staging, demand=demand)

    def most(self) -> Plan | None:
        """Return stages with room for the most tokens, with a claim; None if none are found that hold the weights.

        Raises:
            NoPlanError: SK303 if there is room for the weights, but for no token.
        """
        with bad_problems(self.staging.demand.policy, self._placing):
            found = self._most_within(self._capacity)
        if found is None:
            return None
        plan, along = found
        if (tokens := min(self.room(plan))) > 0 and any(more := self.beside_cache(plan, tokens)):
            again = self._most_within(self._capacity - more)
            if again is not None and min(self.room(again[0])) > tokens:
                plan = again[0]
        return self.described(plan, along)

    def _most_within(self, capacity: Floats) -> tuple[Plan, int] | None:
        """Return stages for the most tokens along the borders, and a bound, where only caches grow with the tokens."""
        found = self._tokens_by_pair(capacity).best()
        if found is None:
            return None
        return self.fastest(int(-found.cost), capacity) or self._plan(found.borders), int(-found.bound)

    def described(self, plan: Plan, along: int | None = None) -> Plan:
        """Return a plan with its claim and a note; ``along`` is an upper bound on the tokens along the borders.

        Raises:
            NoPlanError: SK303 if there is room for no token.
        """
        room = self.room(plan)
        tokens = min(room)
        if tokens < 1:
            raise self._no_token(plan)
        bound = self._bound(tokens, along)
        proof = "all borders" if self._track.whole else "cuts of the graph's order, sums"
        claim = Claim("tokens", tokens, max(bound, tokens), proof, self.staging.keys[room.index(tokens)])
        return replace(plan, claim=claim, note=self._note(plan, claim))

    def fastest(self, tokens: int, capacity: Floats | None = None) -> Plan | None:
        """Return the stages with the least bottleneck that have room for so many tokens, the most even ones of these;
        None if there are none. Only caches grow with the tokens here; ``capacity`` is the memory of each rank for them.
        """
        chains = self._loads_by_pair(tokens, self._capacity if capacity is None else capacity)
        if (found := chains.best()) is None:
            return None
        even = chains.best(found.cost * (1 + self.staging.tolerance))
        return self._plan((even or found).borders)

    def room(self, plan: Plan) -> list[int]:
        """Return for how many tokens each stage has room, by its true peak, up to the least room before it."""
        key = tuple(map(plan.home, self.staging.demand.flow.nodes))
        if key not in self._rooms:
            stages, cache = self.staging.demand.stage_prices.of(plan), self._cache_of(plan)
            if self.steps is None:
                room = cache_room(stages, cache, self._limits)
            else:
                weights = [replace(stage, saved_bytes=0, temporary_bytes=0) for stage in stages]
                room = cache_room(weights, cache, self._limits)
                most = min(room)
                for i, part in enumerate(self._graphs(plan)):
                    room[i] = most = self.steps.room(part, self._limits[i], most)
            self._rooms[key] = room
        return self._rooms[key]

    def _graphs(self, plan: Plan) -> list[fx.GraphModule]:
        flow = self.staging.demand.flow
        homes = tuple(map(plan.home, flow.nodes))
        if homes not in self._parts:
            inside = [
                {n for n, home in zip(flow.nodes, homes, strict=True) if home == key} for key in self.staging.keys
            ]
            self._parts[homes] = [graph_of_nodes(flow, nodes) for nodes in inside]
        return self._parts[homes]

    def peaks(self, plan: Plan, tokens: int) -> list[int]:
        """Return the bytes that each stage holds in a step with so many tokens, if the graph tells; else nothing."""
        return [] if self.steps is None else [self.steps.peak(part, tokens) for part in self._graphs(plan)]

    def fits(self, plan: Plan, tokens: int) -> bool:
        """Return whether a step with so many tokens fits, as far as the graph tells."""
        return all(peak <= limit for peak, limit in zip(self.peaks(plan, tokens), self._limits, strict=False))

    def beside_cache(self, plan: Plan, tokens: int) -> Ints:
        """Return (k,) bytes beyond cache and captured activations that each stage needs at so many tokens."""
        if self.steps is None:
            return np.zeros(len(self.staging.keys), np.int64)
        pairs = zip(self.staging.demand.stage_prices.of(plan), self._cache_of(plan), strict=True)
        known = [ByteBreakdown.of_stage(stage, cache=tokens * each).total for stage, each in pairs]
        return np.maximum(0, np.array(self.peaks(plan, tokens)) - known)

    def _note(self, plan: Plan, claim: Claim) -> str:
        tight = self.staging.keys.index(claim.limiting)
        tokens = int(claim.value)
        cache = {node: tokens * nbytes for node, nbytes in self.cache.items()}
        held = replace(self.staging.demand, cache=cache, steps=self.steps, tokens=tokens).held(plan)[tight]
        loads = self._placing.loads(plan, self.staging.keys, [0] * len(self.staging.keys), self._travel)
        slowest = duration(float(loads.max()), unit_of(self.staging.demand.costs))
        return (
            f"{len(self.staging.keys)} stages, room for {tokens:,} tokens of cache. {claim.proof}; inference: "
            f"stage {tight} is tightest, {held.told} of {size(self._limits[tight])}; the slowest {slowest}"
        )

    def _no_token(self, plan: Plan) -> NoPlanError:
        """Return the error for memory that has no room for a token, with a memory that has."""
        held = map(ByteBreakdown.of_stage, self.staging.demand.stage_prices.of(plan))
        each = [one.total + nbytes for one, nbytes in zip(held, self._cache_of(plan), strict=True)]
        need = max(self.peaks(plan, 1) or each)
        name = type(self.staging.demand.policy).__name__
        reason = f"{name}: for inference, the stages hold weights and activations, but not the cache of one token"
        remedy = (
            f"Give {need} bytes ({size(need)}) to each of {len(self.staging.keys)} devices: for that there is a plan."
        )
        return NoPlanError("SK303", reason, remedy)

    def _bound(self, tokens: int, along: int | None) -> int:
        """Return an upper bound on the tokens of every plan that computes each node once."""
        if self._track.whole and along is not None:
            return along
        spare = float(sum(self._limits)) - float(self._least_held.sum())
        low, high = tokens, max(tokens, int(spare // float(self._per_token.sum())))
        asked = low + max(1, int(_NEAR * low))
        for _ in range(_TESTS):
            answer = None if self.staging.clock.is_over() or low >= high else self._may_hold(min(asked, high))
            if answer is None:
                break
            low, high = (min(asked, high), high) if answer else (low, min(asked, high) - 1)
            asked = (low + high + 1) // 2
        return high

    def _may_hold(self, tokens: int) -> bool | None:
        """Return whether stages in any order have room for so many tokens, by sums over nodes; None if not known."""
        slots = [Slot(capacity=float(limit)) for limit in self._limits]
        nbytes = (self._least_held + tokens * self._per_token).astype(np.int64)
        return stages_fit(self._placing.problem(slots, nbytes=nbytes, ordered=True))

    def _tokens_by_pair(self, capacity: Floats) -> LazyChains:
        """Return the chains whose costs are tokens below 0; infinite for stages that do not fit."""
        track = self._track
        fixed, per_token = track.between(self._fixed), track.between(self._per_token)
        costs = _tokens(capacity[:, None] - fixed - self._least, per_token)
        least = partial(self._tokens_of, capacity)
        return LazyChains(track.first, track.last, -costs, lambda pair: -least(pair), self.staging.clock.is_over)

    def _loads_by_pair(self, tokens: int, capacity: Floats) -> LazyChains:
        """Return the chains whose costs are seconds; infinite for stages without room for so many tokens."""
        track = self._track
        loads = loads_between(track, self._placing, self._travel, len(self.staging.keys))
        if self._travel is None:
            # Among stages that are about equally fast, those between which fewer bytes go.
            share = track.crossing[0] / max(1, track.crossing[0].max())
            nudge = self.staging.tolerance * loads.max() / 2
            loads = loads + nudge * (share[track.first] + share[track.last])
        spare = capacity[:, None] - track.between(self._fixed) - self._least
        costs = np.where(spare >= tokens * track.between(self._per_token), loads, np.inf)

        def price(pair: int) -> Floats:
            found: Floats = np.where(self._tokens_of(capacity, pair) >= tokens, loads[:, pair], np.inf)
            return found

        return LazyChains(track.first, track.last, costs, price, self.staging.clock.is_over)

    def _tokens_of(self, capacity: Floats, pair: int) -> Floats:
        """Return (k,) the tokens for which each rank has room beside the stage between a pair of borders."""
        if pair not in self._known:
            held = self._track.stretch(int(self._track.first[pair]), int(self._track.last[pair]))
            self._known[pair] = held.parameters + held.temporary
        ends = self._track
        per_token = self._sums[ends.last[pair]] - self._sums[ends.first[pair]]
        return _tokens(capacity - self._known[pair], np.full(len(self.staging.keys), per_token))

    @cached_property
    def steps(self) -> DecoderSteps | None:
        """The steps of a decoder, if the graph's caches are its own."""
        flow = self.staging.demand.flow
        return DecoderSteps.of(flow, self.staging.demand.costs, self.chunk) if self.cache == cache_bytes(flow) else None

    @cached_property
    def _sums(self) -> Floats:
        """(b,) bytes of cache per token before each border."""
        return np.asarray(self._track.members @ self._per_token.astype(np.float64), np.float64)

    def _plan(self, borders: Sequence[int]) -> Plan:
        return Plan.of(self._placing.labels(self._track.stage_of(borders), self.staging.keys))

    def _cache_of(self, plan: Plan) -> list[int]:
        """Return the bytes of cache per token of each stage."""
        held = dict.fromkeys(self.staging.keys, 0)
        for node, nbytes in self.cache.items():
            held[plan.home(node)] += nbytes
        return [held[key] for key in self.staging.keys]

    @cached_property
    def _limits(self) -> list[int]:
        limits = self.staging.demand.limits(len(self.staging.keys))
        assert None not in limits
        return [limit for limit in limits if limit is not None]

    @cached_property
    def _capacity(self) -> Floats:
        return np.array(self._limits, np.float64)

    @cached_property
    def _travel(self) -> TransferTimes | None:
        return self.staging.demand.travel(range(len(self.staging.keys)))

    @cached_property
    def _placing(self) -> PlacementModel:
        demand = self.staging.demand
        return PlacementModel(demand.flow, demand.prices, [demand.seconds], together=demand.inseparable)

    @cached_property
    def _track(self) -> BorderSet:
        """All borders of the graph if they are few, else those along its own order."""
        placing, prices = self._placing, self.staging.demand.stage_prices
        if (track := ideal_borders(placing, prices)) is not None:
            return track
        order = np.arange(len(placing.units))
        messages = prices.memory.order([placing.nodes(order)]).messages[placing.places(order)]
        return order_borders(placing, prices, order, _places(messages, self._fixed + self._per_token))

    @cached_property
    def _least(self) -> Floats:
        """(p,) a lower bound on the activations of each stage: along an order those of the node that needs the most."""
        track, order = self._track, np.arange(len(self._placing.units))
        if track.whole:
            return np.zeros(len(track.first))
        alone = self.staging.demand.stage_prices.memory.order([self._placing.nodes(order)]).single_nodes()[3]
        between = np.maximum.reduceat(alone, self._placing.places(order)[track.members.sum(axis=1)][:-1])
        rows = [np.maximum.accumulate(between[start:]) for start in range(len(between))]  # as `track.first` has them
        return np.concatenate(rows).astype(np.float64)

    @cached_property
    def _fixed(self) -> Ints:
        return AdditiveMemory.of(self._placing, None, None).fixed

    @cached_property
    def _least_held(self) -> Ints:
        """(n,) bytes of which no stage holds less than the sum over its units: weights, and the activations of the one
        unit that needs most by itself.
        """
        alone = self.staging.demand.stage_prices.memory.order([self.staging.demand.flow.nodes]).single_nodes()[3]
        most = self.staging.demand.flow.nodes[int(alone.argmax())]
        held = self._fixed.copy()
        held[self._placing.index[most]] += int(alone.max())
        return held

    @cached_property
    def _per_token(self) -> Ints:
        """(n,) bytes of cache per token of each unit."""
        return self._placing.sums(self.cache)


def _tokens(spare: Floats, per_token: Floats) -> Floats:
    """Return the tokens that fit into spare bytes; -inf if even the weights do not fit."""
    some: Bools = np.broadcast_to(per_token > 0, spare.shape)
    room: Floats = np.full(spare.shape, _MOST)
    np.divide(spare, per_token, out=room, where=some)
    found: Floats = np.where(spare < 0, -np.inf, np.minimum(np.floor(room), _MOST))
    return found


# The borders between which stages with a cache may lie: all of a small graph, else many along its own order.


_MOST_BORDERS = 1_000  # of 250 units, 62 borders gave room for as many tokens as all
_SMALL = 1e-6  # of all bytes: what holds less, such as a norm, needs no border of its own


def _places(messages: Ints, held: Ints) -> Ints:
    """Return (b,) positions of an order: all, or one for each way to divide the weights and the cache.

    Of positions between which nothing is held, the one that the fewest bytes cross is taken. If there are still too
    many, those that the fewest bytes cross are, spread evenly among equals.

    Args:
        messages: (n + 1,) bytes that cross before each position.
        held: (n,) bytes of weights and of cache per token of each unit.
    """
    size = len(held)
    if size < _MOST_BORDERS:
        return np.arange(size + 1)
    group = np.concatenate([[0], np.cumsum(held > _SMALL * held.sum())])
    cheapest = np.lexsort((messages, group))
    inner = np.sort(cheapest[np.unique(group[cheapest], return_index=True)[1]])
    inner = inner[(inner > 0) & (inner < size)]
    if len(inner) > _MOST_BORDERS:
        limit = np.sort(messages[inner], kind="stable")[_MOST_BORDERS - 1]
        below, equal = inner[messages[inner] < limit], inner[messages[inner] == limit]
        some = equal[np.linspace(0, len(equal) - 1, _MOST_BORDERS - len(below)).astype(np.int64)]
        inner = np.concatenate([below, some])
    return np.unique(np.concatenate([[0], inner, [size]])).astype(np.int64)
