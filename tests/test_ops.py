from __future__ import annotations

import functools
import itertools
import math
import operator
import random as python_random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.overrides import TorchFunctionMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from splitkit import ops, optables
from splitkit.ops import PURE, Effects, declare, effects_of, is_tuple

ROOT = nn.Module()
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of a few numbers: more threads cost three times the time
    yield
    torch.set_num_threads(threads)


def call(target: Any, *args: Any, root: nn.Module = ROOT, op: str = "call_function", **kwargs: Any) -> fx.Node:
    """A node that calls `target`; every string "$name" among the arguments becomes a placeholder."""
    graph = fx.Graph(root)
    made: dict[str, fx.Node] = {}

    def swap(x: Any) -> Any:
        if isinstance(x, str) and x.startswith("$"):
            return made.setdefault(x, graph.placeholder(x[1:]))
        return x

    args, kwargs = tree_map(swap, (args, kwargs))
    return graph.create_node(op, target, args, kwargs)


def method(name: str, *args: Any, **kwargs: Any) -> fx.Node:
    return call(name, *args, op="call_method", **kwargs)


def names(nodes: tuple[fx.Node, ...]) -> set[str]:
    return {n.name for n in nodes}


def seen(node: fx.Node, root: nn.Module = ROOT) -> tuple[set[str], set[str], bool, bool]:
    """(writes, aliases, random, impure) of a node that must be known."""
    e = effects_of(node, root)
    assert e.known, node.format_node()
    return names(e.writes), names(e.aliases), e.random, e.impure


FRESH = (set(), set(), False, False)


# ---------------------------------------------------------------- 1. every schema


def every_overload() -> Iterator[OpOverload]:
    everything = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")}
    for name in sorted(everything):
        packet = getattr(aten, name[6:], None)
        if isinstance(packet, OpOverloadPacket):
            yield from (getattr(packet, o) for o in packet.overloads())


def test_every_aten_schema_is_believed_about_writes() -> None:
    count = 0
    unsaid = {"_cudnn_rnn", "_cudnn_rnn_flatten_weight", "miopen_rnn"}
    for overload in every_overload():
        arguments = overload._schema.arguments
        given = {a.name: f"${a.name}_" for a in arguments}
        args = [[v] if "List[Tensor]" in str(a.type) else v for a, v in zip(arguments, given.values(), strict=True)]
        positional = [v for a, v in zip(arguments, args, strict=True) if not a.kwarg_only]
        node = call(overload, *positional, **{a.name: v for a, v in zip(arguments, args, strict=True) if a.kwarg_only})
        by_name = dict(
            zip((a.name for a in arguments), (ops._nodes(x) for x in [*node.args, *node.kwargs.values()]), strict=True)
        )
        declared = {n for a in arguments if a.alias_info and a.alias_info.is_write for n in by_name[a.name]}
        effects = effects_of(node, ROOT)
        assert effects.known
        name = overload._schema.name[6:]
        assert declared <= set(effects.writes), overload
        if "running_mean" not in by_name and name not in unsaid:
            assert declared == set(effects.writes), overload
        tensors = any("Tensor" in str(a.type) for a in arguments)
        if tensors and name.endswith("_") and not name.startswith("_") and overload.name() in ops._registered():
            assert effects.writes or name.endswith("__"), overload
        if any(a.is_out for a in arguments):
            outs = {n for a in arguments if a.is_out for n in by_name[a.name]}
            assert outs <= set(effects.writes), overload
        returned = {
            n for a in arguments if a.alias_info and ops._shared(a, overload._schema.returns) for n in by_name[a.name]
        }
        assert returned <= set(effects.aliases) | set(effects.writes), overload
        if torch.Tag.nondeterministic_seeded in overload.tags:
            assert effects.random, overload
        count += 1
    assert count > 2100


# ---------------------------------------------------------------- 2. what really happens


def storages(values: Any) -> dict[int, torch.Tensor]:
    """Memory that a value holds: address -> tensor. Sparse tensors hold their components."""
    found: dict[int, torch.Tensor] = {}
    for t in tree_leaves(values):
        if not isinstance(t, torch.Tensor):
            continue
        parts = [t]
        if t.layout is torch.sparse_coo:
            parts = [t._indices(), t._values()]
        elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [t.crow_indices(), t.col_indices(), t.values()]
        elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = [t.ccol_indices(), t.row_indices(), t.values()]
        for part in parts:
            with suppress(NotImplementedError, RuntimeError):
                if part.untyped_storage().nbytes():
                    found[part.untyped_storage().data_ptr()] = part
    return found


