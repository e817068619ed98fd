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

from splitkit._torch import FakeTensorMode
from splitkit.errors import GraphError
from splitkit.memory.measure import measure_memory
from splitkit.memory.profile import simulate_memory

aten = torch.ops.aten
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
    ("step", "samples", "least"), [(20, 2, 60), pytest.param(1, 12, 500, marks=pytest.mark.campaign)]
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
