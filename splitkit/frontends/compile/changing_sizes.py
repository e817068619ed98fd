"""Keep budgets in bytes when sizes change: recompile the code, with a new plan, before a plan exceeds its budget.

A graph with symbolic sizes runs for many sizes, but its plan is made for those of the first call. A simulation finds up
to which sizes the plan stays within the budget, and that becomes a guard of the compiled code::

    x: [4, s0, 32], planned for s0 = 72, within the budget up to s0 = 95       guard: s0 <= 95
    called with s0 = 120                                                       compiled again, planned for 120

Training never stops for that. If no plan is within the budget at the new sizes, the plan with the lowest peak that was
found runs, with a warning that says by how many bytes it exceeds the budget. A plan for sizes that cannot be guarded
runs with the same warning.
"""

from __future__ import annotations

import warnings
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext  # current_compile_id: 2.11, 2.13, 2.15

from splitkit.checks import shown
from splitkit.costs import Costs, default
from splitkit.engine.pair import Pair
from splitkit.errors import NoPlanError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.storages import value_of
from splitkit.memory.profile import simulate_memory
from splitkit.plans.policy import PolicyLike, as_plan
from splitkit.plans.record import Plan
from splitkit.training.flow import JointFlow, as_joint
from splitkit.training.peaks import Peaks
from splitkit.units import size

_HEADROOM = 1.5
"""A recompiled graph is planned as if its activations were this many times larger, so that sizes can grow without
another compilation. Not tuned."""
_FACTORS = [2 ** (step / 16) for step in range(6 * 16 + 1)]
"""Sizes that are tried for the largest within the budget: up to 64 times the sizes of the call, in steps of 4.4 %."""


@dataclass
class CompileHistory:
    """What a backend remembers about the code that it has planned.

    Attributes:
        sizes: number of a Dynamo frame -> for each graph of the frame, symbol -> the largest size its guard allows.
        has_warned: whether the user was warned of an exceeded budget.
    """

    sizes: dict[int, list[Mapping[str, int]]] = field(default_factory=dict)
    has_warned: bool = False

    def policy(self, policy: PolicyLike) -> GraphPolicy:
        """Return the policy for the graph that is being compiled."""
        frame, count = _compiled_now()
        known = self.sizes.get(frame)
        is_last = count + 1 >= torch._dynamo.config.recompile_limit  # 2.11, 2.13, 2.15
        return GraphPolicy(policy, self, frame, known is not None, is_last)

    def warn(self, text: str) -> None:
        """Warn, once, that the budget is exceeded."""
        if not self.has_warned:
            warnings.warn(text, stacklevel=2)
        self.has_warned = True


@dataclass
class GraphPolicy:
    """A policy for one graph that torch.compile makes, which may be a recompilation.

    Attributes:
        policy: the user's policy.
        known: the history of the backend.
        frame: the number of the Dynamo frame.
        is_again: whether a graph of this frame was planned before; then a plan over the budget is not refused.
        is_last: whether Dynamo will not recompile the frame; then this graph must serve all later sizes.
        limit: the limit of the plan in bytes; ``None`` if the policy has none.
    """

    policy: Any
    known: CompileHistory
    frame: int
    is_again: bool
    is_last: bool
    limit: int | None = None

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return the plan of the policy; for a recompiled graph that fits no plan, the nearest one that was found."""
        joint = as_joint(self, flow)
        with suppress(NoPlanError):  # `as_plan` raises it again
            self.limit = self.policy.limit(joint) if hasattr(self.policy, "limit") else None
        if not self.is_again:
            return as_plan(self.policy, joint, costs)
        wanted, left = self._with_headroom(joint)
        try:
            return as_plan(wanted, joint, costs)
        except NoPlanError as refusal:
            if not isinstance(refusal.nearest, Plan):
                raise
            excess = refusal.excess - left
            if excess > 0:
                self.known.warn(
                    f"the model is compiled again, for other inputs, and no plan for them is within the budget: the "
                    f"plan with the least memory that was found is used, {size(excess)} ({excess} bytes) over it"
                )
            return refusal.nearest

    def costs(self, make: Callable[[fx.GraphModule], Costs], joint: fx.GraphModule) -> Costs:
        """Return the costs of a graph; FLOPs if it is a recompilation and the user's cost model fails on it."""
        try:
            return make(joint)
        except Exception as error:
            if not self.is_again:
                raise
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            warnings.warn(
                f"the model is compiled again, for other inputs, and costs={shown(make)} fails on its graph ({text}): "
                "its nodes are priced by FLOPs",
                stacklevel=2,
            )
            return default(joint)

    def _with_headroom(self, flow: JointFlow) -> tuple[PolicyLike, int]:
        """Return the policy that plans for sizes that may grow, and how many bytes of the budget it leaves for that."""
        if self.limit is None or not _symbols(flow.graph):
            return self.policy, 0
        # What is alive throughout the step, such as parameters, is taken not to grow with the sizes.
        held = Peaks(flow).baseline(()) if self.policy.of == "peak" else 0
        asked = 0 if self.is_last else max(0, held + int((self.limit - held) / _HEADROOM))
        return self.policy.within(asked), self.limit - asked

    def guard(self, pair: Pair) -> SizeWatch | None:
        """Guard the code by the largest sizes within the budget; return a `SizeWatch` if no guard is possible."""
        graphs = self.known.sizes.setdefault(self.frame, [])
        symbols = _symbols(pair.forward.graph)
        if self.limit is None or not symbols:
            return None
        hints = {name: int(symbol.node.hint) for name, symbol in symbols.items()}  # SymNode.hint: 2.11, 2.13, 2.15
        is_free = all(map(_is_free, symbols.values()))
        # Each graph of a frame serves a range of sizes: from above those of earlier graphs up to its own limit.
        for before in graphs if is_free else ():
            _guard_above(symbols, hints, before)
        watch = SizeWatch(pair, self.policy.of, self.limit, self.known, {})
        if watch.excess(hints) > 0:
            return None  # `assign` has warned
        watch.most = _most(watch, hints)
        if self.is_last or not is_free:
            return watch
        for name, symbol in symbols.items():
            assert bool(symbol <= watch.most[name])  # a guard
        graphs.append(watch.most)
        return None


