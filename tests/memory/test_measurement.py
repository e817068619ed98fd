"""Live bytes of real runs, against numbers counted by hand. ``N`` is what 256 float32 take."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.functional import dropout, linear
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from splitkit import _torch, measure_memory
from splitkit.errors import GraphError
from splitkit.memory.storage_watch import StorageWatch
from splitkit.testing import models

N = 1024


@pytest.fixture
def x():
    return torch.rand(256)


def numbers(fn, *args):
    """Bytes before, after each op, and at the end."""
    memory = measure_memory(fn, *args)
    assert memory.peak == max(memory.baseline, *memory.timeline, 0)
    return memory.baseline, list(memory.timeline), memory.end


# --- what lives how long


def test_a_chain_frees_what_nobody_holds(x):
    memory = measure_memory(lambda x: x.relu().relu().relu(), x)
    assert (memory.baseline, memory.timeline, memory.end) == (N, (2 * N, 3 * N, 3 * N), 2 * N)
    assert memory.peak == 3 * N and memory.at == (1, "aten.relu.default")
    assert memory.live_at_peak == ((N, "input"), (N, "aten.relu.default"), (N, "aten.relu.default"))
    assert memory.by_device == {"cpu": 3 * N} and memory.allocator_peak is None


def test_nothing_runs(x):
    memory = measure_memory(lambda x: x, x)
    assert (memory.peak, memory.at, memory.baseline, memory.timeline, memory.end) == (N, None, N, (), N)
    assert measure_memory(lambda: None).peak == 0


def test_a_view_keeps_its_storage(x):
    def run(x):
        part = (x * 2).view(16, 16)[1:]
        return part + 1

    assert numbers(run, x) == (N, [2 * N, 2 * N, 2 * N, 2 * N + 960], N + 960)


def test_an_input_of_which_there_are_views_counts_once(x):
    assert numbers(lambda a, b: a + b, x[:128], x[128:]) == (N, [N + 512], N + 512)


def test_the_output_is_a_view_of_the_input(x):
    assert numbers(lambda x: x.view(2, 128), x) == (N, [N], N)


def test_in_place_takes_nothing(x):
    assert numbers(lambda x: (x + 1).mul_(2).relu_(), x) == (N, [2 * N] * 3, 2 * N)


def test_expand_takes_nothing_until_it_is_copied(x):
    assert numbers(lambda x: x.expand(10, 256).contiguous(), x) == (N, [N, 11 * N], 11 * N)


def test_detach_shares(x):
    assert numbers(lambda x: (x * 2).detach(), x) == (N, [2 * N] * 2, 2 * N)


def test_chunks_keep_the_whole(x):
    def run(x):
        second = (x * 2).chunk(4)[1]
        return second.relu()

    assert numbers(run, x) == (N, [2 * N, 2 * N, 2 * N + 256], N + 256)


def test_members_of_a_tuple_live_with_it(x):
    def held(x):
        pair = x.sort()
        return pair.values.relu()

    def claimed(x):
        values = x.sort().values
        return values.relu()

    assert numbers(held, x) == (N, [4 * N, 5 * N], 2 * N)  # indices are twice as large
    assert numbers(claimed, x) == (N, [4 * N, 3 * N], 2 * N)


def test_dropout_is_several_ops(x):
    steps = [2 * N, 2 * N, 2 * N, 3 * N]  # empty_like, bernoulli_, div_, mul
    assert numbers(lambda x: dropout(x, 0.5), x) == (N, steps, 2 * N)
    assert numbers(lambda x: dropout(x, 0.5), x.requires_grad_()) == (N, steps, 3 * N)  # the mask is saved


def test_what_autograd_saves_stays(x):
    def run(x):
        return x.sin().exp().sum()  # exp saves its result, sum nothing

    steps = [2 * N, 3 * N, 2 * N + 4]
    with torch.no_grad():
        assert numbers(run, x.requires_grad_()) == (N, steps, N + 4)
    memory = measure_memory(run, x)
    assert [b for b, op in zip(memory.timeline, memory.ops, strict=True) if "detach" not in op] == steps
    assert memory.end == 2 * N + 4


def test_a_custom_function_keeps_what_it_saves(x):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            kept = x * 3
            ctx.save_for_backward(kept)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            (kept,) = ctx.saved_tensors
            return grad * kept

    assert numbers(Twice.apply, x.requires_grad_()) == (N, [2 * N, 3 * N], 3 * N)

    def step(x):
        Twice.apply(x).sum().backward()

    memory = measure_memory(step, x)
    assert memory.end == 2 * N  # x and its gradient
    # x, kept, result; the sum's gradient is one number, expanded; then x, kept, two scalars and the gradient
    assert memory.peak == 3 * N + 8 and memory.at[1] == "aten.mul.Tensor"


def test_what_is_only_found_later_was_there_before(x):
    late = torch.ones(256)
    memory = measure_memory(lambda x: x.relu() + late, x)
    assert (memory.baseline, memory.timeline) == (2 * N, (3 * N, 4 * N))
    assert (N, "outside") in memory.live_at_peak


def test_what_the_run_gives_up_is_freed_before_the_end(x):
    box = [torch.ones(256)]

    def run(x):
        y = x + box[0]
        box.clear()
        return y + 1

    assert numbers(run, x) == (2 * N, [3 * N, 3 * N], 2 * N)


def test_tensors_of_constants_are_new(x):
    assert numbers(lambda x: torch.tensor([1.0] * 256) + x, x) == (N, [2 * N, 3 * N], 2 * N)


# --- models


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(256))
        self.two = self.one
        self.part = self.one.detach()[:128]
        self.unread = nn.Parameter(torch.ones(256))
        self.register_buffer("mean", torch.ones(128))

    def forward(self, x):
        return x * self.one + self.two + self.unread[0]

    def other(self, x):
        return self.part + x[:128]


def test_parameters_count_once_read_or_not(x):
    module = Tied().requires_grad_(False)
    before = 3 * N + 512
    assert numbers(module, x) == (before, [before + N, before + 2 * N, before + N, before + 2 * N], before + N)
    assert numbers(module.other, x) == (before, [before, before + 512], before + 512)
    assert numbers(partial(module.other, x)) == numbers(lambda model, x: model.other(x), module, x)
    memory = measure_memory(module, x)
    held = [made for _, made in memory.live_at_peak if made.startswith(("parameter", "buffer"))]
    assert held == ["parameter one", "parameter unread", "buffer mean"]


def test_gradients_that_are_there_count_read_or_not(x):
    module = nn.Linear(256, 1, bias=False)
    module.weight.grad = torch.ones(1, 256)
    memory = measure_memory(module, x)
    assert memory.baseline == 3 * N and (N, "gradient weight") in memory.live_at_peak


def test_the_module_of_an_object_is_counted(x):
    class Split:
        module = Tied().requires_grad_(False)

        def __call__(self, x):
            return self.module.other(x)

    assert measure_memory(Split(), x).baseline == 3 * N + 512


def test_a_training_step_by_hand():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    x = torch.rand(3, 4)

    def step(model, x):
        loss = model(x).sum()
        loss.backward()
        return loss

    memory = measure_memory(step, model, x)
    before, hidden, out, grad1, grad2 = 48 + 128 + 64, 96, 24, 128, 64
    expected = [
        ("mm", hidden),
        ("relu", hidden + hidden),
        ("mm", hidden + out),
        ("sum", hidden + out + 4),
        ("ones_like", hidden + 4 + 4),  # the gradient of the loss: `backward` holds it to the end
        ("mm", hidden + 4 + 4 + grad2),
        ("mm", hidden + 4 + 4 + grad2 + hidden),
        ("threshold_backward", hidden + 4 + 4 + grad2 + hidden + hidden),
        ("mm", 4 + 4 + grad2 + hidden + grad1),
    ]
    made = [op.split(".")[1] for op in memory.ops]
    found = [
        (op, b - before) for b, op in zip(memory.timeline, made, strict=True) if op not in ("t", "detach", "expand")
    ]
    assert found == expected
    assert (memory.baseline, memory.end) == (before, before + 4 + grad1 + grad2)
    again = measure_memory(step, model, x)
    assert again.baseline == before + grad1 + grad2  # the gradients are there by now
    assert again.end == memory.end


def test_state_of_an_optimizer_is_new_at_first():
    model = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    model.weight.grad = torch.ones(16, 16)
    first = measure_memory(optimizer.step)
    assert first.end == 4 * N + 4  # weight, gradient, two moments, a step count
    assert measure_memory(optimizer.step).baseline == 4 * N + 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_free_and_compute_again(x, reentrant):
    def body(x):
        return x.exp().exp().exp()

    def forward(x):
        return checkpoint(body, x, use_reentrant=reentrant)

    def step(run, x):
        run(x).sum().backward()

    x.requires_grad_()
    assert measure_memory(forward, x).end == 2 * N
    assert measure_memory(body, x).end == 4 * N
    plain = measure_memory(step, body, x)
    x.grad = None
    again = measure_memory(step, forward, x)
    assert (plain.baseline, plain.end, again.end) == (N, 2 * N, 2 * N)
    assert (plain.ops.count("aten.exp.default"), again.ops.count("aten.exp.default")) == (3, 6)


def test_inference_mode_shows_the_parts_of_composite_ops():
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    with torch.inference_mode():
        memory = measure_memory(linear, x, w)
    assert memory.ops == ("aten.t.default", "aten.mm.default") and memory.timeline == (72, 72 + 32)
    x = torch.rand(256)
    with torch.inference_mode():
        inferred = numbers(lambda x: dropout(x, 0.5), x)
    assert inferred == numbers(lambda x: dropout(x, 0.5), x)


def test_composite_ops_with_a_kernel_of_their_own_are_one(x):
    def step(x):
        torch.nn.functional.silu(x).sum().backward()

    memory = measure_memory(step, x.requires_grad_(), allocator=True)
    assert memory.ops.count("aten.silu_backward.default") == 1
    assert memory.peak == memory.allocator_peak == 2 * N + 8  # x, its gradient and two scalars


def test_function_transforms(x):
    assert numbers(torch.func.vmap(lambda row: row * 2), x.view(16, 16))[::2] == (N, 2 * N)
    memory = measure_memory(torch.func.grad(lambda x: x.sin().sum()), x)
    assert (memory.baseline, memory.end) == (N, 2 * N)


def test_higher_order_ops_count_as_one(x):
    memory = measure_memory(torch.cond, torch.tensor(True), torch.sin, torch.cos, (x,))
    assert memory.ops[-1] == "cond" and memory.end == 2 * N + 1


def test_sparse_gradients_count_their_components():
    table = nn.Embedding(256, 4, sparse=True)
    index = torch.tensor([1, 2, 3])

    def step(table, index):
        table(index).sum().backward()

    memory = measure_memory(step, table, index)
    before = 4 * N + 24
    assert memory.baseline == before
    assert memory.end in (before + 48, before + 48 + 24)  # values; the indices may be those that were given


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_training_step_of_a_real_model(name):
    example = models.build(name, layers=2, width=64, heads=2, vocab=100, seq=16)

    def step(model=example.model, args=example.args, kwargs=example.kwargs):
        model.zero_grad()
        torch.manual_seed(0)
        loss = model(*args, **kwargs).loss
        loss.backward()
        return loss

    def measured(allocator=False):
        example.model.zero_grad()
        return measure_memory(step, example.model, example.args, example.kwargs, allocator=allocator)

    memory = measured()
    assert memory == measured() == replace(measured(allocator=True), allocator_peaks={})
    parameters = sum(p.nbytes for p in example.model.parameters())
    given = sum(t.nbytes for t in (*example.args, *example.kwargs.values(), *example.model.buffers()))
    assert memory.baseline == parameters + given
    assert memory.end == 2 * parameters + given + 4
    example.model.zero_grad()
    unwatched = max(accumulate(_torch.allocations_between(step, "")[0], initial=0))
    assert measured(allocator=True).allocator_peak == memory.baseline + unwatched >= memory.peak


# --- storages


def test_memory_of_several_storages_counts_once(x):
    array = np.ones(256, dtype=np.float32)
    assert numbers(torch.add, torch.from_numpy(array), torch.from_numpy(array)) == (N, [2 * N], 2 * N)

    def run(x):
        return torch.from_numpy(array) + torch.from_numpy(array) + x

    assert numbers(run, x) == (N, [2 * N, 2 * N, 3 * N, 3 * N], 2 * N)


def test_tensors_that_grow():
    def run():
        y = torch.empty(0)
        y.resize_(256)
        return y.zero_()

    assert numbers(run) == (0, [0, N, N], N)


def test_ops_that_resize_what_they_do_not_return():
    @torch.library.custom_op("splitkit_tests::grow", mutates_args=["t"])
    def grow(t: torch.Tensor) -> None:
        t.resize_(256)

    assert numbers(grow, torch.empty(0)) == (0, [N], N)


def test_storages_that_are_emptied_and_filled_again(x):
    def run(x):
        shard = x * 2
        shard.untyped_storage().resize_(0)
        y = x + 1
        shard.untyped_storage().resize_(2 * N)
        return y, shard

    memory = measure_memory(run, x)
    assert memory.timeline == (2 * N, N, 2 * N, 4 * N) and memory.end == 4 * N
    assert memory.ops[1] == memory.ops[3] == "UntypedStorage.resize_"
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_storage_that_is_resized_before_any_op_reads_it(x):
    other = torch.ones(256)
    other.untyped_storage().resize_(0)

    def run(x):
        other.untyped_storage().resize_(N)
        return x + 1

    assert numbers(run, x) == (N, [2 * N, 3 * N], 3 * N)


def test_tensors_that_change_their_storage(x):
    def run(x):
        y = x * 2
        y.set_(torch.ones(128))
        return y + 1

    def data(x):
        y = x * 2
        y.data = torch.ones(128)
        return y + 1

    assert numbers(run, x) == (N, [2 * N, 2 * N + 512, N + 512, N + 1024], N + 512)
    assert numbers(data, x)[::2] == (N, N + 512) and measure_memory(data, x).peak == 2 * N + 512


class Pair(torch.Tensor):
    """Wraps two tensors."""

    @staticmethod
    def __new__(cls, one, two):
        return torch.Tensor._make_wrapper_subclass(cls, one.shape, dtype=one.dtype, device=one.device)

    def __init__(self, one, two):
        self.one, self.two = one, two

    def __tensor_flatten__(self):
        return ["one", "two"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def run(name):
            return func(*tree_map(lambda t: getattr(t, name) if isinstance(t, Pair) else t, args), **(kwargs or {}))

        return Pair(run("one"), run("two"))


def test_a_subclass_counts_what_it_wraps(x):
    assert numbers(lambda p: p.relu(), Pair(x, x[:])) == (N, [2 * N, 3 * N], 3 * N)
    memory = measure_memory(lambda: Pair(x, x.clone()) + 1)
    assert (memory.baseline, memory.timeline, memory.end) == (N, (2 * N, 3 * N, 4 * N), 3 * N)
    assert measure_memory(lambda p: None, Pair(x, x.clone())).baseline == 2 * N


# --- without memory


def test_fake_tensors_tell_what_real_ones_take():
    def build():
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
        return model, torch.ones(8, 16)

    def step(model, x):
        loss = model(x).square().mean()
        loss.backward()
        return loss

    real = measure_memory(step, *build())
    with FakeTensorMode():
        model, x = build()
        fake = measure_memory(step, model, x)
    assert fake == real
    again = measure_memory(step, model, x)  # without the mode
    assert again.end == fake.end


def test_devices_that_are_not_there():
    with FakeTensorMode():
        memory = measure_memory(lambda x: x.relu().cpu(), torch.ones(256, device="cuda"))
    assert memory.by_device == {"cpu": N, "cuda:0": 2 * N} and memory.peak == 3 * N


def test_a_fake_size_that_only_the_data_decides(x):
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        fake = mode.from_tensor(x)
        with pytest.raises(GraphError, match="SK108.*u0"):
            measure_memory(torch.nonzero, fake)
    assert not _get_current_dispatch_mode_stack()


# --- the run is not disturbed


def test_the_first_run_in_a_process():
    """The first op under a mode imports much of torch; that must not keep what the op is given."""
    code = """if True:
        import torch
        from splitkit import measure_memory
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        print(*(measure_memory(lambda x: model(x).sum(), torch.ones(3, 4)).end for _ in range(2)))
        """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first == second


def test_an_exception_leaves_nothing(x):
    seen = []

    def fail(x):
        y = x * 2
        seen.append(weakref.ref(y.untyped_storage()))
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure_memory(fail, x)
    assert seen[0]() is None
    assert not _get_current_dispatch_mode_stack() and "resize_" not in vars(torch.UntypedStorage)
    assert gc.isenabled()


def test_the_result_is_not_kept(x):
    seen = []

    def run(x):
        y = x * 2
        seen.append(weakref.ref(y))
        return y

    memory = measure_memory(run, x)
    assert memory.end == 2 * N and seen[0]() is None


def test_cycles_keep_memory_and_the_collector_waits(x):
    def run(x):
        cycle = [x * 2]
        cycle.append(cycle)
        del cycle
        assert not gc.isenabled()
        return x + 1

    assert numbers(run, x) == (N, [2 * N, 3 * N], 3 * N)
    assert gc.isenabled()
    gc.disable()
    try:
        measure_memory(run, x)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_runs_within_runs(x):
    inner = []

    def run(x):
        y = x * 2
        inner.append(measure_memory(lambda y: y.relu().relu(), y))
        y.untyped_storage().resize_(0)
        return x + 1

    outer = measure_memory(run, x)
    assert (inner[0].baseline, inner[0].timeline, inner[0].end) == (N, (2 * N, 3 * N), 2 * N)
    assert outer.timeline == (2 * N, 3 * N, 4 * N, N, 2 * N)
    assert "resize_" not in vars(torch.UntypedStorage)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("warm", [True, False])
def test_compiled_code_runs_as_it_is(x, backend, warm):
    torch._dynamo.reset()
    graphs = []

    def compiler(gm, inputs):  # other ops than those of the original code
        graphs.append(gm)
        next(n for n in gm.graph.nodes if n.target is torch.relu).target = torch.sigmoid
        gm.recompile()
        return torch._dynamo.lookup_backend(backend)(gm, inputs)

    @partial(torch.compile, backend=compiler)
    def run(x):
        return torch.relu(x) + 1

    if warm:
        run(x)
    memory = measure_memory(run, x)
    assert memory.ops == ("aten.sigmoid.default", "aten.add.Tensor")
    assert (memory.timeline, memory.end) == ((2 * N, 3 * N), 2 * N)
    assert torch.equal(run(x), x.sigmoid() + 1) and len(graphs) == 1
    torch._dynamo.reset()


# --- allocators


def test_the_allocator_sees_what_ops_take_inside():
    def run(model, x):
        return model(x)

    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2))
    x = torch.rand(4, 3, 32, 32)
    memory = measure_memory(run, model, x, allocator=True)
    assert memory.allocator_peak == memory.allocator_peaks["cpu"] >= memory.peak
    unwatched = max(accumulate(_torch.allocations_between(lambda: model(x), "")[0], initial=0))
    assert memory.allocator_peak == memory.baseline + unwatched


def test_the_allocator_agrees_where_ops_take_nothing_inside(x):
    memory = measure_memory(lambda x: x.relu().relu().relu(), x, allocator=True)
    assert memory.allocator_peaks == {"cpu": 3 * N} and memory.peak == 3 * N


def test_the_allocator_in_a_run_that_fails(x):
    with pytest.raises(RuntimeError, match="size"):
        measure_memory(lambda x: x + x[1:], x, allocator=True)
    assert measure_memory(torch.relu, x, allocator=True).allocator_peak == 2 * N


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda():
    def run(x, y):
        return (x.relu().relu() @ x.relu()).cpu() + y

    x, y = torch.rand(256, 256, device="cuda"), torch.rand(256, 256)
    matrix = x.nbytes
    memory = measure_memory(run, x, y, allocator=True)
    assert memory.by_device == {"cpu": 3 * matrix, "cuda:0": 4 * matrix}
    assert memory.peak == 5 * matrix and memory.end == 3 * matrix
    assert memory.allocator_peaks["cuda:0"] >= 4 * matrix and memory.allocator_peaks["cpu"] >= 3 * matrix


# --- the record


def test_the_record_can_be_written_and_printed(x):
    memory = measure_memory(lambda x: x.relu(), x, allocator=True)
    data = json.loads(json.dumps(memory.to_dict()))
    assert data["peak"] == data["allocator_peak"] == 2 * N and data["at"] == [0, "aten.relu.default"]
    assert data["live_at_peak"] == [[N, "input"], [N, "aten.relu.default"]]
    assert str(memory) == (
        "peak 2.00 KiB after op 0, aten.relu.default (1.00 KiB before, 2.00 KiB at the end; 2.00 KiB allocated)"
    )


def test_a_watch_holds_no_storage(x):
    watch = StorageWatch()
    with watch.watching():
        y = x * 2
        gone = weakref.ref(y.untyped_storage())
        del y
        assert gone() is None
        assert watch.lives[-1].died == 1
