"""What changes the state in which later nodes run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opnodes import ROOT, X, Y, call, method, module
from torch import fx, nn
from torch.autograd import forward_ad

from splitkit.graph.ops import effects_of, op_tables
from splitkit.graph.ops.functions import is_ambient, may_change_modes

SETTERS = [
    torch.set_grad_enabled,
    torch.set_default_dtype,
    torch.set_default_device,
    torch.set_num_threads,
    torch.use_deterministic_algorithms,
    torch.set_float32_matmul_precision,
    torch.set_autocast_enabled,
    torch.clear_autocast_cache,
    torch.autocast_increment_nesting,
    torch.nn.attention._sdpa_kernel,
    torch.nn.attention._sdpa_kernel_variadic,
    torch._C._set_grad_enabled,
    torch._C._set_sdp_use_flash,
    torch._C._functorch._vmap_increment_nesting,
    torch._C._functorch._vmap_decrement_nesting,
    torch._C._functorch._grad_increment_nesting,
    torch._C._autograd._push_saved_tensors_default_hooks,
    torch._C._autograd._pop_saved_tensors_default_hooks,
    torch._C.DisableTorchFunctionSubclass,
    torch.backends.cuda.enable_flash_sdp,
    torch.backends.cudnn.set_flags,
    forward_ad.enter_dual_level,
    forward_ad.exit_dual_level,
    torch.cuda.set_device,
    torch.cuda.set_stream,
    torch.cuda.synchronize,
    torch.cuda.stream,
    torch.autograd.backward,
    torch.ops.aten._backward.default,
]


@pytest.mark.parametrize("target", SETTERS)
def test_setters_of_ambient_state(target: Any) -> None:
    e = effects_of(call(target, X), ROOT)
    assert e.ambient and e.impure


def test_a_vmap_opens_a_level_and_takes_views() -> None:
    class Mapped(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.vmap(torch.sin)(x)

    graph = torch.export.export(Mapped(), (torch.ones(2, 3),)).graph
    found = {node.target.__name__: effects_of(node, ROOT) for node in graph.nodes if node.op == "call_function"}
    levels = [name for name, effects in found.items() if effects.ambient]
    assert levels == ["lazy_load_decompositions", "_vmap_increment_nesting", "_vmap_decrement_nesting"]
    for node in graph.nodes:
        if node.op == "call_function":
            assert not may_change_modes(node, effects_of(node, ROOT))
    views = [effects for name, effects in found.items() if "batch_dim" in name]
    assert len(views) == 2 and all(e.aliases and e.known and not e.writes and not e.random for e in views)
    changed = call(torch.set_grad_enabled, False)
    assert may_change_modes(changed, effects_of(changed, ROOT))


@pytest.mark.parametrize("name", ["__enter__", "__exit__", "wait_stream", "backward"])
def test_methods_that_set_ambient_state(name: str) -> None:
    assert effects_of(method(name, X), ROOT).ambient


def test_no_other_function_is_taken_for_a_setter() -> None:
    def enter_my_set(x: Any) -> Any:
        return x

    others = [
        F.relu,
        torch.add,
        torch.is_grad_enabled,
        torch.is_autocast_enabled,
        torch.Tensor.set_,
        enter_my_set,
        "set_",
    ]
    assert not any(map(is_ambient, others))
    functions = [getattr(F, k, None) for k in op_tables.FUNCTIONS] + [
        getattr(torch, k, None) for k in op_tables.FUNCTIONS
    ]
    assert not [f for f in functions if f is not None and is_ambient(f)]


def body(record: Callable[[fx.Graph, fx.Node], Any]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    record(graph, x)
    graph.output(graph.call_function(torch.sin, (x,)))
    return fx.GraphModule(nn.Module(), graph)


def _set(graph: fx.Graph, value: Any) -> None:
    graph.call_function(torch._C._set_grad_enabled, (value,))


def restored(graph: fx.Graph, x: fx.Node) -> None:
    before = graph.call_function(torch.is_grad_enabled)
    _set(graph, False)
    _set(graph, before)


CHANGES = [
    (lambda graph, x: None, False),
    (restored, False),
    (lambda graph, x: _set(graph, False), True),
    (lambda graph, x: graph.call_function(torch.amp._enter_autocast, ("cpu", None, True, None)), True),
    (lambda graph, x: graph.call_function(torch.amp._exit_autocast, (x,)), True),
    (lambda graph, x: graph.call_function(torch.set_default_dtype, (torch.float64,)), True),
]


@pytest.mark.parametrize(("record", "changes"), CHANGES)
def test_a_body_that_changes_the_state_and_does_not_restore_it(record: Any, changes: bool) -> None:
    inner = body(record)
    for m in (inner, nn.Sequential(inner)):
        node, root = module(m)
        e = effects_of(node, root)
        assert (e.ambient, e.impure) == (changes, changes)


@pytest.mark.parametrize("target", [setattr, delattr])
def test_an_attribute_that_is_set_joins_its_owner_and_its_value(target: Any) -> None:
    node = call(target, X, "data", Y)
    e = effects_of(node, ROOT)
    assert e.impure and set(e.writes) == set(e.aliases) == set(node.all_input_nodes)


def test_a_gradient_is_read_after_the_backward_that_makes_it() -> None:
    e = effects_of(call(getattr, X, "grad"), ROOT)
    assert e.impure and e.aliases and not e.writes
    assert not effects_of(call(getattr, X, "shape"), ROOT).impure
    assert effects_of(method("retain_grad", X), ROOT).writes
    assert effects_of(method("register_hook", X), ROOT).writes