@dataclass
class SizeWatch:
    """Watches the sizes that a graph without a guard is called with.

    Attributes:
        pair: the halves of the graph.
        of: what is limited: ``"peak"`` or ``"saved"``.
        limit: the limit in bytes.
        known: the history of the backend, which warns.
        most: symbol -> the largest size at which the plan is within the budget.
    """

    pair: Pair
    of: str
    limit: int
    known: CompileHistory
    most: Mapping[str, int]

    def excess(self, sizes: Mapping[str, int]) -> int:
        """Return by how many bytes the plan exceeds the budget at these sizes; negative if it is within."""
        pair = self.pair
        found = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs, sizes=sizes)
        return int(getattr(found, self.of)) - self.limit

    def watching(self, gm: fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return the compiled graph with a warning at its first call with sizes that exceed the budget."""
        places: dict[str, tuple[int, int | None]] = {}  # the first of each
        for position, dim, one in _sizes(gm.graph):
            places.setdefault(str(one.node.expr), (position, dim))
        seen: set[tuple[int, ...]] = set()

        def watched(*args: Any) -> Any:
            if not self.known.has_warned:
                sizes = {name: int(args[i] if dim is None else args[i].shape[dim]) for name, (i, dim) in places.items()}
                key = tuple(sizes.values())
                if key not in seen and any(sizes[name] > most for name, most in self.most.items() if name in sizes):
                    seen.add(key)
                    self._look(sizes)
            return compiled(*args)

        return watched

    def _look(self, sizes: Mapping[str, int]) -> None:
        if (excess := self.excess(sizes)) > 0:
            shown = ", ".join(f"{name} = {number}" for name, number in sizes.items())
            self.known.warn(
                f"at these sizes ({shown}) the plan is {size(excess)} ({excess} bytes) over the budget, and "
                "torch.compile cannot plan anew: raise torch._dynamo.config.recompile_limit, or widen the bounds of "
                "torch._dynamo.mark_dynamic"
            )


def _compiled_now() -> tuple[int, int]:
    """Return the number of the frame that Dynamo is compiling, and how often it was compiled before."""
    found = CompileContext.current_compile_id()
    if found is None or found.frame_id is None or found.frame_compile_id is None:
        return -1, 0
    return found.frame_id, found.frame_compile_id


def _sizes(graph: fx.Graph) -> Iterator[tuple[int, int | None, torch.SymInt]]:
    """Yield the symbolic sizes of inputs: position, dimension (``None`` for an input that is itself a size), size."""
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        value = value_of(node)
        for dim, one in enumerate(value.shape) if isinstance(value, torch.Tensor) else [(None, value)]:
            if isinstance(one, torch.SymInt):
                yield i, dim, one


def _symbols(graph: fx.Graph) -> dict[str, torch.SymInt]:
    """Return symbol name -> size, for the symbolic sizes of the inputs of a graph that have a value in the example."""
    found: dict[str, torch.SymInt] = {}
    for _, _, one in _sizes(graph):
        if one.node.expr.is_Symbol and one.node.hint is not None:  # SymNode.expr, .hint: 2.11, 2.13, 2.15
            found.setdefault(str(one.node.expr), one)
    return found


def _is_free(symbol: torch.SymInt) -> bool:
    """Return whether a guard may bound a symbol: it has no bounds yet, as ``mark_dynamic(x, 0, max=64)`` sets them."""
    # 2 is the default lower bound of a symbol, and an upper bound of 2**48 or more is taken for none.
    known = symbol.node.shape_env.var_to_range[symbol.node.expr]  # 2.11, 2.13, 2.15
    return bool(known.lower <= 2) and not (known.upper.is_number and known.upper < 2**48)


def _most(watch: SizeWatch, hints: Mapping[str, int]) -> Mapping[str, int]:
    """Return the largest sizes, in proportion to ``hints``, at which a plan is within the budget."""

    def scaled(by: float) -> dict[str, int]:
        return {name: int(hint * by) for name, hint in hints.items()}

    # Memory grows with sizes, and the sizes of the call, by which the factors begin, are within the budget.
    over = bisect(_FACTORS, False, 1, key=lambda by: watch.excess(scaled(by)) > 0)
    return scaled(_FACTORS[over - 1])


def _guard_above(symbols: Mapping[str, torch.SymInt], hints: Mapping[str, int], most: Mapping[str, int]) -> None:
    """Guard against the sizes of an earlier graph, which serves them: Dynamo tries the graph it called last first."""
    if symbols.keys() != most.keys() or not any(hints[name] > most[name] for name in most):
        return
    above = reduce(or_, (symbol > most[name] for name, symbol in symbols.items()))
    assert bool(above)  # a guard