class Snapshot:
    """Memory, version counters and generator before a call, to be compared with those after it."""

    def __init__(self, values: Any) -> None:
        self.held = storages(values)
        self.bytes = {k: self.raw(t) for k, t in self.held.items()}
        self.versions = {k: t._version for k, t in self.held.items()}
        self.rng = torch.get_rng_state()

    @staticmethod
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage()).clone()

    def written(self) -> set[int]:
        return {
            k
            for k, t in self.held.items()
            if t._version != self.versions[k] or not torch.equal(self.raw(t), self.bytes[k])
        }

    def drew(self) -> bool:
        return not torch.equal(self.rng, torch.get_rng_state())


class Watch:
    """Runs calls and notes where `effects_of` promised too little."""

    def __init__(self, most: int = 6) -> None:
        self.faults: dict[str, str] = {}
        self.checked: dict[Any, int] = {}
        self.targets: set[Any] = set()
        self.most, self.busy = most, False

    def run(self, target: Any, args: Any, kwargs: Any, op: str = "call_function") -> Any:
        key = target if isinstance(target, OpOverload) else (getattr(target, "__name__", target), id(target))
        if self.busy or self.checked.get(key, 0) >= self.most:
            return target(*args, **kwargs)
        self.checked[key] = self.checked.get(key, 0) + 1
        self.targets.add(key)
        self.busy = True
        try:
            before = Snapshot((args, kwargs))
        finally:
            self.busy = False
        result = target(*args, **kwargs)
        self.busy = True
        try:
            self.judge(target, args, kwargs, result, before)
        finally:
            self.busy = False
        return result

    def judge(self, target: Any, args: Any, kwargs: Any, result: Any, before: Snapshot) -> None:
        graph = fx.Graph()
        made: dict[int, fx.Node] = {}
        owner: dict[int, set[fx.Node]] = {}

        def swap(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) not in made:
                made[id(x)] = graph.placeholder(f"x{len(made)}")
                for k in storages(x):
                    owner.setdefault(k, set()).add(made[id(x)])
            return made[id(x)]

        shown, args, kwargs = target, tree_map(swap, args), tree_map(swap, kwargs)
        if getattr(target, "__name__", "") == "__get__":
            shown, args = getattr, (args[0], target.__self__.__name__)
        node = graph.create_node("call_function", shown, tuple(args), kwargs)
        effects = effects_of(node, ROOT)
        if not effects.known:
            return
        what = f"{shown}"
        for k in before.written():
            if not owner.get(k, set()) & set(effects.writes):
                self.faults[f"{what} writes"] = node.format_node() or ""
        for k in storages(result):
            if k in owner and not owner[k] & set(effects.aliases):
                self.faults[f"{what} aliases"] = node.format_node() or ""
        if before.drew() and not effects.random:
            self.faults[f"{what} random"] = node.format_node() or ""
        expected = is_tuple(node, ROOT)
        if expected is not None and expected is not isinstance(result, (tuple, list)):
            self.faults[f"{what} tuple"] = f"{node.format_node()} is {type(result)}"


