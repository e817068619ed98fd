"""Computes the keys and values of an encoder's output once a request, each on the device that keeps them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit.engine.reduced_graph import reduce_to
from splitkit.engine.split import Split
from splitkit.engine.split import split as split_graph
from splitkit.graph.caches import ENCODER_CACHES, constant_caches
from splitkit.graph.storages import parameters_and_buffers
from splitkit.plans.parts import PartKey
from splitkit.runtime.devices.accelerators import current
from splitkit.runtime.devices.hardcoded_devices import follow_device
from splitkit.runtime.devices.move_tensors import move_tensors
from splitkit.runtime.devices.on_devices import OnDevices
from splitkit.runtime.generation.kept_caches import KeptCache


class EncoderCaches:
    """The graph that computes the constant caches of a decoder.

    Attributes:
        inputs: the names of its inputs.
    """

    def __init__(self, split: Split, caches: Sequence[KeptCache], devices: Mapping[PartKey, torch.device]) -> None:
        gm: fx.GraphModule = split.flow.root.meta[ENCODER_CACHES]
        homes = [cache.part for cache in caches if cache.constant]
        made = split_graph(gm, _places(gm, homes), check_inputs=False)
        self._run = OnDevices(made, {key: devices[key] for key in made.parts})
        self.inputs = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))

    @torch.no_grad()
    def compute(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the constant caches in their order, for the output of an encoder among the inputs of a step."""
        return list(self._run(*(inputs[name] for name in self.inputs)))


class StageEncoderCaches:
    """The graph that computes the constant caches of one stage of a decoder.

    Args:
        gm: from `encoder_caches_of`; its tensors are moved to the device.
        names: the names of the caches, in the order in which the graph returns them.
        captured: the device types on which the graph was captured.
        device: the device of the stage.
    """

    def __init__(
        self, gm: fx.GraphModule, names: Sequence[str], captured: frozenset[str], device: torch.device
    ) -> None:
        follow_device(gm, torch.device(device.type), captured)
        move_tensors(gm, nn.Module(), dict.fromkeys(map(id, parameters_and_buffers(gm).values()), device))
        self._gm, self._names, self._device = gm, tuple(names), device
        self._inputs = [node.name for node in gm.graph.find_nodes(op="placeholder")]

    @torch.no_grad()
    def compute(self, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return name -> constant cache, for the output of an encoder among the inputs of a step."""
        with current(self._device):
            found = self._gm(*(inputs[name] for name in self._inputs))
        return dict(zip(self._names, found, strict=True))


def encoder_caches_of(gm: fx.GraphModule, names: Collection[str]) -> fx.GraphModule:
    """Return the graph that computes some of a decoder's constant caches, in their order; it shares the tensors.

    Args:
        gm: the graph of a step of a decoder with an encoder.
        names: the names of the caches.
    """
    whole: fx.GraphModule = gm.meta[ENCODER_CACHES]
    graph, copied = fx.Graph(), dict[Node, Node]()
    graph.graph_copy(whole.graph, copied)
    outputs: Any = whole.graph.output_node().args[0]
    kept = [copied[node] for name, node in zip(constant_caches(gm), outputs, strict=True) if name in names]
    graph.output(tuple(kept))
    reduce_to(graph, tuple(kept))
    return fx.GraphModule(whole, graph)


def _places(gm: fx.GraphModule, homes: list[PartKey]) -> dict[Node, PartKey]:
    """Return the part of each node: that of the cache for which it is computed; of several, the first."""
    found: dict[Node, PartKey] = {}
    wanted: list[Any] = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    for output, home in zip(wanted, homes, strict=True):
        stack = [output]
        while stack:
            node = stack.pop()
            if node not in found and node.op.startswith("call_"):
                found[node] = home
                stack += node.all_input_nodes
    return found
