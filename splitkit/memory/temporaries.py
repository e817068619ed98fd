"""What an op (``linear``, ``dropout``, a loss) holds for a while inside, beside its results.

A graph of ``torch.export`` or ``symbolic_trace`` names a composite op by one node; when it runs, it is several. It is
run here on fake tensors, which take no memory, and its live bytes are measured like those of a real run.
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
from splitkit.graph.fakecalls import NO_VALUES, CallMemo, acts, stand_in
from splitkit.graph.sizes import storage_bytes
from splitkit.graph.storages import storage_key, tensors
from splitkit.graph.symbols import value_of
from splitkit.memory.measure import measure_memory
from splitkit.memory.watch import FakesOfReals


@dataclass(frozen=True)
class CallBytes:
    """Bytes that a call takes beside its results.

    Attributes:
        transient: at most, until it returns.
        casts: of weights that autocast has cast, and keeps until its region ends.
        gives: for each tensor of the result, which of the tensors among the arguments it shares memory with; ``None``
            where that is not known.
        beyond: of the memory of results, beyond what their values show (`splitkit.memory.kernels`).
    """

    transient: int
    casts: int
    gives: tuple[int | None, ...] | None = None
    beyond: int = 0


NOTHING = CallBytes(0, 0)


@dataclass
class Temporaries:
    """Runs each distinct call once.

    Attributes:
        sizes: symbol -> size, where that is not the one seen at capture.
    """

    sizes: Mapping[str, int]
    _calls: CallMemo[CallBytes] = field(default_factory=CallMemo)

    def __call__(
        self, gm: fx.GraphModule, node: Node, autocast: Sequence[Node], given: Mapping[Node, Any] = NO_VALUES
    ) -> CallBytes:
        """What ``node`` takes in the autocast regions that ``autocast`` opens; nothing where it cannot run on fakes.

        Some nodes may have been ``given`` other values than the graph's.
        """
        if not (autocast or is_composite(node.target) or _reads_lazily(node)) or acts(gm, node):
            return NOTHING
        call = stand_in(gm, node, self.sizes, autocast, given)
        seen = _inside if isinstance(call.target, _torch.OpOverload | BuiltinFunctionType) else _inside_opaque
        return self._calls.ask(call, seen, lambda: NOTHING)


def _inside_opaque(call: Callable[..., Any], *args: Any, **kwargs: Any) -> CallBytes:
    """Code of users may reach real tensors besides its arguments."""
    some: Any = torch.empty(0)
    fakes = FakesOfReals(some.fake_mode)

    def closed(*args: Any, **kwargs: Any) -> Any:
        with fakes:
            return call(*args, **kwargs)

    return _inside(closed, *args, **kwargs)


def _inside(call: Callable[..., Any], *args: Any, **kwargs: Any) -> CallBytes:
    """The second call finds the weights cast already: what the first left beyond it are casts."""
    first = measure_memory(call, *args, **kwargs)
    second = measure_memory(call, *args, **kwargs)
    results = second.end - second.baseline
    given = {storage_key(t): i for i, t in reversed(list(enumerate(tensors((args, kwargs)))))}
    yielded = list(tensors(call(*args, **kwargs)))
    gives = tuple(given.get(storage_key(t)) for t in yielded)
    made = {storage_key(t): storage_bytes(t) for t, of in zip(yielded, gives, strict=True) if of is None}
    beyond = max(0, results - sum(made.values()))
    return CallBytes(first.peak - first.end, first.end - first.baseline - results, gives, beyond)


def is_composite(target: object) -> bool:
    """Whether the dispatcher may see other ops inside a call of ``target``."""
    if isinstance(target, _torch.OpOverload):
        return _known(target)
    return target is not operator.getitem


def _reads_lazily(node: Node) -> bool:
    """Whether an argument is a conjugate or negative view, which the op may have to write out first."""
    read = (t for n in node.all_input_nodes for t in tensors(value_of(n)))
    return any(t.is_neg() or (t.is_complex() and t.is_conj()) for t in read)


_known = cache(_torch.is_composite)
