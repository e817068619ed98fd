"""What the pictures of stages, and of forward and backward, have in common: rows, and the values between them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from splitkit.costs import unit_of
from splitkit.graph.dataflow import readers_of
from splitkit.view.data.op_columns import row_kind

if TYPE_CHECKING:
    from splitkit.graph.dataflow import Dataflow
    from splitkit.prices import Costs
    from splitkit.view.data.rows import LadderRows


class LadderModel:
    """A graph in rows; forward runs down and backward up."""

    if TYPE_CHECKING:
        flow: Dataflow
        costs: Costs
        title: str
        memory: int | None

        @cached_property
        def rows(self) -> LadderRows:
            """The rows from top to bottom."""

    @cached_property
    def nodes(self) -> list[Node]:
        """The nodes that the picture counts: the forward nodes, in graph order."""
        return [node for node in self.flow.nodes if node not in self.rows.backward]

    @cached_property
    def nodes_of_rows(self) -> list[list[Node]]:
        """The counted nodes of each row."""
        found: list[list[Node]] = [[] for _ in range(len(self.rows))]
        for node in self.nodes:
            found[self.rows.of[node]].append(node)
        return found

    def common(self) -> dict[str, Any]:
        """Return the data that all pages and still pictures of ladders have."""
        return {
            "title": self.title,
            "unit": unit_of(self.costs),
            "memory": self.memory,
            "rows": [
                {"name": name, "part": self.part_of_row(row), "ops": len(nodes), "kind": row_kind(nodes)}
                for row, (name, nodes) in enumerate(zip(self.rows.names, self.nodes_of_rows, strict=True))
            ],
            "edges": as_triples(self._edges()),
        }

    def part_of_row(self, row: int) -> int:
        """Return the number of the part that a row lies in."""
        return self.rows.parts[row]

    def _edges(self) -> dict[tuple[int, int], int]:
        """Return (row, lower row that reads from it) -> bytes of the values read; each value counts once."""
        found: dict[tuple[int, int], int] = {}
        of, late = self.rows.of, self.rows.backward
        for node, readers in readers_of(self.flow).items():
            if node in late:
                continue
            for row in sorted({of[reader] for reader in readers if reader not in late} - {of[node]}):
                found[of[node], row] = found.get((of[node], row), 0) + self.costs.nbytes(node)
        return found


def sums_of_makers(saved: Mapping[tuple[int, int], Mapping[Any, int]]) -> list[tuple[int, int, int]]:
    """Return (row, row) -> maker -> bytes as `as_triples`, with the bytes of all makers together."""
    return as_triples({rows: sum(makers.values()) for rows, makers in saved.items()})


def as_triples(found: Mapping[tuple[int, int], int]) -> list[tuple[int, int, int]]:
    """Return (row, row) -> bytes as a sorted list."""
    return [(a, b, nbytes) for (a, b), nbytes in sorted(found.items())]
