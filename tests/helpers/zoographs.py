"""The zoo and graphs built by hand with regions and settings, for tests; `specimens` are made once for a process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import fx, nn
from visiblestate import Divided, enter_level, exit_level, observe

from splitkit import _torch
from splitkit.testing import Specimen, zoo


@cache
def specimens() -> dict[str, Specimen]:
    """Name -> specimen, for tests that leave its graph as it is."""
    return {specimen.name: specimen for specimen in every_specimen()}


def every_specimen() -> Iterator[Specimen]:
    """Yield the specimens of the zoo and of this file, newly made, with weights and inputs from a fixed seed."""
    yield from zoo()
    for name, make, inputs in (
        ("autocast and no_grad", _scoped, {"requires_grad": True}),
        ("hooks and settings", _settings, {"requires_grad": True}),
        ("inference mode", _inference, {}),
    ):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            tolerance = 1e-2 if make is _scoped else 1e-4
            yield Specimen(name, make(), (torch.randn(6, 6, **inputs),), tolerance=tolerance)


def _scoped() -> fx.GraphModule:
    """Return a graph with autocast and a no_grad region that overlaps its end, as a Dynamo backend sees them."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    y = graph.call_function(torch.mm, (x, w))
    outer = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, True, None))
    y = graph.call_function(torch.mm, (y, w))
    z = graph.call_function(torch.relu, (y,))
    graph.call_function(_torch.SET_GRAD, (False,))
    frozen = graph.call_function(torch.mm, (z, w))
    inner = graph.call_function(_torch.ENTER_AUTOCAST, ("cpu", torch.bfloat16, False, None))
    frozen = graph.call_function(torch.mul, (frozen, 2.0))
    graph.call_function(_torch.SET_GRAD, (True,))
    exact = graph.call_function(torch.mm, (graph.call_function(torch.Tensor.float, (z,)), w))
    graph.call_function(_torch.EXIT_AUTOCAST, (inner,))
    z = graph.call_function(torch.mm, (z, w))
    z = graph.call_function(torch.add, (z, frozen))
    graph.call_function(_torch.SET_GRAD, (False,))
    graph.call_function(_torch.EXIT_AUTOCAST, (outer,))
    late = graph.call_function(torch.mm, (exact, w))
    graph.call_function(_torch.SET_GRAD, (True,))
    z = graph.call_function(torch.mm, (graph.call_function(torch.Tensor.float, (z,)), w))
    graph.output((graph.call_function(torch.add, (z, late)), graph.call_function(torch.sin, (exact,))))
    root = nn.Module()
    root.w = nn.Parameter(torch.randn(6, 6))
    return fx.GraphModule(root, graph)


def _inference() -> fx.GraphModule:
    """Return a graph with an inference-mode region inside a record_function region."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    outer = graph.call_function(_torch.ENTER_RECORD, ("block", None))
    y = graph.call_function(torch.mm, (x, w))
    inner = graph.call_function(_torch.ENTER_INFERENCE, (True,))
    a = graph.call_function(torch.sin, (x,))
    b = graph.call_function(torch.cos, (a,))
    graph.call_function(_torch.EXIT_INFERENCE, (inner,))
    c = graph.call_function(torch.clone, (b,))
    graph.call_function(_torch.EXIT_RECORD, (outer,))
    graph.output((graph.call_function(torch.add, (y, c)), a))
    root = nn.Module()
    root.w = nn.Parameter(torch.randn(6, 6))
    return fx.GraphModule(root, graph)


def _settings() -> fx.GraphModule:
    """Return a graph with saved-tensor hooks, forbidden hooks, forward gradients off, and a registered region."""
    graph = fx.Graph()
    x, w, same = graph.placeholder("x"), graph.get_attr("w"), graph.get_attr("same")
    level = graph.call_function(enter_level, (2,))
    y = graph.call_function(observe, (graph.call_function(torch.mm, (x, w)),))
    graph.call_function(_torch.PUSH_HOOKS, (graph.get_attr("halved"), same))
    y = graph.call_function(torch.sin, (y,))
    graph.call_function(_torch.PUSH_HOOKS, (graph.get_attr("thirds"), same))
    y = graph.call_function(torch.sin, (graph.call_function(torch.mm, (y, w)),))
    graph.call_function(_torch.POP_HOOKS)
    y = graph.call_function(torch.cos, (y,))
    graph.call_function(_torch.POP_HOOKS)
    before = graph.call_function(_torch.HOOKS_MESSAGE)
    graph.call_function(_torch.FORBID_HOOKS, ("none in here",))
    graph.call_function(_torch.SET_FWD_GRAD, (False,))
    y = graph.call_function(observe, (graph.call_function(torch.mm, (y, w)),))
    graph.call_function(exit_level, (level,))
    graph.call_function(_torch.SET_DETERMINISTIC, (True,), {"warn_only": True})
    z = graph.call_function(observe, (y,))
    graph.call_function(_torch.set_hooks_message, (before,))
    graph.call_function(_torch.SET_FWD_GRAD, (True,))
    graph.call_function(_torch.SET_DETERMINISTIC, (False,))
    graph.output((graph.call_function(observe, (y,)), graph.call_function(torch.mul, (z, y))))
    root = nn.Module()
    root.w = nn.Parameter(torch.randn(6, 6))
    root.halved, root.thirds, root.same = Divided(2), Divided(3), nn.Identity()
    return fx.GraphModule(root, graph)