class Functions(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.run(func, args, kwargs or {})


class Dispatched(TorchDispatchMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.watch.run(func, args, kwargs or {})


class AsCalled(SchemaCheckMode):
    """Sees composite ops before they are taken apart; only torch's own classes may stand at that key."""

    def __init__(self, watch: Watch) -> None:
        TorchDispatchMode.__init__(self, _dispatch_key=torch._C.DispatchKey.PreDispatch)
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisablePythonDispatcher():  # its rules are not what the kernels do: dropout in eval mode copies
            return self.watch.run(func, args, kwargs or {})


def watched(watch: Watch, function: Callable[[], Any]) -> None:
    """Run under all three eyes: Python functions, ATen ops as called, ATen ops below the composite ones."""
    with suppress(Exception), Functions(watch), Dispatched(watch), AsCalled(watch), enable_python_dispatcher():
        function()


CALLS = """
torch.einsum("ij->ji", x)
torch.einsum("ij->ij", [x])
torch.einsum("ii->i", x)
torch.einsum("i,->i", v, torch.tensor(1.0))
torch.einsum("ij,ij->ij", x, x)
torch.einsum("ij,jk->ki", [x, x])
torch.einsum("ij,i->ji", x, v)
torch.einsum(x, [0, 1], [1, 0])
torch.cartesian_prod(v)
torch.chain_matmul(x)
torch.linalg.multi_dot([x, x])
torch.atleast_1d(x)
torch.atleast_2d(x, v)
torch.atleast_3d([x, v])
torch.broadcast_tensors(x, x)
torch.meshgrid(v, v, indexing="ij")
torch.meshgrid([v, v], indexing="xy")
torch.histogramdd(torch.randn(4, 2), [v.sort()[0], v.sort()[0]])
torch.unsafe_chunk(x, 2)
torch.unsafe_split(x, 2)
torch.unsafe_split_with_sizes(x, [2, 2])
x.chunk(2)
x.split(2)
x.split([1, 3])
torch.tensor_split(x, 2)
x.unbind()
torch.ops.aten._unsafe_view(x, (4, 4))
torch.ops.aten.lift(x)
torch.ops.aten.lift_fresh(x)
torch.ops.aten._to_cpu([x])
torch.ops.aten.data(x)
torch.ops.aten.cpu(x)
torch.ops.aten._reshape_from_tensor(x, torch.tensor([4, 4]))
torch.ops.aten.flatten_dense_tensors([x])
torch.ops.aten.unflatten_dense_tensors(v, [v])
torch.ops.prims.device_put(x, "cpu")
torch.ops.prims.convert_element_type(x, torch.float32)
torch.sparse_coo_tensor(i, i[0].float(), (2, 2))
torch.sparse_coo_tensor(i, i[0].float())
torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), i[0].float())
torch.sparse.sum(sparse)
torch._sparse_sum(sparse, [])
torch._cast_Float(x)
x.data
x.shape
x.type_as(x)
x.expand_as(x)
x.sum_to_size(4, 4)
x.reshape_as(x)
x.repeat(1, 1)
x.tile(1)
x.roll(0)
x.to(torch.float32)
x.to(torch.float64)
x.sum(())
x[None].sum(0)
x[None].amax(0)
torch.cat([x])
torch.stack([x])
torch.hstack([x])
torch.block_diag(x)
torch.concat([x, torch.empty(0)])
torch.float_power(x.double(), 1)
torch.linalg.matrix_power(x, 1)
torch.constant_pad_nd(img, (0, 0))
F.pad(img, (-1, 0))
F.pad(img, ())
F.embedding(i, torch.randn(3, 4) * 9, max_norm=1.0)
F.embedding(i, torch.randn(3, 4))
F.embedding_bag(i, torch.randn(3, 4) * 9, max_norm=1.0)
torch.embedding_bag(torch.randn(3, 4), i[0], torch.tensor([0]))
F.pixel_shuffle(img, 1)
F.pixel_unshuffle(img, 1)
F.channel_shuffle(img, 1)
F.native_channel_shuffle(img, 1)
F.gumbel_softmax(x)
F.fractional_max_pool2d(img, 2, output_size=2)
F.fractional_max_pool2d(img, 2, output_size=2, return_indices=True)
F.max_pool2d(img, 1)
F.max_pool2d(img, 2, return_indices=True)
F.adaptive_avg_pool2d(img, 6)
F.lp_pool2d(img, 2, 1)
F.unfold(img, 1)
torch.unique(v)
torch.unique(v, return_counts=True)
torch.nonzero(x, as_tuple=True)
torch.where(x > 0)
x.size()
x.size(0)
torch.max(x, 1)
torch.max(x, x)
torch.max(x)
x.max(dim=1)
torch.std_mean(x)
torch.topk(x, 2)
torch.rot90(x, 0)
torch.diff(v, n=0)
torch.combinations(v, 1)
torch.norm(x)
torch.repeat_interleave(v, 1)
x.clone().__iadd__(0)
x.clone().requires_grad_()
x.clone().__setitem__(0, 1.0)
x[...]
x[i]
torch.as_tensor(x)
torch.asarray(x)
x.new_tensor([1.0])
torch.batch_norm_update_stats(img, torch.zeros(4), torch.ones(4), 0.1)
torch.ops.aten._batch_norm_with_update(img, None, None, torch.zeros(4), torch.ones(4), 0.1, 1e-5)
torch.ops.aten._batch_norm_no_update(img, None, None, torch.zeros(4), torch.ones(4), 0.1, 1e-5)
torch.native_dropout(img, 0.5, None)
"""
NULLARY = (
    "float double half bool int cpu contiguous t numpy tolist resolve_conj resolve_neg conj conj_physical positive "
    "flatten ravel squeeze detach clone trunc round floor abs coalesce to_dense to_sparse chalf adjoint real imag "
    "pinverse to_sparse_csr values indices relu"
)
SWITCHED = """
F.batch_norm(img, torch.zeros(4), torch.ones(4), training=on)
F.instance_norm(img, torch.zeros(4), torch.ones(4), use_input_stats=on)
torch.batch_norm(img, None, None, torch.zeros(4), torch.ones(4), on, 0.1, 1e-5, False)
torch.native_batch_norm(img, None, None, torch.zeros(4), torch.ones(4), on, 0.1, 1e-5)
torch._batch_norm_impl_index(img, None, None, torch.zeros(4), torch.ones(4), on, 0.1, 1e-5, False)
torch.ops.aten._native_batch_norm_legit(img, None, None, torch.zeros(4), torch.ones(4), on, 0.1, 1e-5)
F.rrelu(img.clone(), training=on)
F.rrelu(img.clone(), training=on, inplace=True)
torch.native_dropout(img, p, on)
torch.dropout(img, p, on)
torch.dropout_(img.clone(), p, on)
torch.alpha_dropout(img, p, on)
torch.alpha_dropout_(img.clone(), p, on)
torch.feature_dropout(img, p, on)
torch.feature_dropout_(img.clone(), p, on)
torch.feature_alpha_dropout(img, p, on)
torch.feature_alpha_dropout_(img.clone(), p, on)
F.scaled_dot_product_attention(q, q, q, dropout_p=p)
torch.lstm(q[0], [q[0, :, :1].transpose(0, 1)] * 2, lstm, False, 1, p, on, False, True)
"""


def by_hand() -> Iterator[Callable[[], Any]]:
    """Calls whose arguments leave an op with nothing to do, switch it off, or make its schema lie."""
    index = torch.tensor([[0, 1], [1, 0]])
    space: dict[str, Any] = {"torch": torch, "F": F, "x": torch.randn(4, 4), "v": torch.randn(4), "i": index}
    space |= {"img": torch.randn(2, 4, 6, 6), "q": torch.randn(1, 2, 3, 4)}
    space |= {"lstm": [torch.randn(16, 4), torch.randn(16, 4)], "c": torch.randn(4, 4, dtype=torch.complex64)}
    space["sparse"] = torch.sparse_coo_tensor(index, torch.randn(2), (2, 2)).coalesce()

    def line(text: str, **more: Any) -> Callable[[], Any]:
        return functools.partial(eval, text, {**space, **more})

    for text in CALLS.strip().splitlines():
        yield line(text)
    for name in NULLARY.split():
        for owner in ("x", "c", "x.long()", "sparse"):
            yield line(f"{owner}.{name}()")
            yield line(f"torch.ops.aten.{name}({owner})")
    for p in (0.0, 0.5, 1.0):
        for on in (True, False):
            for text in SWITCHED.strip().splitlines():
                yield line(text, p=p, on=on)
            for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"):
                for image in ("img.clone()", "img[0].clone()"):
                    yield line(f"F.{name}({image}, p, on, False)", p=p, on=on)
                    yield line(f"F.{name}({image}, p=p, training=on, inplace=True)", p=p, on=on)
    for mode in ("constant", "reflect", "replicate", "circular"):
        yield line("F.pad(img, (0, 0, 0, 0), mode)", mode=mode)
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic", "area"):
        yield line("F.interpolate(img, scale_factor=1, mode=mode)", mode=mode)
        yield line("F.interpolate(img, size=(6, 6), mode=mode)", mode=mode)


def samples_of_every_op() -> Iterator[Callable[[], Any]]:
    for info in op_db:
        dtype = torch.float32 if torch.float32 in info.dtypes else min(info.dtypes, key=str, default=None)
        if dtype is None:
            continue
        samples = list(itertools.islice(info.sample_inputs("cpu", dtype), 4))
        for s in samples:
            yield functools.partial(info.op, s.input, *s.args, **s.kwargs)
        if samples and info.inplace_variant:
            yield functools.partial(info.inplace_variant, samples[0].input, *samples[0].args, **samples[0].kwargs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("calls", "least"), [(samples_of_every_op, 700), (by_hand, 150)])
def test_nothing_happens_that_was_not_foretold(calls: Callable[[], Iterator[Callable[[], Any]]], least: int) -> None:
    watch = Watch()
    for function in calls():
        if calls is by_hand:
            watch.checked.clear()  # each of these calls is a case of its own
        watched(watch, function)
        if calls is by_hand:  # and once without the dispatch modes, whose tensors some functions treat apart
            watch.checked.clear()
            with suppress(Exception), Functions(watch):
                function()
    assert not watch.faults, "\n".join(f"{k}: {v}" for k, v in sorted(watch.faults.items()))
    assert len(watch.targets) > least


# ---------------------------------------------------------------- 3. exactness and tables

X, Y = "$x", "$y"
COMMON = [
    (aten.linear.default, X, Y),
    (aten.addmm.default, X, Y, X),
    (aten.mm.default, X, Y),
    (aten.bmm.default, X, Y),
    (aten.matmul.default, X, Y),
    (aten.conv2d.default, X, Y),
    (aten.convolution.default, X, Y, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    (aten.layer_norm.default, X, [4]),
    (aten.native_layer_norm.default, X, [4], None, None, 1e-5),
    (aten.gelu.default, X),
    (aten.silu.default, X),
    (aten.add.Tensor, X, Y),
    (aten.mul.Tensor, X, 2),
    (aten.softmax.int, X, -1),
    (aten._softmax.default, X, -1, False),
    (aten.embedding.default, X, Y),
    (aten.cat.default, [X, Y]),
    (aten.mean.dim, X, [1]),
    (aten.where.self, X, X, Y),
    (aten.cross_entropy_loss.default, X, Y),
    (aten.pad.default, X, [1, 1]),
    (aten.einsum.default, "ij,jk->ik", [X, Y]),
    (aten.max_pool2d.default, X, [2, 2]),
    (F.linear, X, Y),
    (F.relu, X),
    (F.gelu, X),
    (F.silu, X),
    (F.softmax, X, -1),
    (F.layer_norm, X, (4,)),
    (F.conv2d, X, Y),
    (F.embedding, X, Y),
    (F.cross_entropy, X, Y),
    (F.normalize, X),
    (F.interpolate, X),
    (F.pad, X, (0, 1)),
    (F.one_hot, X),
    (F.max_pool2d, X, 2),
    (F.scaled_dot_product_attention, X, Y, Y),
    (torch.add, X, Y),
    (torch.cat, [X, Y], 1),
    (torch.matmul, X, Y),
    (torch.sort, X),
    (torch.where, X, X, Y),
    (torch.arange, X),
    (torch.tensor, 1.0),
    (torch.is_grad_enabled,),
    (torch.sym_int, X),
    (operator.add, X, Y),
    (operator.mul, X, 2),
    (operator.matmul, X, Y),
    (math.sqrt, X),
    (len, X),
    (isinstance, X, int),
]


@pytest.mark.parametrize("parts", COMMON, ids=lambda p: str(p[0]))
def test_common_ops_are_known_to_be_harmless(parts: tuple[Any, ...]) -> None:
    assert seen(call(*parts)) == FRESH


TABLE = [
    # target, arguments, keywords, writes, aliases, random, impure
    (F.relu, (X,), {"inplace": True}, "x", "x", False, False),
    (F.relu, (X, True), {}, "x", "x", False, False),
    (F.relu, (X, False), {}, "", "", False, False),
    (F.dropout, (X,), {}, "", "", True, False),
    (F.dropout, (X, 0.5, False), {}, "", "x", False, False),
    (F.dropout, (X,), {"p": 0.0}, "", "x", False, False),
    (F.dropout, (X, 0.5, Y), {}, "", "x", True, False),
    (F.dropout, (X,), {"training": True, "inplace": True}, "x", "x", True, False),
    (F.alpha_dropout, (X,), {}, "", "x", False, False),
    (aten.dropout.default, (X, 0.5, True), {}, "", "", True, False),
    (aten.dropout.default, (X, 0.5, False), {}, "", "x", False, False),
    (aten.dropout_.default, (X, 0.5, True), {}, "x", "x", True, False),
    (aten.native_dropout.default, (X, 0.5, False), {}, "", "", False, False),
    (aten.rrelu.default, (X,), {}, "", "", False, False),
    (aten.rrelu.default, (X, 0.1, 0.2, True), {}, "", "", True, False),
    (aten.scaled_dot_product_attention.default, (X, X, X), {}, "", "", False, False),
    (aten.scaled_dot_product_attention.default, (X, X, X, None, 0.1), {}, "", "", True, False),
    (aten.scaled_dot_product_attention.default, (X, X, X), {"dropout_p": Y}, "", "", True, False),
    (F.scaled_dot_product_attention, (X, X, X), {"dropout_p": 0.1}, "", "", True, False),
    (aten.lstm.input, (X, [Y], [], True, 2, 0.5, False, False, True), {}, "", "", False, False),
    (aten.lstm.input, (X, [Y], [], True, 2, 0.5, True, False, True), {}, "", "", True, False),
    (torch.lstm, (X, [Y], [], True, 2, 0.0, True, False, True), {}, "", "", False, False),
    (aten.batch_norm.default, (X, None, None, Y, "$z", True, 0.1, 1e-5, False), {}, "y z", "", False, False),
    (aten.batch_norm.default, (X, None, None, Y, "$z", False, 0.1, 1e-5, False), {}, "", "", False, False),
    (aten._native_batch_norm_legit.default, (X, None, None, Y, "$z", False, 0.1, 1e-5), {}, "", "", False, False),
    (F.batch_norm, (X, Y, "$z"), {"training": True}, "y z", "", False, False),
    (F.batch_norm, (X, Y, "$z"), {}, "", "", False, False),
    (F.instance_norm, (X, Y, "$z"), {}, "y z", "", False, False),
    (F.embedding, (X, Y), {"max_norm": 1.0}, "y x", "", False, False),
    (F.gumbel_softmax, (X,), {}, "", "", True, False),
    (
        F.multi_head_attention_forward,
        (X, X, X, 4, 2, None, None, None, None, False, 0.1, Y, None),
        {},
        "",
        "",
        True,
        False,
    ),
    (torch.rand, (3,), {}, "", "", True, False),
    (torch.rand_like, (X,), {}, "", "", True, False),
    (torch.bernoulli, (X,), {}, "", "", True, False),
    (torch.add, (X, Y), {"out": "$z"}, "z", "z", False, False),
    (torch.sort, (X,), {"out": [Y, "$z"]}, "y z", "y z", False, False),
    (aten._foreach_add_.List, ([X, Y], ["$z"]), {}, "x y", "", False, False),
    (aten.chunk.default, (X, 2), {}, "", "x", False, False),
    (aten.add.out, (X, X), {"out": Y}, "y", "y", False, False),
    (aten.einsum.default, ("ij->ji", [X]), {}, "", "x", False, False),
    (torch.split, (X, 2), {}, "", "x", False, False),
    (torch.meshgrid, (X, Y), {}, "", "x y", False, False),
    (torch.ops.aten.relu_, (X,), {}, "x", "x", False, False),
    (operator.iadd, (X, Y), {}, "x", "x", False, False),
    (operator.setitem, (X, 0, Y), {}, "x", "x y", False, False),
    (operator.getitem, (X, 0), {}, "", "x", False, False),
    (getattr, (X, "T"), {}, "", "x", False, False),
    (max, (X, Y), {}, "", "x y", False, False),
    (print, (X,), {}, "", "", False, True),
    (warnings.warn, ("!",), {}, "", "", False, True),
    (torch.manual_seed, (0,), {}, "", "", True, True),
    (torch.ops.aten._print.default, ("!",), {}, "", "", False, True),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{r[0]}{r[1]}{r[2]}")
def test_functions(row: tuple[Any, ...]) -> None:
    target, args, kwargs, writes, aliases, random, impure = row
    expected = (set(writes.split()), set(aliases.split()), random, impure)
    assert seen(call(target, *args, **kwargs)) == expected


@pytest.mark.parametrize(
    ("name", "args", "writes", "aliases", "random"),
    [
        ("add", (Y,), "", "", False),
        ("add_", (Y,), "x", "x", False),
        ("view", (2, 3), "", "x", False),
        ("permute", (1, 0), "", "x", False),
        ("float", (), "", "x", False),
        ("to", (torch.float16,), "", "x", False),
        ("contiguous", (), "", "x", False),
        ("chunk", (2,), "", "x", False),
        ("item", (), "", "", False),
        ("size", (), "", "", False),
        ("numpy", (), "", "x", False),
        ("masked_fill", (Y, 0.0), "", "", False),
        ("masked_fill_", (Y, 0.0), "x", "x", False),
        ("copy_", (Y,), "x", "x", False),
        ("set_", (Y,), "x", "x y", False),
        ("normal_", (), "x", "x", True),
        ("bernoulli", (), "", "", True),
        ("__setitem__", (0, Y), "x", "x", False),
        ("__rsub__", (1,), "", "", False),
    ],
)
def test_methods(name: str, args: tuple[Any, ...], writes: str, aliases: str, random: bool) -> None:
    assert seen(method(name, X, *args)) == (set(writes.split()), set(aliases.split()), random, False)


@pytest.mark.parametrize(
    "target", [torch._assert, torch._check, aten._assert_async.msg, aten.sym_constrain_range.default]
)
def test_assertions_only_raise(target: Any) -> None:
    assert effects_of(call(target, X, "why"), ROOT) == Effects(check=True)


def test_nodes_that_compute_nothing() -> None:
    graph = fx.Graph()
    for node in (graph.placeholder("x"), graph.get_attr("w"), graph.output(())):
        assert effects_of(node, ROOT) is PURE


# ---------------------------------------------------------------- modules


def module(m: nn.Module, *args: Any) -> tuple[fx.Node, nn.Module]:
    root = nn.Module()
    root.m = m
    return call("m", *(args or (X,)), root=root, op="call_module"), root


def act(m: nn.Module, train: bool = True) -> tuple[str, str, bool, int]:
    """(writes, aliases, random, number of state tensors written)."""
    node, root = module(m.train(train))
    e = effects_of(node, root)
    assert e.known and not e.impure
    assert {id(t) for t in e.writes_state} <= {id(t) for t in e.reads_state}
    return " ".join(names(e.writes)), " ".join(names(e.aliases)), e.random, len(e.writes_state)


def test_modules() -> None:
    assert (
        act(nn.Linear(2, 2)) == act(nn.Conv2d(1, 1, 1)) == act(nn.LayerNorm(2)) == act(nn.GELU()) == ("", "", False, 0)
    )
    assert act(nn.ReLU(inplace=True)) == ("x", "x", False, 0)
    assert act(nn.Identity()) == act(nn.Flatten()) == ("", "x", False, 0)
    assert act(nn.Dropout(0.1)) == ("", "", True, 0)
    assert act(nn.Dropout(0.1), train=False) == act(nn.Dropout(0.0)) == ("", "x", False, 0)
    assert act(nn.RReLU())[2] and not act(nn.RReLU(), train=False)[2]
    assert act(nn.BatchNorm2d(2))[3] == 3
    assert act(nn.BatchNorm2d(2), train=False)[3] == act(nn.BatchNorm2d(2, track_running_stats=False))[3] == 0
    assert act(nn.InstanceNorm2d(2, track_running_stats=True))[3] == 3
    assert act(nn.Embedding(3, 2))[3] == 0 and act(nn.Embedding(3, 2, max_norm=1.0))[3] == 1
    assert act(nn.LSTM(2, 2, 2, dropout=0.5))[2] and not act(nn.LSTM(2, 2, 2, dropout=0.5), train=False)[2]
    assert act(nn.MultiheadAttention(4, 2, dropout=0.1))[2] and not act(nn.MultiheadAttention(4, 2))[2]
    assert act(nn.CrossEntropyLoss()) == ("", "", False, 0)
    assert act(nn.TransformerEncoderLayer(4, 2, 8))[2] and not act(nn.TransformerEncoderLayer(4, 2, 8, 0.0))[2]
    assert act(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))) == ("", "", False, 0)
    assert act(nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True))) == ("x", "x", False, 0)


