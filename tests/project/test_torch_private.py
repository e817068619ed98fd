"""Fails when a private torch name that splitkit stands on goes away or changes its meaning."""

from __future__ import annotations

import gc
import inspect

import pytest
import torch
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import record_function

from splitkit import _torch
from splitkit.frontends import trace_settings


def test_autocast_regions():
    handle = _torch.ENTER_AUTOCAST("cpu", torch.bfloat16, True, None)
    assert torch.is_autocast_enabled("cpu")
    _torch.EXIT_AUTOCAST(handle)
    assert not torch.is_autocast_enabled("cpu")


def test_a_code_generator_has_names_and_forms():
    _, ins = _torch.pytree.tree_flatten(((), {"x": 0}))
    graph = fx.Graph()
    graph.set_codegen(_torch.pytree_codegen(["x"], ins, None))
    graph.output((graph.placeholder("x"),))
    assert fx.GraphModule({}, graph)(x=3) == (3,)


def test_grad_mode():
    _torch.SET_GRAD(False)
    assert not torch.is_grad_enabled()
    _torch.SET_GRAD(True)
    assert torch.is_grad_enabled()


def test_inference_mode_restores_grad_mode():
    torch.set_grad_enabled(True)
    handle = _torch.ENTER_INFERENCE(True)
    assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    _torch.EXIT_INFERENCE(handle)
    assert not torch.is_inference_mode_enabled() and torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    _torch.EXIT_INFERENCE(_torch.ENTER_INFERENCE(True))
    assert not torch.is_grad_enabled()
    torch.set_grad_enabled(True)


def test_record_function():
    _torch.EXIT_RECORD(_torch.ENTER_RECORD("name", None))
    _torch.EXIT_RECORD(_torch.ENTER_OLD_RECORD("name", None))


def test_inference_mode_restores_forward_gradients():
    handle = _torch.ENTER_INFERENCE(True)
    assert not _torch.IS_FWD_GRAD()
    _torch.SET_FWD_GRAD(True)
    assert _torch.IS_FWD_GRAD()
    _torch.SET_FWD_GRAD(False)
    _torch.EXIT_INFERENCE(handle)
    assert _torch.IS_FWD_GRAD()


def test_saved_tensors_hooks_are_a_stack():
    seen = []

    def pack(x):
        seen.append(x)
        return x

    _torch.PUSH_HOOKS(pack, lambda x: x)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is pack
    torch.sin(torch.ones(1, requires_grad=True))
    _torch.POP_HOOKS()
    torch.sin(torch.ones(1, requires_grad=True))
    assert len(seen) == 1 and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_saved_tensors_hooks_can_be_forbidden():
    assert _torch.HOOKS_MESSAGE() is None
    _torch.FORBID_HOOKS("not now")
    assert _torch.HOOKS_MESSAGE() == "not now"
    with pytest.raises(RuntimeError, match="not now"):
        _torch.PUSH_HOOKS(id, id)
    _torch.ALLOW_HOOKS()
    for message in ("again", None):
        _torch.set_hooks_message(message)
        assert _torch.HOOKS_MESSAGE() == message


def test_deterministic_algorithms():
    for value in ((True, True), (True, False), (False, False)):
        _torch.set_deterministic(value)
        assert _torch.deterministic() == value


def test_spellings_of_an_operator():
    packet = torch.ops.aten.sin
    expected = {packet, packet.default, packet.out, packet.int}
    assert expected <= set(_torch.spellings(packet)) and expected <= set(_torch.spellings(packet.out))
    assert _torch.spellings(print) == (print,)


def test_codegen_carries_the_signature():
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),))
    codegen = _torch.codegen_of(program.module().graph)
    graph = fx.Graph()
    graph.set_codegen(codegen)
    again = _torch.codegen_of(graph)
    assert again is not codegen and again.pytree_info == codegen.pytree_info


def test_nodes_swap_their_names():
    graph = fx.Graph()
    x = graph.placeholder("x")
    sin, cos = graph.call_function(torch.sin, (x,)), graph.call_function(torch.cos, (x,))
    graph.output((sin, cos))
    _torch.rename({sin: "cos", cos: "sin"})
    assert (sin.name, cos.name) == ("cos", "sin")
    assert graph.find_nodes(op="call_function", target=torch.sin) == [sin]
    assert graph.call_function(torch.sin, (x,)).name == "sin_1"  # both are taken
    code = fx.GraphModule({}, graph).code
    assert "cos = torch.sin(x)" in code and "sin = torch.cos(x)" in code


