"""Run a graph once and time each op on its real arguments; hold the prices that result."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.costs.formulas.flop_count import CountedCosts, Flops
from splitkit.costs.timing.cache import CostCache
from splitkit.costs.timing.call_timing import NOTHING, Record, Run, time_call
from splitkit.costs.timing.cpu_time import OwnTime
from splitkit.costs.timing.op_keys import is_lasting, key_of
from splitkit.costs.timing.run_inputs import Private, copy_tensors, unfit_inputs_error
from splitkit.errors import CostError
from splitkit.graph.ambient import SETTINGS, closed_by, opened_by
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import storage_key, tensors
from splitkit.short_repr import brief

SAVE_EVERY = 5.0  # seconds between writes of the cache: what a crash may lose; the value was not measured
BUSY = ", which was busy with other work: the prices may be too high"


@dataclass(frozen=True)
class Measured(CountedCosts):
    """The costs of `splitkit.costs.measured`, on ``device``; ``counter`` counts FLOPs."""

    gm: fx.GraphModule
    device: torch.device
    _records: Mapping[Node, Record] = field(repr=False, compare=False)
    counter: Flops = field(repr=False, compare=False)

    __repr__ = brief

    @property
    def note(self) -> str:
        """What the seconds are, for reports."""
        return f"measured on {self.device}{BUSY if self.busy else ''}"

    @property
    def busy(self) -> bool:
        """Whether the machine was busy with other work at every attempt: prices may be too high and are not cached."""
        return any(record.busy for record in self._records.values())

    def seconds(self, node: Node) -> float:
        """Median time of the node's group; 0 for inputs, attributes and state ops, and for views on a GPU.

        Raises:
            CostError: SK325 for a node that was not in the graph when it was measured.
        """
        return self._record(node).seconds

    def workspace(self, node: Node) -> int:
        """Peak bytes allocated while the node runs, beyond its inputs and results.

        Raises:
            CostError: SK325 as `seconds`.
        """
        return self._record(node).workspace

    def _record(self, node: Node) -> Record:
        if node not in self._records:
            raise CostError(
                "SK325",
                f"{node.name} was not measured: it was not in the graph then",
                "Measure again after editing a graph: splitkit.costs.measured(gm, inputs).",
                [node],
            )
        return self._records[node]


class MeasuringRun(fx.Interpreter):
    """Interpreter that runs the graph on private values and times its ops.

    Attributes:
        found: node -> its record.
        keys: node -> key, of the ops that are measured in this run.
        every: node -> key, of all ops.
        acts_outside: whether an op acts on the outside world.
    """

    def __init__(
        self, flow: Dataflow, private: Private, cache: CostCache, min_run_time: float, advance: Callable[[], None]
    ) -> None:
        super().__init__(flow.root)
        self.extra_traceback = False
        self.flow, self.private, self.cache = flow, private, cache
        self.min_run_time, self.advance = min_run_time, advance
        self.found: dict[Node, Record] = {}
        self.keys: dict[Node, str] = {}
        self.every: dict[Node, str] = {}
        self.acts_outside = False
        self._passing: dict[str, Record] = {}  # key -> record that is not cached in the file
        self._new: set[str] = set()  # keys that were first measured in this run
        self._open: dict[Node, Any] = {}  # enter node of an open region -> its handle
        self._saved = time.monotonic()

    @contextmanager
    def safely(self) -> Iterator[None]:
        """Save the measurements and restore the ambient state, even after an error."""
        before = {name: setting.get() for name, setting in SETTINGS.items()}
        try:
            yield
        finally:
            for enter, handle in reversed(self._open.items()):
                kind = opened_by(enter)
                assert kind is not None
                kind.exit(*[handle] if kind.handle else [])
            for name, value in before.items():
                SETTINGS[name].set(value)
            self.cache.save()

    def run_node(self, n: Node) -> Any:
        """Run ``n`` and note its record."""
        self.found[n] = NOTHING
        try:
            if is_state_op(n):
                result = self._set_state(n)
            elif n.op.startswith("call_") and n.target is not operator.getitem:
                result = self._measured(n)
            else:
                result = super().run_node(n)
        except Exception as error:
            raise unfit_inputs_error(f"{n.name} ({_torch.target_name(n)}) fails on them: {error}", n) from error
        self.advance()
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Return the private copy of an attribute."""
        return self.private.attribute(str(target))

    def _set_state(self, n: Node) -> Any:
        result = super().run_node(n)
        if opened_by(n):
            self._open[n] = result
        elif kinds := closed_by(n):
            handles = n.all_input_nodes
            self._open.pop(handles[0] if handles else next(r for r in reversed(self._open) if opened_by(r) in kinds))
        return result

    def _measured(self, n: Node) -> Any:
        args, kwargs = self.private.moved(self.fetch_args_kwargs_from_env(n))
        callee = self.private.module(str(n.target)) if n.op == "call_module" else n.target
        key = self.every[n] = key_of(n, callee, args, kwargs)
        effects = self.flow.effects[n]
        outside = effects.impure or effects.ambient
        self.acts_outside |= outside
        known = self.known(key)
        if known is None or key in self._new:
            self.keys[n] = key
            self._new.add(key)
        if known is not None:
            self.found[n] = known
            return bound_call(n, callee, args, kwargs)()
        writes = bool(effects.writes) and not outside
        given = copy_tensors((args, kwargs)) if writes else (args, kwargs)
        clock = OwnTime()
        start = clock.now()
        result = bound_call(n, callee, args, kwargs)()
        found = Record(clock.now() - start, 0, clock.is_busy())
        if not outside:
            found = NOTHING if not writes and _is_view(result, given) else self._timed(n, given, writes)
        if found is NOTHING and self.private.device.type == "cpu":
            self._passing[key] = found  # until it is timed in place
        else:
            self.keep(n, key, found)
        return result

    def _timed(self, n: Node, given: Any, writes: bool) -> Record:
        callee = self.private.module(str(n.target), anew=True) if n.op == "call_module" else n.target

        def prepare() -> Run:
            args, kwargs = copy_tensors(given) if writes else given
            return bound_call(n, callee, args, kwargs)

        with torch.random.fork_rng(random_devices(self.private.device)):
            return time_call(prepare, self.private.device, writes, self.min_run_time)

    def keep(self, n: Node, key: str, found: Record) -> None:
        """Remember the record of a node, also for the other nodes of its group and for later calls."""
        self.found[n] = found
        self.remember(key, found)

    def known(self, key: str) -> Record | None:
        """Return the record that is remembered under a key."""
        return self.cache.get(key) or self._passing.get(key)

    def remember_for_now(self, key: str, found: Record) -> None:
        """Keep a record for this call only."""
        self._passing[key] = found

    def remember(self, key: str, found: Record) -> None:
        """Remember a record, also for later calls if its key is valid in other processes."""
        if not is_lasting(key):
            self._passing[key] = found
            return
        self.cache.put(key, found)
        if time.monotonic() - self._saved > SAVE_EVERY:
            self.cache.save()
            self._saved = time.monotonic()


def bound_call(n: Node, callee: Any, args: Any, kwargs: Any) -> Run:
    """Return a function without arguments that makes the call of a node."""
    if n.op == "call_method":
        return partial(getattr(args[0], callee), *args[1:], **kwargs)
    return partial(callee, *args, **kwargs)


def _is_view(result: Any, given: Any) -> bool:
    found = [storage_key(t) for t in tensors(result)]
    return bool(found) and {storage_key(t) for t in tensors(given)}.issuperset(found)


def random_devices(device: torch.device) -> list[torch.device]:
    """Return the devices besides the CPU whose RNG state a run may change."""
    return [device] if device.type == "cuda" else []
