"""torch.fx.experimental.accelerator_partitioner: parts by the memory of devices, and a graph of the parts."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.accelerator_partitioner import Partitioner
from torch.fx.experimental.partitioner_utils import Device, PartitionerConfig, PartitionMode
from torch.fx.passes.graph_manipulation import get_size_of_all_nodes

PLACE = "torch.fx.experimental.accelerator_partitioner"


class Model(nn.Module):
    """Linear layers of 4 kB, a branch that joins again, and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.scale = nn.Parameter(torch.randn(32))

    def forward(self, x):
        x = self.layers[0](x).relu()
        left, right = self.layers[1](x).relu(), self.layers[2](x) * self.scale
        x = self.layers[3](left + right)
        return self.layers[5](self.layers[4](x).relu()) + left


@pytest.mark.parametrize("mode", [PartitionMode.size_based, PartitionMode.cost_aware], ids=lambda m: m.name)
def test_the_parts_and_their_graph_are_those_of_torch(use, mode):
    model, x = Model(), torch.randn(4, 32)
    results = {}
    for engine in ("torch", "splitkit"):
        traced = fx.symbolic_trace(model)
        get_size_of_all_nodes(traced, [x])
        devices = [Device(f"dev_{i}", 15_000, i) for i in range(3)]
        latency = dict.fromkeys(traced.graph.nodes, None)
        config = PartitionerConfig(devices, mode, **_costs(latency, mode))
        spy = use(engine, PLACE)
        results[engine] = Partitioner().partition_graph(traced, model, config)
        assert len(spy.made) == 1
    ours, theirs = results["splitkit"], results["torch"]
    assert torch.equal(ours.module_with_submodules(x), model(x))
    assert len(ours.dag.nodes) == len(theirs.dag.nodes) >= 2
    assert _picture(ours.dag) == _picture(theirs.dag)


def _costs(nodes, mode):
    from torch.fx.experimental.partitioner_utils import NodeLatency

    if mode is PartitionMode.size_based:
        return {}
    return {"transfer_rate_bytes_per_sec": 1e9, "node_to_latency_mapping": {n: NodeLatency(1e-6, 1e-6) for n in nodes}}


def _picture(dag):
    """What each part reads from parts, where it lives and how large it is."""
    return {
        str(n.submodule_node): (
            sorted(str(i) for i in n.input_nodes if str(i).startswith("submod")),
            n.logical_device_ids,
            n.size_bytes,
        )
        for n in dag.nodes
    }
