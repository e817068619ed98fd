"""The policy `ByDevice`: put each node on the device that a rule names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from splitkit.checks import shown
from splitkit.costs import Costs
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.parts import PARENT, Part, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import refine


@dataclass(frozen=True)
class ByDevice:
    """Put each node on the device that a rule names. A device is visited several times if data returns to it.

    Attributes:
        rule: a function that returns the device of a node: a ``torch.device``, a name such as ``"cuda:1"``, or ``None``
            for the parent.
    """

    rule: Callable[[Node], torch.device | str | None]

    def __post_init__(self) -> None:
        if not callable(self.rule):
            raise PolicyError(
                "SK302", f"ByDevice has rule={shown(self.rule)}", "Give a function of a node: lambda node: 'cuda:0'."
            )

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan with parts ``(device name, visit)`` on these devices; SK302 if the rule names no device."""
        names = {node: self._device(node) for node in flow.nodes}
        devices = dict.fromkeys(name for name in names.values() if name is not PARENT)
        parts: dict[PartKey, Part] = {name: Part(name, torch.device(name)) for name in devices if name}
        plan = replace(Plan.of(names), parts=parts, note=f"{len(devices)} devices by rule")
        return refine(flow, plan)

    def _device(self, node: Node) -> str | None:
        answer = self.rule(node)
        try:
            return None if answer is None else str(torch.device(answer))
        except (RuntimeError, TypeError) as error:
            raise PolicyError(
                "SK302",
                f"the rule puts {node.name} on {answer!r}, which is not a device",
                "Return a torch.device, a name such as 'cuda:1', or None.",
                [node],
            ) from error
