"""The functions around private names of torch, each against what torch's public functions say."""

from __future__ import annotations

import functools
import operator
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from splitkit import _torch

aten = torch.ops.aten


class Held(nn.Module):
    """A module with one entry of each kind, a buffer that is not saved, and members that hide each other."""

    shadow: object = "of the class"

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_parameter("bias", None)
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("lost", torch.zeros(1), persistent=False)
        self.child = nn.ReLU()
        self.absent = nn.ReLU()
        self.absent = None

    def forward(self, x):
        return self.child(x) * self.weight


def test_the_tables_of_a_module_are_those_that_it_has():
    held = Held()
    tables = _torch.attributes_of(held)
    assert (list(tables.parameters), list(tables.buffers), list(tables.modules), tables.unsaved) == (
        ["weight", "bias"], ["kept", "lost"], ["child", "absent"], {"lost"},
    )  # fmt: skip
    tables.modules["child"] = other = nn.Tanh()
    assert held.child is other
    script = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    tables = _torch.attributes_of(script[1])
    assert list(tables.parameters) == ["weight", "bias"] and list(_torch.attributes_of(script).modules) == ["0", "1"]
    assert list(tables.buffers) == ["running_mean", "running_var", "num_batches_tracked"]


def test_a_member_is_what_getattr_finds():
    held = Held()
    held._modules["shadow"] = nn.Tanh()  # hidden by the class
    held._modules["own"] = nn.Tanh()
    held.__dict__["own"] = "of the object"
    script = torch.jit.script(nn.Sequential(nn.ReLU()))
    for owner in (held, script, SimpleNamespace(child=3)):
        for name in ("child", "weight", "kept", "absent", "shadow", "own", "forward", "0", "none"):
            missing = object()
            found = getattr(owner, name, missing)
            if found is missing:
                with pytest.raises(AttributeError):
                    _torch.member_of(owner, name)
            elif isinstance(found, nn.Module | torch.Tensor | str | int | None):
                assert _torch.member_of(owner, name) is found


def test_what_an_op_writes_to():
    add, out = aten.add_.Tensor, aten.add.out
    assert [a.name for a in _torch.schema_of(add).arguments if _torch.is_written(a)] == ["self"]
    assert [a.name for a in _torch.schema_of(aten.view.default).arguments if _torch.is_written(a)] == []
    assert _torch.written_arguments(add, (1, 2), {}) == [1]
    assert _torch.written_arguments(out, (1, 2), {"out": 3}) == [3]
    assert _torch.written_arguments(out, (1, 2), {}) == [None]
    assert _torch.written_arguments(aten.view.default, (1, [2]), {}) == []


def test_views_versions_and_storages():
    base = torch.zeros(4)
    view = base[1:]
    assert (_torch.is_view(base), _torch.is_view(view)) == (False, True)
    view.add_(1)
    base.mul_(2)
    with torch.inference_mode():
        uncounted = torch.zeros(2).add_(1)
    assert [_torch.version_of(t) for t in (base, view, torch.ones(1), uncounted)] == [2, 2, 0, 0]
    same, other = (t.untyped_storage() for t in (view, base.clone()))
    assert _torch.storage_id(base.untyped_storage()) == _torch.storage_id(same) != _torch.storage_id(other)


def test_a_dispatch_mode_is_seen_while_it_lasts():
    assert not _torch.is_dispatched()
    with _torch.TorchDispatchMode():
        assert _torch.is_dispatched()
    assert not _torch.is_dispatched()


@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc]
)
def test_a_sparse_tensor_has_the_memory_of_its_indices_and_values(layout):
    dense = torch.tensor([[0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 3.0]])
    blocks = {"blocksize": (1, 2)} if layout in (torch.sparse_bsr, torch.sparse_bsc) else {}
    sparse = dense.to_sparse(layout=layout, **blocks)
    found = [*_torch.plain_tensors(sparse)]
    if layout is torch.sparse_coo:
        assert [t.tolist() for t in found] == [[[0, 1], [1, 3]], [2.0, 3.0]]
        return
    made = getattr(torch, f"{str(layout).removeprefix('torch.')}_tensor")(*found, size=(2, 4))
    assert len(found) == 3 and torch.equal(made.to_dense(), dense)
    assert next(_torch.plain_tensors(dense)) is dense


