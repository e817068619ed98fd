"""Parts by device: follow a rule, visit each device as seldom as a list schedule can."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from splitkit.costs import Costs
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.parts import HOST, Part, PartKey
from splitkit.plans.record import Plan
from splitkit.plans.rewrite import refine


@dataclass(frozen=True)
class ByDevice:
    """Follow a node -> device rule. A device is visited several times where data comes back to it.

    Attributes:
        rule: the device of a node: a ``torch.device``, a name such as ``"cuda:1"``, or ``None`` for the host.
    """

    rule: Callable[[Node], torch.device | str | None]

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Parts are ``(device name, visit)`` and know their device; SK302 when the rule names no device."""
        names = {node: self._device(node) for node in flow.nodes}
        devices = dict.fromkeys(name for name in names.values() if name is not HOST)
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
                f"the rule puts {node.name} on {answer!r}, which is no device",
                "Return a torch.device, a name such as 'cuda:1', or None.",
                [node],
            ) from error