def test_modules_that_may_do_anything() -> None:
    class Own(nn.Linear):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    shaped = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    activation = nn.TransformerEncoderLayer(4, 2, 8, activation=lambda x: x)
    for m in (Own(2, 2), hooked, patched, shaped, activation, nn.Sequential(Own(2, 2))):
        node, root = module(m)
        e = effects_of(node, root)
        assert (names(e.writes), names(e.aliases), e.random, e.impure, e.known) == ({"x"}, {"x"}, True, True, False)
        assert len(e.writes_state) == len(list(m.parameters())) > 0


@pytest.mark.parametrize("train", [True, False])
def test_modules_do_what_their_row_says(train: bool) -> None:
    """Every torch.nn class that can be built from small numbers, run against its prediction."""
    run = 0
    faults = []
    for name in sorted(optables.FRESH_MODULES | optables.ALIAS_MODULES | optables.DROPOUT_MODULES):
        for args in ((), (1,), (4,), (4, 4), (4, 4, 1)):
            for shape in ((2, 4), (2, 4, 4), (2, 4, 4, 4), (2, 4, 4, 4, 4)):
                try:
                    m = getattr(nn, name)(*args).train(train)
                    x = torch.randn(shape)
                    held = {k: t.clone() for k, t in m.state_dict().items()}
                    before = Snapshot(x)
                    out = m(x)
                except Exception:
                    continue
                node, root = module(m)
                e = effects_of(node, root)
                state = {k for k, t in m.state_dict(keep_vars=True).items() if not torch.equal(t, held[k])}
                foretold = {k for k, t in m.state_dict(keep_vars=True).items() if any(t is w for w in e.writes_state)}
                if not e.known:
                    faults.append(f"{name} is unknown")
                if (before.written() and not e.writes) or (before.drew() and not e.random) or not state <= foretold:
                    faults.append(f"{name}{args} {shape} does more")
                if storages(out).keys() & before.held.keys() and not e.aliases:
                    faults.append(f"{name}{args} {shape} aliases")
                expected = is_tuple(node, root)
                if expected is not None and expected is not isinstance(out, (tuple, list)):
                    faults.append(f"{name}{args} tuple")
                run += 1
    assert not faults
    assert run > 200


