"""Budgets in bytes when sizes change: code is compiled again, and planned anew, before its plan exceeds the budget.

A graph with symbolic sizes runs for many sizes, and its plan is made for those that it is first called with. Up to
which sizes the plan stays within the budget is simulated, and becomes a guard of the compiled code::

    x: [4, s0, 32], planned for s0 = 72, within the budget up to s0 = 95       guard: s0 <= 95
    called with s0 = 120                                                       compiled again, planned for 120

Training never stops for that. Where no plan is within the budget at the new sizes, the one with the least that was
found runs, with a warning that says how many bytes it is over; and so does a plan for sizes without a guard.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx
from torch._guards import CompileContext  # current_compile_id: 2.11, 2.13, 2.15

from splitkit.checks import shown
from splitkit.costs import Costs, default
from splitkit.engine.pair import Pair
from splitkit.errors import NoPlanError
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.symbols import value_of
from splitkit.memory.profile import simulate_memory
from splitkit.plans.policy import Policy, PolicyLike, as_plan
from splitkit.plans.record import Plan
from splitkit.training.flow import JointFlow, as_joint
from splitkit.training.peaks import Peaks
from splitkit.units import size

_ROOM = 1.5
"""A graph that is compiled again is planned with room: as if sizes, and so activations, were that much larger."""
_DOUBLINGS, _HALVINGS = 6, 4
"""Simulations that find up to which sizes a plan is within the budget: up to 64 times the sizes, to 6 %."""


@runtime_checkable
class Limited(Policy, Protocol):
    """A policy that holds plans to a number of bytes, such as `splitkit.policies.Budget`.

    Attributes:
        of: what it bounds: ``"peak"`` or ``"saved"``.
    """

    of: Any

    def limit(self, flow: JointFlow) -> int | None:
        """The bytes that a plan for this graph is held to whatever its sizes are; ``None`` if that depends on them."""
        ...

    def within(self, nbytes: int) -> Policy:
        """The same policy with this budget."""
        ...


@dataclass
class Recompiled:
    """What a backend remembers of the code that it has planned.

    Attributes:
        sizes: number of a frame of Dynamo's -> for each of its graphs the sizes that it is guarded by, by symbol.
        has_warned: whether users were told of a budget that is exceeded.
    """

    sizes: dict[int, list[Mapping[str, int]]] = field(default_factory=dict)
    has_warned: bool = False

    def policy(self, policy: PolicyLike) -> HeldPolicy:
        """The policy for the graph that is compiled now."""
        frame, count = _compiled_now()
        known = self.sizes.get(frame)
        is_last = count + 1 >= torch._dynamo.config.recompile_limit  # 2.11, 2.13, 2.15
        return HeldPolicy(policy, self, frame, known is not None, is_last)

    def warn(self, text: str) -> None:
        """Tell users, once, that the budget is exceeded."""
        if not self.has_warned:
            warnings.warn(text, stacklevel=2)
        self.has_warned = True


@dataclass
class HeldPolicy:
    """A policy for one graph that torch.compile makes, perhaps not the first of its code.

    Attributes:
        policy: what decides.
        known: what is known of the code.
        frame: the number of the code.
        is_again: whether a graph of this code was planned before: then its plan is not refused.
        is_last: whether Dynamo compiles the code no more: then this graph must do for all sizes to come.
        limit: bytes that the plan is held to; ``None`` if the policy names none.
    """

    policy: PolicyLike
    known: Recompiled
    frame: int
    is_again: bool
    is_last: bool
    limit: int | None = None

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """The plan of the policy; of a graph that is compiled again, at worst the nearest that was found."""
        joint = as_joint(self, flow)
        if isinstance(self.policy, Limited):
            self.limit = _limit(self.policy, joint)
        if not self.is_again:
            return as_plan(self.policy, joint, costs)
        wanted, asked = self._with_room(joint)
        try:
            return as_plan(wanted, joint, costs)
        except NoPlanError as refusal:
            if not isinstance(refusal.nearest, Plan):
                raise
            excess = refusal.excess + (0 if self.limit is None else asked - self.limit)
            if excess > 0:
                self.known.warn(
                    f"the model is compiled again, for other inputs, and no plan for them is within the budget: the "
                    f"one with the least memory that was found runs, {size(excess)} ({excess} bytes) over it"
                )
            return refusal.nearest

    def costs(self, make: Callable[[fx.GraphModule], Costs], joint: fx.GraphModule) -> Costs:
        """Prices of a graph; by FLOPs where its code was planned before, and no others can be made of it."""
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

    def _with_room(self, flow: JointFlow) -> tuple[PolicyLike, int]:
        """The policy that plans for sizes that may grow, and its bytes."""
        if self.limit is None or not isinstance(self.policy, Limited) or not _symbols(flow.graph):
            return self.policy, self.limit or 0
        held = Peaks(flow).baseline(()) if self.policy.of == "peak" else 0
        asked = 0 if self.is_last else max(0, held + int((self.limit - held) / _ROOM))
        return self.policy.within(asked), asked

    def guard(self, pair: Pair) -> SizeWatch | None:
        """Guard the compiled code by the sizes up to which its plan is within the budget; what watches it if no guard
        can.
        """
        graphs = self.known.sizes.setdefault(self.frame, [])
        symbols = _symbols(pair.forward.graph)
        if self.limit is None or not symbols or not isinstance(self.policy, Limited):
            return None
        hints = {name: int(symbol.node.hint) for name, symbol in symbols.items()}  # SymNode.hint: 2.11, 2.13, 2.15
        is_free = all(map(_is_free, symbols.values()))
        for before in graphs if is_free else ():
            _guard_above(symbols, hints, before)
        watch = SizeWatch(pair, self.policy.of, self.limit, self.known, {})
        if watch.excess(hints) > 0:
            return None  # users know
        watch.most = _most(watch, hints)
        if self.is_last or not is_free:
            return watch
        for name, symbol in symbols.items():
            assert bool(symbol <= watch.most[name])  # a guard
        graphs.append(watch.most)
        return None


@dataclass
class SizeWatch:
    """Looks at the sizes that a graph without a guard is called with.

    Attributes:
        pair: the halves of the graph.
        of: what is bounded.
        limit: by how many bytes.
        known: who tells users.
        most: sizes up to which the plan is within the budget, by symbol.
    """

    pair: Pair
    of: str
    limit: int
    known: Recompiled
    most: Mapping[str, int]

    def excess(self, sizes: Mapping[str, int]) -> int:
        """How many bytes the plan is over the budget at these sizes; negative if it is within."""
        pair = self.pair
        found = simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs, sizes=sizes)
        return int(getattr(found, self.of)) - self.limit

    def watching(self, gm: fx.GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph, with a warning when it is first called with sizes that take it over the budget."""
        places = _places(gm)
        seen: set[tuple[int, ...]] = set()

        def watched(*args: Any) -> Any:
            if not self.known.has_warned:
                sizes = {name: _at(args, place) for name, place in places.items()}
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
    """The number of the code that Dynamo compiles, and how often it has compiled it before."""
    found = CompileContext.current_compile_id()
    if found is None or found.frame_id is None or found.frame_compile_id is None:
        return -1, 0
    return found.frame_id, found.frame_compile_id


