"""Computes the keys and values of an encoder's output once a request, each on the device that keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.engine.split import Split
from splitkit.engine.split import split as split_graph
from splitkit.graph.caches import ENCODER_CACHES
from splitkit.plans.parts import PartKey
from splitkit.runtime.devices.on_devices import OnDevices
from splitkit.runtime.generation.kept_caches import KeptCache


class EncoderCaches:
    """The graph that computes the constant caches of a decoder.

    Attributes:
        inputs: the names of its inputs.
    """

    def __init__(self, split: Split, caches: tuple[KeptCache, ...], devices: Mapping[PartKey, torch.device]) -> None:
        gm: fx.GraphModule = split.flow.root.meta[ENCODER_CACHES]
        homes = [cache.part for cache in caches if cache.constant]
        made = split_graph(gm, _places(gm, homes), check_inputs=False)
        self._run = OnDevices(made, {key: devices[key] for key in made.parts})
        self.inputs = tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))

    @torch.no_grad()
    def compute(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the constant caches in their order, for the output of an encoder among the inputs of a step."""
        return list(self._run(*(inputs[name] for name in self.inputs)))


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