# ---------------------------------------------------------------- 4. unknown and declared


def stranger(x: Any, y: Any) -> Any:
    return x


def friend(x: Any, y: Any = None) -> Any:
    return y


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Any, y: Any = None) -> Any:
        return x


@pytest.mark.parametrize("op", ["call_function", "call_method"])
def test_the_unknown_may_do_anything(op: str) -> None:
    for target in (stranger, python_random.random) if op == "call_function" else ("frobnicate",):
        e = effects_of(call(target, X, [Y], op=op), ROOT)
        assert (names(e.writes), names(e.aliases)) == ({"x", "y"}, {"x", "y"})
        assert e.random and e.impure and not e.known


def test_declare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_DECLARED", {})
    declare(friend, writes=("y",), aliases=(0,), random=True)
    assert seen(call(friend, X, Y)) == seen(call(friend, x=X, y=Y)) == ({"y"}, {"x"}, True, False)
    assert seen(call(friend, X)) == (set(), {"x"}, True, False)
    declare("frobnicate")
    assert seen(method("frobnicate", X)) == FRESH
    declare(aten.relu.default, impure=True)
    assert seen(call(aten.relu.default, X))[3]
    declare(Layer, aliases=(0,))
    node, root = module(Layer())
    e = effects_of(node, root)
    assert (names(e.aliases), e.known, len(e.writes_state)) == ({"x"}, True, 1)
    root.m.eval()
    assert not effects_of(node, root).writes_state
    assert not effects_of(module(nn.Sequential(Layer()))[0], module(nn.Sequential(Layer()))[1]).known


