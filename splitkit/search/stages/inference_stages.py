"""Stages for inference with a cache: the largest cache, or the fastest stages that have room for a given one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from torch.fx import Node

from splitkit.checks import Memory
from splitkit.errors import NoPlanError
from splitkit.plans.record import Plan
from splitkit.search.stages.stage_search import StagePlanner
from splitkit.search.stages.token_search import TokenSearch
from splitkit.units import size


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

    def plan(self, objective: str) -> Plan:
        """Return the plan for ``"tokens"`` or ``"throughput"``.

        Raises:
            NoPlanError: SK303 if no stages have room; it says what would do.
        """
        return self._most() if objective == "tokens" else self._fastest()

    @property
    def _search(self) -> TokenSearch:
        staging = self.staging
        return TokenSearch(staging.demand, staging.keys, self.cache, self.chunk, staging.tolerance, staging.clock)

    def _most(self) -> Plan:
        if (plan := self._search.most()) is not None:
            return plan
        return self._search.described(self.staging.plan())

    def _fastest(self) -> Plan:
        """Return the fastest stages with room for the tokens.

        If a step with so many tokens needs more than the capture, it is searched again with that much less memory.
        """
        search, demand = self._search, self.staging.demand
        limits = [limit for limit in demand.limits(len(self.staging.keys)) if limit is not None]
        try:
            plan = self._fastest_within(demand.memory)
            if not self.tokens or not limits or search.fits(plan, self.tokens):
                return plan
        except NoPlanError:
            if not self.tokens or not search.grows:
                raise
            plan = self._fastest_within(None)
        more = search.beside_cache(plan, self.tokens).tolist()
        less = [max(1, limit - nbytes) for limit, nbytes in zip(limits, more, strict=True)]
        with suppress(NoPlanError):
            if search.fits(again := self._fastest_within(less), self.tokens):
                return again
        with suppress(NoPlanError):
            if (most := search.most()) is not None and search.fits(most, self.tokens):
                return self.staging.described(most)
        need = max(search.peaks(plan, self.tokens))
        reason = f"{type(demand.policy).__name__}: for inference, a step with {self.tokens:,} tokens does not fit"
        remedy = f"Give {need} bytes ({size(need)}) to each of {len(limits)} devices: for that there is a plan."
        raise NoPlanError("SK303", reason, remedy)

    def _fastest_within(self, memory: Memory) -> Plan:
        """Return the better of two plans: of all that `StagePlanner` searches, and of cuts of the graph's order."""
        held = {node: self.tokens * nbytes for node, nbytes in self.cache.items()} if self.tokens else {}
        staging = replace(self.staging, demand=replace(self.staging.demand, cache=held, memory=memory))
        limits = staging.demand.limits(len(staging.keys))
        limited = any(limit is not None for limit in limits)
        cuts = replace(self._search, demand=staging.demand).fastest(self.tokens) if held and limited else None
        try:
            plan = staging.plan()
        except NoPlanError:
            if cuts is None:
                raise
            return staging.described(cuts)
        return plan if cuts is None else staging.better(plan, cuts)
