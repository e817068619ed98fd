"""The functions of Inductor's estimator: equal to the originals where those work, and working where they do not."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
from campaigns import these_first
from jointmodels import captured
from torch import nn
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.fx_passes import memory_estimator as inductors

import splitkit as sk
from splitkit.errors import GraphError


@pytest.fixture(scope="module")
def estimator():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("estimator")
    sys.modules.pop("estimator", None)


@pytest.fixture(scope="module")
def mended():
    """Inductor's own, without its fault and with the CPU counted."""
    source = inspect.getsource(inductors)
    assert "next(iter(reversed(fwd_graph.nodes)))[-1]" in source and 'device.type != "cpu"' in source, "mend this test"
    source = source.replace("next(iter(reversed(fwd_graph.nodes)))[-1]", "fwd_graph.output_node()")
    source = source.replace('return device.type != "cpu"', "return True")
    source = source.replace('if storage_key.device.type != "cpu":', "if True:")
    scope = {"__name__": "mended"}
    exec(compile(source, "mended", "exec"), scope)
    return scope


@pytest.fixture(scope="module", params=these_first(["gpt2", "writing"], ["resnet", "mixtral"]))
def pair(request):
    joint = captured(request.param).joint
    return joint.partition(default_partition), joint.partition(min_cut_rematerialization_partition)


def is_releasable(node):
    return not node.name.startswith("primals")


def test_the_same_numbers(estimator, pair, mended):
    for made in pair:
        forward, backward = made.forward.graph, made.backward.graph
        for graph in (forward, backward):
            theirs = mended["build_memory_profile"](graph, is_releasable)
            assert estimator.build_memory_profile(graph, is_releasable) == theirs
        baseline, kept = mended["get_fwd_bwd_interactions"](forward, backward)
        assert estimator.get_fwd_bwd_interactions(forward, backward) == (baseline, set(kept))
        assert estimator.get_peak_memory(forward, backward) == mended["get_peak_memory"](forward, backward)


def test_the_original_fails_and_ours_does_not(estimator, pair):
    forward, backward = pair[0].forward.graph, pair[0].backward.graph
    with pytest.raises(TypeError, match="not subscriptable"):
        inductors.get_peak_memory(forward, backward)
    assert max(inductors.build_memory_profile(forward, is_releasable)) == 0, "the CPU does not count there"
    assert estimator.get_peak_memory(forward, backward) > 0
    assert estimator.get_peak_memory(forward, backward, counts=lambda device: device.type != "cpu") == 0


def test_an_estimate_is_no_measurement(estimator):
    """Why there is `simulate_memory`: what nobody reads is never freed in the estimate."""

    class Unread(nn.Module):
        def forward(self, x):
            for _ in range(4):
                x.sin()
            return x + 1

    gm = torch.fx.symbolic_trace(Unread())
    sk.extend.propagate(gm, torch.zeros(256))
    measured = sk.measure_memory(gm, torch.zeros(256)).peak
    assert max(estimator.build_memory_profile(gm.graph, is_releasable)) == 6 * 1024
    assert sk.simulate_memory(gm).peak == measured == 2 * 1024


def test_sizes_that_only_the_data_decides(estimator):
    class Chosen(nn.Module):
        def forward(self, x):
            return x.nonzero() * 2

    graph = sk.capture(Chosen(), torch.ones(3, 4), dynamic=True).graph
    with pytest.raises(GraphError, match="SK108"):
        estimator.build_memory_profile(graph, is_releasable)
    assert estimator.build_memory_profile(graph, is_releasable, size_of=lambda n: 1000 if "u0" in str(n) else 48)


def test_sparse_values_are_refused(estimator):
    """They were a raw error."""
    gm = torch.fx.symbolic_trace(lambda x: torch.sparse.mm(x.to_sparse(), x.T).sum())
    sk.extend.propagate(gm, torch.randn(8, 16))
    with pytest.raises(GraphError, match="SK108: to_sparse is sparse"):
        estimator.build_memory_profile(gm.graph, lambda node: True)