# ---------------------------------------------------------------- 5. graphs inside


class Body(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("w", torch.ones(3))

    def forward(self, x: Any, y: Any) -> Any:
        return self.function(self, x, y)


BODIES = [
    # function, writes, aliases, random, impure, state written
    (lambda self, x, y: x + y * self.w, False, False, False, False, 0),
    (lambda self, x, y: (x + y).relu_(), False, False, False, False, 0),
    (lambda self, x, y: x.view(-1).relu_() + y, True, False, False, False, 0),
    (lambda self, x, y: x.view(-1), False, True, False, False, 0),
    (lambda self, x, y: F.dropout(x + y), False, False, True, False, 0),
    (lambda self, x, y: self.w.add_(x) * y, False, False, False, False, 1),
]


@pytest.mark.parametrize("row", BODIES)
def test_bodies(row: tuple[Any, ...]) -> None:
    function, writes, aliases, random, impure, state = row
    body = fx.symbolic_trace(Body(function))
    root = nn.Module()
    root.body = body
    graph = fx.Graph(root)
    x, y = graph.placeholder("x"), graph.placeholder("y")
    attribute = graph.get_attr("body")
    wrap = torch.ops.higher_order.wrap_with_set_grad_enabled
    nodes = [graph.call_module("body", (x, y)), graph.call_function(wrap, (False, attribute, x, y))]
    for node in nodes:
        e = effects_of(node, root)
        assert e.known
        assert names(e.writes) == ({"x", "y"} if writes else set())
        assert names(e.aliases) == ({"x", "y"} if aliases else set())
        assert (e.random, e.impure, len(e.writes_state)) == (random, impure, state)
        assert is_tuple(node, root) is False
    loop = graph.call_function(torch.ops.higher_order.while_loop, (attribute, attribute, (x,), (y,)))
    assert names(effects_of(loop, root).aliases) == {"x", "y"}


def test_a_higher_order_operator_without_a_body_is_unknown() -> None:
    assert not effects_of(call(torch.ops.higher_order.cond, X, Y), ROOT).known


def test_exported_regions() -> None:
    class M(nn.Module):
        def forward(self, x: Any) -> Any:
            with torch.no_grad():
                y = F.dropout(x * 2)
            return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (y,))

    gm = torch.export.export(M(), (torch.ones(3),)).module()
    assert isinstance(gm, fx.GraphModule)
    known = [effects_of(n, gm) for n in gm.graph.nodes]
    assert all(e.known for e in known)
    assert sum(e.random for e in known) == 1
    assert not any(e.writes or e.impure for e in known)