def test_a_batched_tensor_has_the_memory_of_the_whole_batch():
    batch, seen = torch.arange(6.0).reshape(3, 2), []

    def watch(row):
        assert _torch.functorch_depth() == 1
        seen.append((*_torch.plain_tensors(row), _torch.unwrapped(row)))
        return row * 2

    torch.vmap(watch)(batch)
    assert [t.data_ptr() for t in seen[0]] == [batch.data_ptr()] * 2 and _torch.functorch_depth() == 0
    assert _torch.unwrapped(batch) is batch


def test_levels_that_a_failure_leaves_open_are_closed():
    with pytest.raises(RuntimeError, match="half way"), _torch.levels_closed():
        _torch.OPEN_VMAP[0](3, "error")
        _torch.OPEN_VMAP[0](3, "error")
        assert _torch.functorch_depth() == 2
        raise RuntimeError("half way")
    assert _torch.functorch_depth() == 0
    _torch.OPEN_VMAP[0](3, "error")
    with _torch.levels_closed():
        pass
    assert _torch.functorch_depth() == 1
    _torch.CLOSE_VMAP[0]()


def test_the_message_that_forbids_hooks_comes_back():
    for message in ("not here", None):
        before = _torch.HOOKS_MESSAGE()
        _torch.set_hooks_message(message)
        try:
            assert _torch.HOOKS_MESSAGE() == message
        finally:
            _torch.set_hooks_message(before)


def test_deterministic_algorithms_are_set_back():
    before = _torch.deterministic()
    try:
        for value in ((True, True), (True, False), (False, False)):
            _torch.set_deterministic(value)
            assert _torch.deterministic() == value
    finally:
        _torch.set_deterministic(before)


def test_every_spelling_of_an_operator():
    packet = aten.add
    overloads = [getattr(packet, name) for name in packet.overloads()]
    for spelled in (packet, packet.Tensor):
        assert _torch.spellings(spelled) == (spelled, packet, *overloads)
    assert _torch.spellings(operator.add) == (operator.add,)
    own = SimpleNamespace(_opoverload=packet.Tensor)  # as torch.library.custom_op makes it
    assert _torch.spellings(own) == (own, packet, *overloads)


def test_lazy_code_is_wanted_while_torch_says_so():
    assert not _torch.wants_lazy_code()
    with fx._lazy_graph_module._use_lazy_graph_module(True):
        assert _torch.wants_lazy_code()
    assert not _torch.wants_lazy_code()


def test_the_code_generator_is_a_copy():
    graph = fx.symbolic_trace(nn.ReLU()).graph
    found = _torch.codegen_of(graph)
    assert type(found) is type(graph._codegen) and found is not graph._codegen


class Symbol:
    """As torch's ``SymInt``: its node has the value that was seen at capture."""

    def __init__(self, hint):
        self.node = SimpleNamespace(hint=hint)

    def __str__(self):
        return "u0"


def test_a_size_is_the_one_of_capture():
    assert [_torch.size_hint(size) for size in (7, Symbol(0), Symbol(5))] == [7, 0, 5]
    with pytest.raises(TypeError, match=r"^u0 depends on data: it has no size before the model runs$"):
        _torch.size_hint(Symbol(None))


def test_what_the_dispatcher_knows_of_an_op():
    composite = {aten.linear.default: True, aten.dropout.default: True, aten.addmm.default: False}
    assert {op: _torch.is_composite(op) for op in composite} == composite
    assert _torch.has_kernel(aten.addmm.default, "cpu") and _torch.has_kernel(operator.add, "cpu")
    assert not _torch.has_kernel(aten._cudnn_rnn.default, "cpu")


def test_names_of_functions_and_targets():
    assert _torch.qualified_name(torch.relu) == "torch.relu"
    assert _torch.qualified_name(operator.getitem) == "_operator.getitem"
    unnamed = functools.partial(int)
    assert _torch.qualified_name(unnamed) == str(unnamed)
    assert _torch.qualified_name(SimpleNamespace(__name__="mine")) == "mine"
    graph = fx.Graph()
    for target, name in (
        (aten.linear.default, "aten.linear.default"),
        (aten.linear, "aten.linear"),
        (operator.getitem, "_operator.getitem"),
        (nn.functional.relu, "torch.nn.functional.relu"),
        (Held.forward, f"{__name__}.Held.forward"),
    ):
        assert _torch.target_name(graph.call_function(target)) == name
    placeless = SimpleNamespace(target=SimpleNamespace(__name__="mine", __module__=None))
    assert _torch.target_name(placeless) == "mine"
    assert _torch.target_name(SimpleNamespace(target=unnamed)) == "functools.partial"
    assert _torch.target_name(graph.get_attr("h.0.weight")) == "h.0.weight"


