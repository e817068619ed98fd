"""Compile a graph with Inductor and a given partition function."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any
from uuid import uuid4

import torch
from torch import fx
from torch._functorch import config  # donated_buffer: 2.11, 2.13, 2.15
from torch._inductor.compile_fx import compile_fx  # 2.11, 2.13, 2.15
from torch._inductor.custom_graph_pass import CustomPartitionerFn  # 2.11, 2.13, 2.15

from splitkit.frontends.aot import PartitionFn
from splitkit.graph.storages import storage_key, value_of


class Partitioner(CustomPartitionerFn):
    """A partition function in the form of Inductor's configuration, which is part of the key of Inductor's caches."""

    def __init__(self, partition: PartitionFn) -> None:
        self.partition, self.number = partition, uuid4().hex

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Divide a joint graph."""
        return self.partition(gm, joint_inputs, **others)

    def uuid(self) -> str:
        """Return a unique id, so that no graph that another policy divided is taken from a cache."""
        return self.number

    def __deepcopy__(self, memo: object) -> Partitioner:
        """Return itself: Inductor copies its whole configuration."""
        return self

    def __reduce__(self) -> tuple[type, tuple[str]]:
        """Pickle as the unique id: Inductor hashes its configuration by pickling it."""
        return str, (self.number,)


def compile_with(gm: fx.GraphModule, example_inputs: Sequence[Any], partition: PartitionFn) -> Callable[..., Any]:
    """Compile a Dynamo graph as torch's ``inductor`` backend does, divided by ``partition``."""

    def divided(joint: fx.GraphModule, inputs: Any, **others: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        forward, backward = partition(joint, inputs, **others)
        if saves_views(forward, others["num_fwd_outputs"]):
            config.donated_buffer = False
        return forward, backward

    # With donated buffers, Inductor's backward writes results over saved values after their last use, and does not
    # check whether another saved value shares their memory (2.11, 2.13, 2.15).
    with config.patch(donated_buffer=config.donated_buffer):
        # custom_partitioner_fn: 2.11, 2.13, 2.15
        patches = {"custom_partitioner_fn": Partitioner(divided)}
        made: Any = compile_fx(gm, list(example_inputs), config_patches=patches)
    return made  # type: ignore[no-any-return]


def saves_views(forward: fx.GraphModule, outputs: int) -> bool:
    """Return whether two saved values share a storage that is neither an input's nor an output's."""
    values: Any = forward.graph.output_node().args[0]
    kept = {*_storages(forward.graph.find_nodes(op="placeholder")), *_storages(values[:outputs])}
    saved = [key for key in _storages(values[outputs:]) if key not in kept]
    return len(set(saved)) < len(saved)


def _storages(nodes: Iterable[Any]) -> list[Hashable]:
    values = (value_of(node) for node in nodes if isinstance(node, fx.Node))
    return [storage_key(value) for value in values if isinstance(value, torch.Tensor)]
