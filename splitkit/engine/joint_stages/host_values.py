"""Saved values of stages that wait for backward on the host: checked, emitted, and moved between the graphs.

The forward graph starts the copy to the host as soon as a value is made, and the backward graph waits for the copy back
right before it reads the value. Whoever runs the graphs says when, in between, the memory on the device is free and
when the copy back starts (`HostValue`)::

    forward graph    x = ...    copy = to_host(x)    ...    returns copy and x
    runner           release: waits for the copy, frees x        ask: x_back = to_device(copy)
    backward graph   ...    x = arrived(x_back)    ...    reads x
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.engine.offload_copies import back_on_device
from splitkit.errors import PlanError
from splitkit.graph.symbols import value_of
from splitkit.memory.kernels.host_copies import ARRIVED, TO_DEVICE, TO_HOST, host_value
from splitkit.plans.offloaded import Offloaded
from splitkit.training.flow import JointFlow, output_nodes
from splitkit.training.movable_values import why_not_moved


@dataclass
class HostValue:
    """A saved value on its way to the host, there, or on its way back.

    Attributes:
        host: the copy on the host, complete once it has been released.
        source: the value on the device, until it is released.
        device: the device of the value.
        copy: the copy back, once it has been asked for; the backward graph waits for it.
    """

    host: torch.Tensor
    source: torch.Tensor | None
    device: torch.device
    copy: torch.Tensor | None = None

    @classmethod
    def leaving(cls, host: torch.Tensor, source: torch.Tensor) -> HostValue:
        """Return a value whose copy to the host has begun."""
        return cls(host, source, source.device)

    def release(self) -> None:
        """Wait for the copy to the host, and free the memory of the device."""
        if self.source is not None:
            self.host, self.source = ARRIVED(self.host, self.source), None

    def ask(self) -> None:
        """Start the copy back."""
        self.copy = TO_DEVICE(self.host, self.device)

    def wait(self) -> None:
        """Wait for the copy back."""
        if self.copy is not None:
            self.copy = ARRIVED(self.copy, self.host)


def host_values(held: Mapping[str, Any]) -> list[HostValue]:
    """Return the held values of a stage that move to the host."""
    return [value for value in held.values() if isinstance(value, HostValue)]


def on_device(held: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """Return values that a stage holds as its graphs take them, the moved ones as copies that are on their way."""
    found = (held[name] for name in names)
    return [value.copy if isinstance(value, HostValue) else value for value in found]


@dataclass(frozen=True, eq=False)
class StageOffload:
    """What the stages of a plan move.

    Attributes:
        flow: facts about the joint graph.
        values: value -> its stage.
    """

    flow: JointFlow
    values: Mapping[Node, int]

    @classmethod
    def of(cls, flow: JointFlow, offloaded: Iterable[Offloaded], places: Mapping[Node, Sequence[Any]]) -> StageOffload:
        """Check what a plan offloads, as far as that does not depend on the stages' borders.

        Raises:
            PlanError: SK220 for a value that cannot be moved, or with moments of its own.
        """
        found: dict[Node, int] = {}
        for one in offloaded:
            if one.release is not None or one.fetch is not None:
                flaw = "stages move values by their actions, not by nodes"
                raise _refused(one.value, flaw, "Leave out release and fetch.")
            if flaw := why_not_moved(flow, one.value):
                raise _refused(one.value, flaw)
            roots = set(flow.storages.under(one.value))
            returned = output_nodes((*flow.outputs, *flow.gradients))
            if any(not roots.isdisjoint(flow.storages.under(node)) for node in returned):
                raise _refused(one.value, "it is returned to the caller")
            stages = [key[1] for key in places.get(one.value, ()) if key[0] == "forward"]
            if len(stages) != 1:
                raise _refused(one.value, "forward does not compute it in one stage")
            found[one.value] = stages[0]
        return cls(flow, found)

    def of_stage(self, stage: int, held: Collection[Node], crossing: Collection[Node]) -> tuple[Node, ...]:
        """Return what a stage moves.

        Args:
            stage: the stage.
            held: what its forward saves.
            crossing: what it receives and sends, which the runtime holds in any case.

        Raises:
            PlanError: SK220 for a value that is not saved, or shares its memory with one that stays.
        """
        moved = [value for value, own in self.values.items() if own == stage]
        for value in moved:
            (root,) = self.flow.storages.under(value)
            if value not in held:
                raise _refused(value, f"backward of stage {stage} does not take it from forward")
            if others := [n.name for n in crossing if root in self.flow.storages.under(n)]:
                raise _refused(
                    value, f"its memory crosses the border of stage {stage} as {others[0]}, and is held there"
                )
            if others := [n.name for n in held if n is not value and root in self.flow.storages.under(n)]:
                raise _refused(value, f"{others[0]}, which is saved too, lies in the same memory")
        return tuple(sorted(moved, key=self.flow.index.__getitem__))


def start_copy(graph: fx.Graph, value: Node, made: Node) -> Node:
    """Add the start of the copy to the host after a node of a forward graph."""
    return _call(graph, f"copy_of_{value.name}", TO_HOST, (made,), value, host_value(value_of(value)))


def await_copy(graph: fx.Graph, value: Node, given: Node) -> Node:
    """Add the wait for a copy back, which a backward graph is given."""
    return _call(graph, back_on_device(value.name), ARRIVED, (given, given), value, value_of(value))


def _call(graph: fx.Graph, name: str, target: Any, args: tuple[Node, ...], value: Node, val: object) -> Node:
    made = graph.create_node("call_function", target, args, name=name)
    made.meta = {**value.meta, "val": val}
    return made


def _refused(value: Node, reason: str, remedy: str = "Leave it out of Plan.offloaded, or plan again.") -> PlanError:
    return PlanError("SK220", f"{value.name} cannot be offloaded: {reason}", remedy, [value])