def _limit(policy: Limited, flow: JointFlow) -> int | None:
    try:
        return policy.limit(flow)
    except NoPlanError:  # which `assign` says in its turn
        return None


def _symbols(graph: fx.Graph) -> dict[str, torch.SymInt]:
    """The sizes of the inputs of a graph that are symbols seen in the example, by name."""
    found: dict[str, torch.SymInt] = {}
    for node in graph.find_nodes(op="placeholder"):
        value = value_of(node)
        for one in value.shape if isinstance(value, torch.Tensor) else [value]:
            # SymNode.expr, .hint: 2.11, 2.13, 2.15
            if isinstance(one, torch.SymInt) and one.node.expr.is_Symbol and one.node.hint is not None:
                found.setdefault(str(one.node.expr), one)
    return found


def _is_free(symbol: torch.SymInt) -> bool:
    """Whether a guard may bound it: nobody has stated bounds of it, as ``mark_dynamic(x, 0, min=2, max=64)`` does."""
    known = symbol.node.shape_env.var_to_range[symbol.node.expr]  # 2.11, 2.13, 2.15
    return bool(known.lower <= 2) and not (known.upper.is_number and known.upper < 2**48)


def _most(watch: SizeWatch, hints: Mapping[str, int]) -> Mapping[str, int]:
    """The largest sizes, in the proportion of these, at which a plan is within the budget."""

    def scaled(by: float) -> dict[str, int]:
        return {name: int(hint * by) for name, hint in hints.items()}

    low, high = 1.0, 2.0
    for _ in range(_DOUBLINGS):
        if watch.excess(scaled(high)) > 0:
            break
        low, high = high, 2 * high
    else:
        return scaled(low)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if watch.excess(scaled(middle)) > 0 else (middle, high)
    return scaled(low)


def _guard_above(symbols: Mapping[str, torch.SymInt], hints: Mapping[str, int], most: Mapping[str, int]) -> None:
    """Leave the sizes of an earlier graph to that: Dynamo asks the graph that it called last first."""
    if symbols.keys() != most.keys() or not any(hints[name] > most[name] for name in most):
        return
    above = reduce(or_, (symbol > most[name] for name, symbol in symbols.items()))
    assert bool(above)  # a guard


def _places(gm: fx.GraphModule) -> dict[str, tuple[int, int | None]]:
    """Symbol -> which input of a graph of Dynamo's it is, and which of its sizes; ``None`` if it is the input."""
    found: dict[str, tuple[int, int | None]] = {}
    for i, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        value = value_of(node)
        if isinstance(value, torch.SymInt):
            found.setdefault(str(value.node.expr), (i, None))
        elif isinstance(value, torch.Tensor):
            sizes: Sequence[Any] = value.shape
            for dim, one in enumerate(sizes):
                if isinstance(one, torch.SymInt):
                    found.setdefault(str(one.node.expr), (i, dim))
    return found


def _at(args: Sequence[Any], place: tuple[int, int | None]) -> int:
    position, dim = place
    return int(args[position] if dim is None else args[position].shape[dim])
