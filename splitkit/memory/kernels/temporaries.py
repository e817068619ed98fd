"""The temporary memory of composite ops (``linear``, ``dropout``, a loss), besides their results.

In a graph of ``torch.export`` or ``symbolic_trace`` a composite op is one node, but it runs as several ops. It is run
here on fake tensors, which take no memory, and its live bytes are measured as for a real run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.graph.byte_sizes import storage_bytes
from splitkit.graph.fake_calls import NO_VALUES, CallMemo, changes_state, stand_in
from splitkit.graph.storages import storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.kernels.unseen import allocates_unseen, name_of
from splitkit.memory.measurement import measure_memory
from splitkit.memory.storage_watch import FakesOfReals, OpsSeen


@dataclass(frozen=True)
class CallBytes:
    """The bytes that a call takes besides its results.

    Attributes:
        transient: the most bytes until it returns.
        casts: bytes of weights that autocast has cast, and keeps until its region ends.
        aliases: for each tensor of the result, the index of the argument tensor whose memory it shares, or ``None``;
            ``None`` for all if the call was not run.
        beyond: bytes of results beyond what their values show (`splitkit.memory.kernels.kernel_results`).
        unseen: names of the ops inside whose kernels take more than that (`splitkit.memory.kernels.unseen`).
    """

    transient: int
    casts: int
    aliases: tuple[int | None, ...] | None = None
    beyond: int = 0
    unseen: frozenset[str] = frozenset()


NOTHING = CallBytes(0, 0)


@dataclass
class Temporaries:
    """Measures each distinct call once.

    Attributes:
        sizes: symbol -> size, where it differs from the one seen at capture.
    """

    sizes: Mapping[str, int]
    _calls: CallMemo[CallBytes] = field(default_factory=CallMemo)

    def __call__(
        self, gm: fx.GraphModule, node: Node, autocast: Sequence[Node], given: Mapping[Node, Any] = NO_VALUES
    ) -> CallBytes:
        """Return the bytes that ``node`` takes; `NOTHING` if it cannot run on fake tensors.

        Args:
            gm: the graph of the node.
            node: the node.
            autocast: the nodes that open the autocast regions around it.
            given: node -> its value, where that differs from the graph's.
        """
        if not (autocast or may_decompose(node.target) or _reads_lazily(node)) or changes_state(gm, node):
            return NOTHING
        call = stand_in(gm, node, self.sizes, autocast, given)
        seen = _inside if isinstance(call.target, _torch.OpOverload | BuiltinFunctionType) else _inside_opaque
        return self._calls.ask(call, seen, lambda: NOTHING)


def _inside_opaque(call: Callable[..., Any], *args: Any, **kwargs: Any) -> CallBytes:
    """Measure user code, which may reach real tensors besides its arguments."""
    some: Any = torch.empty(0)
    fakes = FakesOfReals(some.fake_mode)

    def closed(*args: Any, **kwargs: Any) -> Any:
        with fakes:
            return call(*args, **kwargs)

    return _inside(closed, *args, **kwargs)


def _inside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> CallBytes:
    """Measure a call twice: autocast caches the casts of weights in the first, so the difference is their bytes."""
    first = measure_memory(call, *args, **kwargs)
    second = measure_memory(call, *args, **kwargs)
    results = second.end - second.baseline
    given = {storage_key(t): i for i, t in reversed(list(enumerate(tensors((args, kwargs)))))}
    with OpsSeen() as seen:
        yielded = list(tensors(call(*args, **kwargs)))
    aliases = tuple(given.get(storage_key(t)) for t in yielded)
    made = {storage_key(t): storage_bytes(t) for t, of in zip(yielded, aliases, strict=True) if of is None}
    beyond = max(0, results - sum(made.values()))
    unseen = frozenset(name_of(op) for op in seen.ops if allocates_unseen(op))
    casts = first.end - first.baseline - results
    return CallBytes(first.peak - first.end, casts, aliases, beyond, unseen)


def may_decompose(target: object) -> bool:
    """Return whether the dispatcher may see other ops inside a call of ``target``."""
    if isinstance(target, _torch.OpOverload):
        return _known(target)
    return target is not operator.getitem


def _reads_lazily(node: Node) -> bool:
    """Return whether an argument is a lazy conjugate or negative view, which the op may have to materialize."""
    read = (t for n in node.all_input_nodes for t in tensors(value_of(n)))
    return any(t.is_neg() or (t.is_complex() and t.is_conj()) for t in read)


_known = cache(_torch.is_composite)