def test_size_hints():
    program = torch.export.export(
        nn.Linear(2, 2), (torch.ones(3, 2),), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=9)},)
    )
    size = next(n for n in program.graph.nodes if n.name == "input").meta["val"].shape[0]
    assert not isinstance(size, int)
    assert _torch.size_hint(size) == 3
    assert _torch.size_hint(7) == 7


def test_meta_of_a_module_without_any():
    assert _torch.meta_of(nn.Linear(1, 1)) == {}


def test_storages_are_known_by_weak_reference():
    a = torch.ones(4)
    assert StorageWeakRef(a.untyped_storage()) == StorageWeakRef(a[1:].untyped_storage())
    assert hash(StorageWeakRef(a.untyped_storage())) == hash(StorageWeakRef(a.t().untyped_storage()))
    assert StorageWeakRef(a.untyped_storage()) != StorageWeakRef(a.clone().untyped_storage())


def test_modules_tell_persistent_buffers_apart():
    module = nn.Module()
    module.register_buffer("a", torch.ones(1), persistent=False)
    assert module._non_persistent_buffers_set == {"a"}


def test_hooks_are_kept_where_assemble_reads_them():
    module = nn.Module()
    before = module.register_forward_pre_hook(print, with_kwargs=True)
    after = module.register_forward_hook(print, with_kwargs=True)
    assert list(module._forward_pre_hooks) == list(module._forward_pre_hooks_with_kwargs) == [before.id]
    assert list(module._forward_hooks) == list(module._forward_hooks_with_kwargs) == [after.id]


def test_allocations_of_a_call_in_order():
    x = torch.ones(1000, 1000)

    def run():
        x.clone()
        return x.relu()

    size = x.nbytes
    assert _torch.allocations_between(run, "")[0] == [size, -size, size]
    assert _torch.allocations_between(lambda: x.t(), "")[0] == []


def test_allocations_between_the_ends_of_named_ranges():
    x = torch.ones(1000)

    def run():
        with record_function("mine 1"):
            x.clone()
            with record_function("mine inside"):
                x.relu()
        kept = x.exp()
        with record_function("other"):
            x.clone()
        with record_function("mine 2"):
            return kept

    size = x.nbytes
    assert _torch.allocations_between(run, "mine") == [[], [size, -size] * 2, [size, size, -size], [], []]


def test_garbage_at_the_end_of_a_call_is_not_taken_back():
    """The collector is on again only when the profiler is off; else it would free what others left."""
    threshold = gc.get_threshold()

    def run():
        cycle = [torch.empty(64)]
        cycle.append(cycle)
        gc.set_threshold(1)

    try:
        assert _torch.allocations_between(run, "")[0] == [256]
    finally:
        gc.set_threshold(*threshold)


def test_descriptors_say_what_inputs_and_outputs_of_a_joint_graph_are():
    from splitkit.frontends import aot

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            self.count.add_(x.detach())
            return (x * self.weight * self.count).sum()

    graph = aot.trace_joint(Step(), (torch.ones(3),), {}).graph
    weight, count, x, tangent = graph.find_nodes(op="placeholder")
    assert [aot.parameter_name(n) for n in (weight, count, x)] == ["weight", None, None]
    assert [aot.buffer_name(n) for n in (weight, count, x)] == [None, "count", None]
    assert [aot.input_position(n) for n in (weight, count, x)] == [None, None, 0]
    assert [aot.is_tangent(n) for n in (weight, count, x, tangent)] == [False, False, False, True]
    assert list(aot.inputs_of_updates(graph)) == [(0, count)] and aot.updated_inputs(graph) == [count]
    assert aot.position_of_output(graph, 0) == 1 and list(aot.outputs_of_tangents(graph)) == [(tangent, 1)]
    assert aot.count_forward_outputs(graph) == 2 and (2, weight) in list(aot.inputs_of_gradients(graph))
    assert {n.meta["partitioner_tag"] for n in graph.nodes if n.op == "call_function"} == {"is_forward", "is_backward"}


