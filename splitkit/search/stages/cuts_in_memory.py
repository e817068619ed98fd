"""Stages that fit their memory, by `MemorySearch`: a second or two for thousands of nodes, where others time out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.search.memory.memory_search import MemoryParts, MemorySearch
from splitkit.search.request import StageRequest


@dataclass(frozen=True, eq=False)
class CutsInMemory:
    """Cuts of a few orders of the graph by true peaks.

    Attributes:
        demand: the request.
        keys: the names of the stages.
        limits: bytes of each rank, None for no limit.
        rank_of: the rank of each stage.
    """

    demand: StageRequest
    keys: tuple[PartKey, ...]
    limits: Sequence[int | None]
    rank_of: Sequence[int]

    def plans(self) -> Iterator[Plan]:
        """Yield stages that fit; if there are none, those that need the least memory in the graph's own order."""
        sizes = tuple(limit for limit in self.limits if limit is not None)
        if not self._one_a_rank or len(sizes) < len(self.limits) or self.demand.cache:
            return
        search = self._search(sizes)
        found = search.of(len(self.keys))
        if found is None:
            for count, need in search.needs():
                found = self._search((need,) * count).of(count)
        if found is not None and (plan := self._plan(found)) is not None:
            yield plan

    def fewest(self) -> int | None:
        """Return the fewest stages found, more than there are, that fit the memory of each; None if there are none."""
        limit = self.limits[0]
        if not self._one_a_rank or limit is None or len(set(self.limits)) > 1 or self.demand.cache:
            return None
        found = MemorySearch(self._free, None, lambda count: (limit,) * count).fewest()
        more = found is not None and len(found.parts) > len(self.keys) and self._plan(found) is not None
        return len(found.parts) if found is not None and more else None

    @property
    def _one_a_rank(self) -> bool:
        return len(self.limits) == len(self.rank_of)

    @property
    def _free(self) -> StageRequest:
        return replace(self.demand, memory=None)

    def _search(self, sizes: tuple[int, ...]) -> MemorySearch:
        return MemorySearch(self._free, len(self.keys), lambda count: sizes[:count])

    def _plan(self, found: MemoryParts) -> Plan | None:
        """Return the plan of some parts; None if they separate nodes that a pipeline must keep together."""
        part_of = {node: number for number, nodes in enumerate(found.parts) for node in nodes}
        if any(len({part_of[node] for node in group}) > 1 for group in self.demand.inseparable):
            return None
        keys = self.keys if len(found.parts) == len(self.keys) else tuple(range(len(found.parts)))
        return Plan.of({node: keys[part_of[node]] for node in self.demand.flow.nodes})
