"""Make small graphs that are hard to split, captured in every way that torch offers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitkit import _torch
from splitkit.testing.specimens import (
    Cache,
    Dropouts,
    Dynamic,
    ManyOutputs,
    Mutating,
    Regions,
    Skips,
    TiedLanguageModel,
)
from splitkit.testing.visible_state import Divided, enter_level, exit_level, observe


@dataclass(frozen=True)
class Specimen:
    """A graph with inputs to run it on.

    Attributes:
        name: what the graph tests and how it was captured.
        graph: the graph; every call of `zoo` makes a new one.
        inputs: positional inputs.
        other_inputs: inputs of another size, for graphs with symbolic sizes.
        tolerance: relative tolerance of gradients; parts that start inside an autocast region may round weights again.
    """

    name: str
    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    other_inputs: tuple[Any, ...] | None = None
    tolerance: float = 1e-4


def zoo() -> Iterator[Specimen]:
    """Yield every specimen, newly made, with weights and inputs from a fixed seed."""
    for make in _SPECIMENS:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            yield make()


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


def _exported(model: nn.Module, *inputs: Any, dynamic_shapes: Any = None) -> fx.GraphModule:
    """Return the plain export of a model: guards are off, and regions stay higher-order ops."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a harmless warning about the flat weights of LSTM
        program = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    return program.module(check_guards=False)


def _make_fx(model: nn.Module, *inputs: Any) -> fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda *xs: model(*xs), pre_dispatch=True)(*inputs)


def _dynamo(model: nn.Module, *inputs: Any) -> fx.GraphModule:
    """Return the graph that a Dynamo backend receives, in which parameters are placeholders."""
    caught: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, example: list[Any]) -> Callable[..., Any]:
        caught.append(gm)
        return gm.forward

    torch.compiler.reset()
    torch.compile(model, backend=backend)(*inputs)
    return caught[0]


def _dynamo_specimen() -> Specimen:
    model = Regions()
    gm = _dynamo(model, torch.randn(3, 8))
    values = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
    return Specimen("dynamo backend", gm, tuple(torch.randn(v.shape).requires_grad_() for v in values), tolerance=1e-2)


def _dynamic_specimen() -> Specimen:
    x, other = torch.randn(2, 3, 4), torch.randn(5, 3, 4)
    batch = torch.export.Dim("batch", min=2, max=64)
    return Specimen("dynamic batch", _exported(Dynamic(), x, dynamic_shapes=({0: batch},)), (x,), (other,))


def _ids() -> Tensor:
    return torch.randint(0, 16, (2, 5))


_SPECIMENS: tuple[Callable[[], Specimen], ...] = (
    lambda: Specimen("tied language model", fx.symbolic_trace(TiedLanguageModel()), (_ids(),)),
    lambda: Specimen("tied language model, exported", _exported(TiedLanguageModel(), _ids()), (_ids(),)),
    lambda: Specimen("mutation", fx.symbolic_trace(Mutating()), (torch.randn(8, 8),)),
    lambda: Specimen("mutation, exported", _exported(Mutating(), torch.randn(8, 8)), (torch.randn(8, 8),)),
    lambda: Specimen("skips", fx.symbolic_trace(Skips()), (torch.randn(4, 8, requires_grad=True),)),
    lambda: Specimen("many outputs", fx.symbolic_trace(ManyOutputs()), (torch.randn(2, 3, 6),)),
    lambda: Specimen("many outputs, exported", _exported(ManyOutputs(), torch.randn(2, 3, 6)), (torch.randn(2, 3, 6),)),
    lambda: Specimen("dropout", fx.symbolic_trace(Dropouts()), (torch.randn(4, 8),)),
    lambda: Specimen("dropout, exported", _exported(Dropouts(), torch.randn(4, 8)), (torch.randn(4, 8),)),
    lambda: Specimen("autocast and no_grad", _scoped(), (torch.randn(6, 6, requires_grad=True),), tolerance=1e-2),
    lambda: Specimen("hooks and settings", _settings(), (torch.randn(6, 6, requires_grad=True),)),
    lambda: Specimen("inference mode", _inference(), (torch.randn(6, 6),)),
    lambda: Specimen("higher-order regions", _exported(Regions(), torch.randn(3, 8)), (torch.randn(3, 8),), None, 1e-2),
    _dynamo_specimen,
    _dynamic_specimen,
    lambda: Specimen("make_fx", _make_fx(Mutating(), torch.randn(8, 8)), (torch.randn(8, 8),)),
    lambda: Specimen("key-value cache", fx.symbolic_trace(Cache()), (torch.randn(2, 4), torch.tensor([1, 4]))),
)
