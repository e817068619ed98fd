"""Stages for inference with a cache: the largest cache, or the fastest stages that have room for a given one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from splitkit.errors import NoPlanError
from splitkit.plans.record import Plan
from splitkit.search.stages.stage_search import StagePlanner
from splitkit.search.stages.token_search import TokenSearch


@dataclass(frozen=True, eq=False)
class InferenceStages:
    """One search.

    Attributes:
        staging: the search for fast stages, which knows the request.
        cache: node -> bytes of cache per token.
        tokens: the tokens for which there must be room, for throughput.
    """

    staging: StagePlanner
    cache: Mapping[Node, int]
    tokens: int

    def plan(self, objective: str) -> Plan:
        """Return the plan for ``"tokens"`` or ``"throughput"``.

        Raises:
            NoPlanError: SK303 if no stages have room; it says what would do.
        """
        return self._most() if objective == "tokens" else self._fastest()

    @property
    def _search(self) -> TokenSearch:
        staging = self.staging
        return TokenSearch(staging.demand, staging.keys, self.cache, staging.tolerance, staging.clock)

    def _most(self) -> Plan:
        if (plan := self._search.most()) is not None:
            return plan
        return self._search.described(self.staging.plan())

    def _fastest(self) -> Plan:
        """Return the better of two plans: of all that `StagePlanner` searches, and of cuts of the graph's order."""
        held = {node: self.tokens * nbytes for node, nbytes in self.cache.items()} if self.tokens else {}
        staging = replace(self.staging, demand=replace(self.staging.demand, cache=held))
        limited = any(limit is not None for limit in staging.demand.limits(len(staging.keys)))
        cuts = self._search.fastest(self.tokens) if held and limited else None
        try:
            plan = staging.plan()
        except NoPlanError:
            if cuts is None:
                raise
            return staging.described(cuts)
        return plan if cuts is None else staging.better(plan, cuts)