def test_dynamo_says_at_which_line_it_gave_up():
    from splitkit.frontends import aot

    class Step(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x  # this line

    with pytest.raises(Exception) as caught:  # its class varies
        aot.trace_joint(Step(), (torch.ones(3, requires_grad=True),), {})
    assert "# this line" in aot.line_of_model(caught.value)


def test_inductor_takes_a_partitioner():
    from torch._inductor import config

    from splitkit.frontends.compile.inductor import Partitioner

    partitioner = Partitioner(lambda *args, **kwargs: None)
    with config.patch({"custom_partitioner_fn": partitioner}):
        assert config.custom_partitioner_fn is partitioner
    assert partitioner.uuid() != Partitioner(partitioner.partition).uuid()


def test_inductors_code_is_loaded_and_allocates_through_these_names():
    from torch._inductor import async_compile
    from torch._inductor.codecache import PyCodeCache

    assert isinstance(PyCodeCache.modules, list) and callable(async_compile.AsyncCompile)
    assert list(inspect.signature(PyCodeCache.load_by_key_path).parameters)[:4] == ["key", "path", "linemap", "attrs"]
    buffer = torch._C._dynamo.guards._empty_strided_cpu((2, 3), (3, 1), torch.float64)
    assert buffer.shape == (2, 3) and buffer.dtype is torch.float64


def test_dynamo_notes_the_numbers_to_fix_by_name():
    """Without this class, torch has lost its bug, or `scalar_writes_kept` does nothing: see test_lost_writes.py."""
    from torch._dynamo.symbolic_convert import TensorifyState

    names, before = TensorifyState.force_specializations, set(TensorifyState.force_specializations)
    TensorifyState.specialize("zf_of_this_test")
    assert isinstance(names, set) and names == {*before, "zf_of_this_test"}
    names.discard("zf_of_this_test")
    assert not TensorifyState.should_specialize("zf_of_this_test")


def test_modules_are_compiled_through_one_attribute():
    module = nn.Linear(2, 2)
    assert module._compiled_call_impl is None
    module._compiled_call_impl = lambda x: "compiled"
    assert module(None) == "compiled" and "_compiled_call_impl" not in module.__getstate__()


def test_what_the_dispatcher_says_of_an_op():
    ops = torch.ops.aten
    assert _torch.is_composite(ops.linear.default) and _torch.is_composite(ops.dropout.default)
    assert not _torch.is_composite(ops.addmm.default) and not _torch.is_composite(ops.relu.default)


def test_in_place_ops_say_so_in_their_schema():
    returned = torch.ops.aten.add_.Tensor._schema.returns
    assert returned[0].alias_info is not None and returned[0].alias_info.is_write
    assert torch.ops.aten.add.Tensor._schema.returns[0].alias_info is None


def test_symbols_of_a_size():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    size = env.create_unbacked_symint()
    symbol = size.node.expr
    assert symbol.is_Symbol and str(symbol).startswith("u") and size.node.shape_env is env
    assert symbol not in env.backed_var_to_val and size.node.hint is None
    assert env.var_to_range[symbol].upper > 2**48
    torch._check(size <= 128)
    assert int(env.var_to_range[symbol].upper) == 128


def test_dynamo_says_which_code_it_compiles_and_guards_sizes_that_a_backend_looks_at():
    from torch._guards import CompileContext

    seen = []

    def backend(gm, inputs):
        found = CompileContext.current_compile_id()
        size = next((x for x in inputs if isinstance(x, torch.SymInt)), None)
        assert size is None or bool(size <= 8) is (size.node.hint <= 8)
        seen.append((found.frame_id, found.frame_compile_id))
        return gm

    torch._dynamo.reset()
    run = torch.compile(nn.ReLU(), backend=backend)
    for length in (3, 4, 7, 9, 12):
        run(torch.ones(length))
    first, second, third = seen  # of one size, of sizes up to 8, of sizes above
    assert first[0] == second[0] == third[0] and [number for _, number in seen] == [0, 1, 2]
    assert torch._dynamo.config.recompile_limit >= 3


def test_no_guard_is_kept_of_a_size_that_is_asked_for_in_silence():
    from splitkit._torch import without_modes

    made = []

    def backend(gm, inputs):
        size = next(x for x in inputs if isinstance(x, torch.SymInt))
        assert size.node.shape_env.var_to_range[size.node.expr].lower <= 2
        with without_modes(), size.node.shape_env.suppress_guards():
            made.append(torch.ones(int(size)))
        return gm

    torch._dynamo.reset()
    run = torch.compile(nn.ReLU(), backend=backend, dynamic=True)
    for length in (5, 6, 7):
        run(torch.ones(length))
    assert [(type(one), one.numel()) for one in made] == [(torch.Tensor, 5)]


def test_the_layout_of_mkldnn():
    assert torch.ones(2, 2).to_mkldnn().layout is _torch.MKLDNN


def test_a_module_says_whether_it_is_compiled():
    plain, own, wrapped = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    own.compile(backend="eager")
    assert [_torch.is_compiled(m) for m in (plain, own, torch.compile(wrapped))] == [False, True, True]


OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


@pytest.mark.skipif(OLD, reason="2.11 has no neighbouring stages on one rank")
def test_an_order_of_ones_own_is_torchs_to_run(tmp_path):
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        _torch.default_store().set("key", "value")
        meta = torch.empty(2, 4, device="meta")
        stages = [
            PipelineStage(
                torch.nn.Linear(4, 4), i, 2, torch.device("cpu"),
                input_args=meta.clone().requires_grad_(i > 0), output_args=meta.clone().requires_grad_(),
            )
            for i in range(2)
        ]  # fmt: skip
        losses = []
        made = _torch.action_schedule(
            stages, 2, lambda y, t: y.sum(), [["0F0", "1F0", "1B0", "0F1", "1F1", "1B1", "0B0", "0B1"]]
        )
        made.step(torch.randn(4, 4), target=torch.zeros(4), losses=losses, return_outputs=False)
        assert len(losses) == 2 and all(stage.submod.weight.grad is not None for stage in stages)
    finally:
        dist.destroy_process_group()


def test_dispatch_modes_wrapped_tensors_and_storages_are_told_apart():
    from torch._subclasses import FakeTensorMode
    from torch.testing._internal.two_tensor import TwoTensor

    assert not _torch.is_dispatched()
    with FakeTensorMode():
        assert _torch.is_dispatched()
    one, other = torch.zeros(2), torch.zeros(2)
    inside = list(_torch.plain_tensors(TwoTensor(one, other)))
    assert [t.data_ptr() for t in inside] == [one.data_ptr(), other.data_ptr()]
    assert len(list(_torch.plain_tensors(one.to_sparse()))) == 2
    seen = []
    torch.vmap(lambda x: seen.extend(_torch.plain_tensors(x)) or x)(one)
    assert [t.data_ptr() for t in seen] == [one.data_ptr()]
    assert _torch.storage_id(one.untyped_storage()) == _torch.storage_id(one[1:].untyped_storage())
    assert _torch.storage_id(one.untyped_storage()) != _torch.storage_id(other.untyped_storage())


def test_members_are_found_as_python_finds_them() -> None:
    class Owner(nn.Module):
        hidden = None

        def __init__(self) -> None:
            super().__init__()
            self.child, self.plain, self.weight = nn.Linear(1, 1), [1], nn.Parameter(torch.ones(1))
            self._modules["hidden"] = self._modules["plain"] = nn.ReLU()

    owner = Owner()
    for name in ("child", "plain", "weight", "hidden", "training"):
        assert _torch.member_of(owner, name) is getattr(owner, name)
    assert _torch.member_of(owner.child, "in_features") == 1
    assert _torch.member_of([1], "append")(2) is None
    with pytest.raises(AttributeError):
        _torch.member_of(owner, "missing")


def test_levels_of_functorch_are_counted_closed_and_looked_through():
    whole = torch.zeros(3, 2)
    seen = []

    def look(x):
        seen.append((_torch.functorch_depth(), _torch.unwrapped(x), torch._C._are_functorch_transforms_active()))
        return torch.vmap(lambda y: seen.append((_torch.functorch_depth(), _torch.unwrapped(y), True)) or y)(x)

    torch.vmap(look)(whole)
    assert [depth for depth, _, _ in seen] == [1, 2] and all(active for _, _, active in seen)
    assert all(t.data_ptr() == whole.data_ptr() and t.shape == whole.shape for _, t, _ in seen)
    assert _torch.functorch_depth() == 0 and not torch._C._are_functorch_transforms_active()
    assert _torch.unwrapped(whole) is whole
    with _torch.levels_closed():
        torch._C._functorch._vmap_increment_nesting(3, "error")
        torch._C._functorch._grad_increment_nesting()
        assert _torch.functorch_depth() == 2
    assert _torch.functorch_depth() == 0


def test_a_captured_vmap_opens_and_closes_by_these_names():
    from splitkit.memory.kernels import vmap_batches

    program = torch.export.export(Mapped(), (torch.zeros(3, 2),))
    names = [getattr(node.target, "__name__", "") for node in program.graph.nodes]
    assert names.count(vmap_batches._OPENS) == names.count(vmap_batches._CLOSES) == 1


class Mapped(torch.nn.Module):
    def forward(self, x):
        return torch.vmap(torch.sin)(x)


def test_hooks_of_saved_tensors_are_forbidden_and_allowed_again():
    before = _torch.HOOKS_MESSAGE()
    try:
        _torch.set_hooks_message("not here")
        assert _torch.HOOKS_MESSAGE() == "not here"
        _torch.set_hooks_message(None)
        assert _torch.HOOKS_MESSAGE() is None
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            pass
    finally:
        _torch.set_hooks_message(before)


class Doubled(torch.nn.Module):
    def forward(self, x):
        return x * 2 if torch.compiler.is_exporting() else x


def test_a_model_runs_as_in_export_outside_of_it():
    with trace_settings.as_in_export():
        assert Doubled()(1) == 2
    assert Doubled()(1) == 1


def test_composite_ops_have_gradients_on_meta_while_it_is_asked_for():
    op, key = torch.ops.aten.nll_loss.default, torch._C.DispatchKey.AutogradMeta
    with trace_settings.with_gradients_on_meta():
        assert key in op.py_kernels
    assert key not in op.py_kernels and key not in op._dispatch_cache


def test_a_device_type_has_kernels_of_ops():
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert _torch.has_kernel(attention, "cpu") and not _torch.has_kernel(attention, "cuda")
    assert _torch.has_kernel(torch.ops.aten.mm.default, "cpu") and _torch.has_kernel(len, "cuda")


def test_dynamic_sizes_may_be_0_and_1():
    shapes, x = ({0: torch.export.Dim.AUTO},), torch.ones(3)
    with trace_settings.as_in_steps():
        program = torch.export.export(torch.nn.ReLU(), (x,), dynamic_shapes=shapes)
    assert [len(program.module()(torch.ones(n))) for n in (0, 1, 5)] == [0, 1, 5]


def test_impure_modules_survive_dead_code_elimination():
    root, graph = nn.Module(), fx.Graph()
    root.kept, root.dropped = nn.Identity(), nn.Identity()
    _torch.mark_impure(root.kept)
    x = graph.placeholder("x")
    graph.call_module("kept", (x,))
    graph.call_module("dropped", (x,))
    graph.output(x)
    gm = fx.GraphModule(root, graph)
    gm.graph.eliminate_dead_code()
    assert [n.target for n in gm.graph.nodes if n.op == "call_module"] == ["kept"]


def test_torchs_budget_and_checkpoints_have_the_names_that_entry_points_use():
    from torch._functorch.partitioners import estimate_runtime
    from torch._inductor.custom_graph_pass import CustomKnapsackSolver
    from torch.utils.checkpoint import SAC_IGNORED_OPS

    assert torch.ops.aten.detach.default in SAC_IGNORED_OPS and callable(estimate_runtime)
    assert {"__call__", "uuid"} == set(CustomKnapsackSolver.__abstractmethods__)
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.bernoulli_.float.tags


def test_a_process_group_is_found_by_another_name(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert _torch.ranks_of_group("tp=1") == ()
        _torch.name_group("tp=1", dist.group.WORLD)
        assert _torch.ranks_of_group("tp=1") == (0,)
        mesh = dist.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
        assert dist.get_process_group_ranks(_torch.group_of_dimensions(mesh, "a", "b")) == [0]
        made = torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "tp=1")
        assert torch.ops._c10d_functional.wait_tensor(made).tolist() == [1, 1]
    finally:
        dist.destroy_process_group()
    assert _torch.ranks_of_group("tp=1") == ()


def test_tracers_can_be_told_to_record_nothing():
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x):
        with _torch.without_tracing():
            torch.empty(2).sin()
        return x + 1

    assert [n.name for n in make_fx(function)(torch.ones(2)).graph.nodes if n.op == "call_function"] == ["add"]


def test_models_are_told_that_they_are_compiled():
    from torch.export import _trace

    with _trace._compiling_state_context():
        assert torch.compiler.is_compiling()
    assert not torch.compiler.is_compiling()


def test_nodes_get_the_current_path_of_a_module():
    from torch.fx import traceback
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x):
        traceback.current_meta["nn_module_stack"] = {"a": ("a", nn.Linear)}
        return x + 1

    try:
        with traceback.preserve_node_meta():
            graph = make_fx(function)(torch.ones(2)).graph
    finally:
        traceback.current_meta.pop("nn_module_stack", None)
    assert [n.meta.get("nn_module_stack") for n in graph.nodes if n.op == "call_function"] == [{"a": ("a", nn.Linear)}]