# ---------------------------------------------------------------- tuples

TUPLES = [
    (call(torch.max, X), False),
    (call(torch.max, X, 1), True),
    (call(torch.max, X, Y), False),
    (call(torch.max, X, dim=1), True),
    (call(torch.topk, X, 2), True),
    (call(torch.split, X, 2), True),
    (call(torch.std, X), False),
    (call(torch.where, X), True),
    (call(torch.where, X, X, Y), False),
    (call(aten.unbind.int, X), True),
    (call(aten.native_layer_norm.default, X, [4], None, None, 1e-5), True),
    (call(aten.add.Tensor, X, Y), False),
    (call(getattr, X, "shape"), True),
    (call(getattr, X, "dtype"), False),
    (call(operator.add, X, 1), False),
    (call(F.max_pool2d, X, 2), False),
    (call(F.max_pool2d, X, 2, return_indices=True), True),
    (call(F.multi_head_attention_forward, X), True),
    (call(stranger, X, Y), None),
    (method("chunk", X, 2), True),
    (method("size", X), True),
    (method("size", X, 0), False),
    (method("frobnicate", X), None),
    (call(operator.getitem, call(torch.topk, X, 2), 0), False),
    (call(operator.getitem, call(stranger, X, Y), 0), None),
    (call(operator.getitem, call(torch.split, X, 2), slice(1)), True),
]


