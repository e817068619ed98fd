"""The bytes of every ATen op that torch has samples of, forward and backward: simulated against a real run."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import suppress

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import splitkit as sk
from splitkit import _torch
from splitkit._torch import FakeTensorMode
from splitkit.errors import GraphError
from splitkit.graph.node_values import op_name
from splitkit.memory.measurement import measure_memory
from splitkit.memory.profile import simulate_memory

aten = torch.ops.aten
CONV_TRANSPOSE_3D = (None, [1, 1, 1], [1, 1, 1], [1, 1, 1], True, [0, 0, 0], 1)
EACH = 4  # calls of one op that are looked at


class Calls(TorchDispatchMode):
    """Notes the calls of ATen ops below autograd, as far as they are new."""

    def __init__(self):
        super().__init__()
        self.found, self.seen = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        described = str(pytree.tree_map_only(torch.Tensor, lambda t: (t.shape, t.stride(), t.dtype), (args, kwargs)))
        if func.namespace == "aten" and (func, described) not in self.seen:
            self.seen.add((func, described))
            self.found.append((func, *pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))))
        return func(*args, **kwargs)


def calls_of(info, samples):
    """The ATen calls of forward and backward of a few samples of an op."""
    kinds = sorted(info.supported_dtypes("cpu"), key=str)
    dtype = torch.float32 if torch.float32 in kinds else next(iter(kinds), None)
    calls = Calls()
    if dtype is None:
        return calls.found
    trains = info.supports_autograd and dtype == torch.float32
    for sample in itertools.islice(info.sample_inputs_func(info, "cpu", dtype, requires_grad=trains), samples):
        with suppress(Exception), calls:  # a sample that does not run here is torch's affair
            results = pytree.tree_leaves(info(sample.input, *sample.args, **sample.kwargs))
            ends = [t for t in results if isinstance(t, torch.Tensor) and t.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
    return calls.found


def own(tensor):
    """A copy with the same strides, in a storage that ends with it."""
    if not tensor.numel() or tensor.is_neg() or tensor.is_conj():
        return tensor.clone()
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    base = tensor.as_strided((extent,), (1,)).clone()
    return torch.empty(0, dtype=tensor.dtype).set_(base.untyped_storage(), 0, tensor.shape, tensor.stride())


def graph_of(func, args, kwargs):
    """A graph of one call, and real inputs for it."""
    graph, mode, leaves, real = fx.Graph(), FakeTensorMode(allow_non_fake_inputs=True), [], []
    flat, spec = pytree.tree_flatten((args, kwargs))
    for i, leaf in enumerate(flat):
        if isinstance(leaf, torch.Tensor):
            real.append(own(leaf))
            leaves.append(graph.placeholder(f"x{i}"))
            leaves[-1].meta["val"] = mode.from_tensor(real[-1])
        else:
            leaves.append(leaf)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    node = graph.call_function(func, args, kwargs)
    fakes = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with torch.no_grad(), mode:
        node.meta["val"] = func(*fakes[0], **fakes[1])
    graph.output(node)
    return fx.GraphModule(nn.Module(), graph), real


def peaks(func, args, kwargs):
    """(peak, bytes at the end): simulated with a cold and a warm cache of fake tensors, and measured."""
    found = []
    for clear in (True, False):
        if clear:
            FakeTensorMode.cache_clear()
        gm, real = graph_of(func, args, kwargs)
        profile = simulate_memory(gm)
        found.append((profile.peak, profile.end))
    with torch.no_grad():
        measured = measure_memory(gm, *real)
    return *found, (measured.peak, measured.end)


def faults(calls, most=EACH):
    """Op -> what was simulated and measured, where these differ; and how many ops were looked at."""
    count, wrong = Counter(), {}
    for func, args, kwargs in calls:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if count[func] == most or any(t.layout != torch.strided for t in tensors):
            continue
        try:
            found = peaks(func, args, kwargs)
        except (GraphError, RuntimeError, NotImplementedError):
            continue  # only the data decides how large the result is, or there is no fake
        count[func] += 1
        if len(set(found)) > 1:
            wrong.setdefault(str(func), found)
    return wrong, len(count)


def every(step, samples):
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds: not for every process

    return [call for info in op_db[::step] for call in calls_of(info, samples)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("step", "samples", "least"), [(40, 2, 30), pytest.param(1, 12, 500, marks=pytest.mark.campaign)]
)
def test_an_op_takes_what_is_simulated(step, samples, least):
    torch.manual_seed(0)
    wrong, ops = faults(every(step, samples))
    assert not wrong and ops > least


REDUCING = [
    (aten.col2im.default, (torch.randn(2, 36, 36), [6, 6], [3, 3], [1, 1], [1, 1], [1, 1])),
    (aten.col2im.default, (torch.randn(36, 36), [6, 6], [3, 3], [1, 1], [1, 1], [1, 1])),
    (aten.col2im.default, (torch.randn(2, 16, 4), [8, 8], [2, 2], [1, 1], [0, 0], [6, 6])),
    (aten.im2col.default, (torch.randn(2, 3, 16, 16), [1, 1], [1, 1], [0, 0], [4, 4])),
    (aten.im2col.default, (torch.randn(2, 3, 16, 16), [3, 3], [1, 1], [1, 1], [1, 1])),
    (aten._embedding_bag.default, (torch.randn(9, 4), torch.arange(6), torch.tensor([0, 3]))),
    (aten._embedding_bag.default, (torch.randn(9, 4), torch.arange(6), torch.tensor([0, 3]), False, 2)),
    (aten._efficientzerotensor.default, ([20, 20],)),
    (aten.pixel_shuffle.default, (torch.randn(2, 16, 9, 9), 2)),
]


@pytest.mark.parametrize("call", REDUCING, ids=lambda call: str(call[0]))
def test_kernels_that_keep_more_than_they_show(call):
    wrong, ops = faults([(*call, {})])
    assert not wrong and ops == 1


# --- what kernels take inside, by the allocator

FEW = 16
"""Bytes for numbers that are made into tensors, and the like."""
# Constant, or one buffer a thread, or only where the input is broadcast, cast or laid out in another way.
# fmt: off
SMALL = frozenset((
    "_batch_norm_with_update", "_native_batch_norm_legit", "batch_norm_backward", "clamp", "exp2", "ldexp",
    "native_batch_norm", "native_batch_norm_backward", "native_group_norm_backward", "native_layer_norm_backward",
    "normal", "repeat", "scatter", "triu",
))
# fmt: on


def inside(func, args, kwargs=None):
    """Bytes that the allocator gives at the peak beyond what is simulated, and the larger of inputs and results."""
    gm, real = graph_of(func, args, kwargs or {})
    profile = simulate_memory(gm)
    with torch.no_grad():
        gm(*real)  # what is made once
        taken = max(itertools.accumulate(_torch.allocations_between(lambda: gm(*real), "")[0]), default=0)
    return taken - (profile.peak - profile.baseline), max(profile.baseline, profile.peak - profile.baseline), profile


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("step", "samples", "least"), [(40, 2, 30), pytest.param(1, 12, 500, marks=pytest.mark.campaign)]
)
def test_the_allocator_gives_what_is_simulated_or_the_op_is_named(step, samples, least):
    torch.manual_seed(0)
    count, silent = Counter(), set()
    for func, args, kwargs in every(step, samples):
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if count[func] == EACH or any(t.layout != torch.strided for t in tensors):
            continue
        try:
            more, _, profile = inside(func, args, kwargs)
        except (GraphError, RuntimeError, NotImplementedError):
            continue  # only the data decides how large the result is, or there is no fake
        count[func] += 1
        if more > FEW and not profile.unseen and op_name(func) not in SMALL:
            silent.add(op_name(func))
    assert not silent and len(count) > least


IMAGES, ROWS = torch.randn(4, 32, 32, 32), torch.randn(64, 256)
LARGE = [
    (aten.convolution.default, (IMAGES, torch.randn(32, 32, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)),
    (aten.convolution.default, (torch.randn(2, 8, 8, 8, 8), torch.randn(8, 8, 3, 3, 3), *CONV_TRANSPOSE_3D)),
    (aten.native_batch_norm.default, (IMAGES, *[torch.ones(32)] * 4, True, 0.1, 1e-5)),
    (aten.native_layer_norm.default, (ROWS, [256], None, None, 1e-5)),
    (aten.upsample_bilinear2d.default, (IMAGES, [64, 64], False)),
    (aten.upsample_nearest2d.default, (IMAGES, [64, 64])),
    (aten.mse_loss.default, (IMAGES, IMAGES + 1)),
    (aten.binary_cross_entropy_with_logits.default, (IMAGES, IMAGES + 1)),
    (aten.logsumexp.default, (IMAGES, [1])),
    (aten.sort.default, (ROWS.flatten(),)),
    (aten.cumsum.default, (IMAGES, 1)),
    (aten.isin.Tensor_Tensor, (torch.arange(4096), torch.arange(512))),
    (aten.linalg_matrix_exp.default, (torch.randn(32, 32),)),
    (aten.mm.default, (ROWS, ROWS.T)),
    (aten.gelu.default, (IMAGES,)),
    (aten._softmax.default, (ROWS, -1, False)),
    (aten.clamp.default, (IMAGES, 0.0, 1.0)),
    (aten.embedding.default, (ROWS, torch.arange(64))),
    (aten.cat.default, ([IMAGES, IMAGES],)),
    (aten.max_pool2d_with_indices.default, (IMAGES, [2, 2])),
    (aten.triu.default, (torch.randn(256, 256),)),
    (aten.scatter.value, (ROWS, 0, torch.zeros(64, 256, dtype=torch.int64), 1.0)),
    (aten.repeat.default, (IMAGES, [2, 1, 1, 1])),
]


@pytest.mark.parametrize("call", LARGE, ids=lambda call: str(call[0]))
def test_a_peak_is_a_lower_bound_exactly_where_its_text_says_so(call):
    more, large, profile = inside(*call)
    assert more >= 0
    assert profile.unseen or more < 0.05 * large
    assert str(profile).startswith("peak at least") == bool(profile.unseen)
    told = simulate_memory(graph_of(*call, {})[0], workspace=lambda node: more)
    assert not told.unseen and "at least" not in str(told) and told.peak >= profile.peak + max(0, more)


def test_ops_are_named_in_parts_modules_bodies_and_composite_ops():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3)

        def forward(self, x):
            y = torch.cond(x.sum() > 0, torch.sin, lambda x: x.logsumexp(1, keepdim=True).expand_as(x).clone(), (x,))
            return self.conv(y)

    model, x = Model(), torch.randn(2, 2, 8, 8)
    profile = simulate_memory(sk.capture(model, x))
    assert profile.unseen == {"convolution", "logsumexp"} and profile.to_dict()["unseen"] == sorted(profile.unseen)
    assert "of convolution, logsumexp take inside" in str(profile)
    whole = sk.capture(nn.Sequential(nn.ReLU(), model.conv), x, how="symbolic_trace")
    assert simulate_memory(whole).unseen == {"convolution"}
    parts = simulate_memory(sk.split(whole, sk.policies.ByName({"0": 0, "1": 1}))).parts
    assert [part.unseen for part in parts.values()] == [frozenset(), {"convolution"}]
