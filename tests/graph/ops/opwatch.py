"""Runs calls and notes where `effects_of` and `is_tuple` promised too little."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from opnodes import ROOT
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from splitkit.graph.ops import effects_of, is_tuple


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

    def __init__(self, most: int = 10) -> None:
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