@pytest.mark.parametrize(("node", "expected"), TUPLES, ids=lambda v: str(v))
def test_is_tuple(node: fx.Node, expected: bool | None) -> None:
    assert is_tuple(node, ROOT) is expected


def test_meta_decides_about_tuples_and_modules_have_their_own() -> None:
    node = call(stranger, X, Y)
    node.meta["val"] = (1, 2)
    assert is_tuple(node) is True
    node.meta["val"] = torch.ones(1)
    assert is_tuple(node) is False
    for m, expected in (
        (nn.LSTM(2, 2), True),
        (nn.Linear(2, 2), False),
        (Layer(), None),
        (nn.MaxPool1d(2, return_indices=True), True),
    ):
        node, root = module(m)
        assert is_tuple(node, root) is expected
    node, root = module(nn.LSTM(2, 2))
    assert is_tuple(node.graph.call_function(operator.getitem, (node, 1)), root) is True
    assert is_tuple(node.graph.call_function(operator.getitem, (node, 0)), root) is False


def test_it_is_quick() -> None:
    node = call(aten.addmm.default, X, Y, X)
    effects_of(node, ROOT)
    start = time.perf_counter()
    for _ in range(2000):
        effects_of(node, ROOT)
    assert (time.perf_counter() - start) / 2000 < 50e-6