class EdgeOpOverload:
    """As ExecuTorch's class of this name, which holds the operator."""

    def __init__(self, op):
        self._op = op


def test_the_operator_that_executorch_wraps():
    assert _torch.operator_in(EdgeOpOverload(aten.relu.default)) is aten.relu.default
    wrong = EdgeOpOverload("relu")
    for target in (aten.relu.default, operator.add, wrong, SimpleNamespace(_op=aten.relu.default)):
        assert _torch.operator_in(target) is target


def test_meta_of_modules_with_and_without():
    gm = fx.symbolic_trace(nn.ReLU())
    gm.meta["here"] = 1
    assert _torch.meta_of(gm) is gm.meta and _torch.meta_of(nn.ReLU()) == {}


def test_calls_of_an_impure_module_stay():
    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.log, self.idle = nn.ReLU(), nn.ReLU()

        def forward(self, x):
            self.log(x)
            self.idle(x)
            return x + 1

    gm = fx.symbolic_trace(Calls())
    _torch.mark_impure(gm.log)
    gm.graph.eliminate_dead_code()
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["log"]


def test_nodes_take_the_old_names_of_each_other():
    gm = fx.symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
    _, relu, tanh, _ = gm.graph.nodes
    old = (relu.name, tanh.name)
    _torch.rename({relu: tanh.name, tanh: relu.name})
    assert (tanh.name, relu.name) == old
    with gm.graph.inserting_before(tanh):
        added = gm.graph.call_function(torch.sin, (relu,), name=old[0])
    assert added.name == f"{old[0]}_1"  # the graph knows that the name is taken


def test_bytes_that_the_allocator_gives_and_takes():
    def run():
        with torch.autograd.profiler.record_function("part 0"):
            first = torch.empty(1024)
        with torch.autograd.profiler.record_function("other"):
            second = torch.empty(256)
        with torch.autograd.profiler.record_function("part 1"):
            with torch.autograd.profiler.record_function("part inside"):
                third = torch.empty(2048)
            del second
        del first
        return third

    assert _torch.allocations_between(run, "")[0] == [4096, 1024, 8192, -1024, -4096]
    assert _torch.allocations_between(run, "part") == [[], [4096], [1024], [8192, -1024], [-4096]]
    assert _torch.allocations_between(run, "none") == [[4096, 1024, 8192, -1024, -4096]]


def test_a_module_that_is_compiled():
    plain, called, wrapping = nn.ReLU(), nn.ReLU(), nn.Module()
    called._compiled_call_impl = called.forward  # as nn.Module.compile does it
    wrapping._orig_mod = plain  # as torch.compile does it, which takes two seconds to import
    assert [_torch.is_compiled(module) for module in (plain, called, wrapping)] == [False, True, True]


def test_onednn_is_as_before_after_a_block_even_one_that_fails():
    before = torch._C._get_mkldnn_enabled()
    with pytest.raises(KeyError), _torch.without_onednn():
        assert not torch._C._get_mkldnn_enabled()
        raise KeyError
    assert torch._C._get_mkldnn_enabled() is before


def test_a_fake_mode_that_remembers_nothing():
    mode = _torch.fake_mode()
    with mode:
        assert (mode.from_tensor(torch.ones(2)) + nn.Parameter(torch.ones(2))).shape == (2,)
    assert not mode.cache_enabled


def test_inputs_of_a_node_are_each_named_once():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    both = graph.call_function(torch.add, (b, a), {"out": b})
    assert [*_torch.inputs_of(both)] == both.all_input_nodes == [b, a]


def test_a_wait_comes_before_the_backward_that_answers_or_at_the_end():
    row = ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0SEND_B0"]
    assert _torch._with_waits(row) == [
        "0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0WAIT_SEND_F0", "0B0", "0SEND_B0",
        "0WAIT_SEND_F1", "0WAIT_SEND_B0",
    ]  # fmt: skip
    assert _torch._with_waits([*row, "0WAIT_SEND_F0"]) == [*row, "0WAIT_SEND_F0"]
