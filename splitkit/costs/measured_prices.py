"""Prices of nodes that were measured: of forward alone, or of forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.fx import Node

from splitkit.costs.base import StepCosts
from splitkit.costs.flop_formulas import CountedCosts, Flops
from splitkit.costs.training import FromOps
from splitkit.errors import CostError
from splitkit.graph.dataflow import Dataflow
from splitkit.short_repr import brief

Seconds = tuple[float, float]
"""Seconds of forward and of backward."""


@dataclass(frozen=True)
class Measured(CountedCosts):
    """The costs of `splitkit.costs.measured` without ``backward``.

    Attributes:
        gm: the graph.
        device: where it was measured.
        note: what the seconds are, for reports.
        busy: whether the machine was busy with other work at every attempt, so that prices may be too high.
        counter: counts FLOPs, by formula.
    """

    gm: fx.GraphModule
    device: torch.device
    note: str
    busy: bool
    counter: Flops = field(repr=False, compare=False)
    _seconds: Mapping[Node, Seconds] = field(repr=False, compare=False)
    _workspace: Mapping[Node, int] = field(repr=False, compare=False)

    __repr__ = brief

    def seconds(self, node: Node) -> float:
        """Time of the node's group in forward; 0 for inputs, attributes and state ops, and for views on a GPU.

        Raises:
            CostError: SK325 for a node that was not in the graph when it was measured.
        """
        return self.both(node)[0]

    def both(self, node: Node) -> Seconds:
        """Seconds of forward and of backward, which are 0 if it was not measured.

        Raises:
            CostError: SK325 as `seconds`.
        """
        self._require(node, self._seconds)
        return self._seconds[node]

    def workspace(self, node: Node) -> int:
        """Peak bytes allocated while the node runs forward, beyond its inputs and results.

        Raises:
            CostError: SK325 as `seconds`.
        """
        self._require(node, self._workspace)
        return self._workspace[node]

    def _require(self, node: Node, known: Mapping[Node, object]) -> None:
        if node not in known:
            raise CostError(
                "SK325",
                f"{node.name} was not measured: it was not in the graph then",
                "Measure again after editing a graph: splitkit.costs.measured(gm, inputs).",
                [node],
            )


@dataclass(frozen=True)
class MeasuredSteps(StepCosts):
    """The costs of `splitkit.costs.measured` with ``backward``.

    Attributes:
        costs: the costs of forward alone.
        formula: counts the FLOPs of forward and backward.
    """

    costs: Measured
    formula: FromOps = field(repr=False, compare=False)

    __repr__ = brief

    @classmethod
    def of(cls, costs: Measured, flow: Dataflow) -> MeasuredSteps:
        """Return prices of steps that were measured."""
        return cls(costs, FromOps(costs, flow))

    @property
    def gm(self) -> fx.GraphModule:
        """The forward graph."""
        return self.costs.gm

    @property
    def note(self) -> str:
        """What the seconds are, for reports."""
        return f"{self.costs.note}, forward and backward"

    @property
    def busy(self) -> bool:
        """Whether the machine was busy with other work at every attempt, so that prices may be too high."""
        return self.costs.busy

    def both(self, node: Node) -> Seconds:
        """Seconds of forward and of backward of the node's group; 0 for inputs, attributes and state ops.

        Raises:
            CostError: SK325 for a node that was not in the graph when it was measured.
        """
        return self.costs.both(node)

    def workspace(self, node: Node) -> int:
        """Peak bytes allocated while the node runs forward, beyond its inputs and results.

        Raises:
            CostError: SK325 as `both`.
        """
        return self.costs.workspace(node)
