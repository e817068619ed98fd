from __future__ import annotations

import functools
import math
import operator
import random as python_random
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
        by_name = dict(zip((a.name for a in arguments), (ops._nodes(x) for x in [*node.args, *node.kwargs.values()]), strict=True))
        declared = {n for a in arguments if a.alias_info and a.alias_info.is_write for n in by_name[a.name]}
        effects = effects_of(node, ROOT)
        assert effects.known
        name = overload._schema.name[6:]
        assert declared <= set(effects.writes), overload
        if "running_mean" not in by_name and name not in unsaid:
            assert declared == set(effects.writes), overload
        tensors = any("Tensor" in str(a.type) for a in arguments)
        if tensors and name.endswith("_") and not name.startswith("_") and overload.name() in ops._registered():
            assert effects.writes or name.endswith("__") , overload
        if any(a.is_out for a in arguments):
            outs = {n for a in arguments if a.is_out for n in by_name[a.name]}
            assert outs <= set(effects.writes), overload
        returned = {n for a in arguments if a.alias_info and ops._shared(a, overload._schema.returns) for n in by_name[a.name]}
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
        self.most, self.busy = most, False

    def run(self, target: Any, args: Any, kwargs: Any, op: str = "call_function") -> Any:
        key = target if isinstance(target, OpOverload) else (getattr(target, "__name__", target), id(target))
        if self.busy or self.checked.get(key, 0) >= self.most:
            return target(*args, **kwargs)
        self.checked[key] = self.checked.get(key, 0) + 1
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
