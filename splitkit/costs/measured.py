"""Costs measured op by op: the graph runs on real inputs, and each op that is new is timed where it stands.

A group is the nodes that call one op with the same shapes, strides, dtypes and other arguments in the same modes; its
first node is measured for all. The arguments are those of a real run, so that indices, labels and masks are valid.
"""

from __future__ import annotations

import operator
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.brief import brief
from splitkit.checks import LONGEST, is_number, shown
from splitkit.costs.cache import CostCache, default_path, environment
from splitkit.costs.copies import Private, copied, find_device, unfit
from splitkit.costs.counting import Flops, flops
from splitkit.costs.keys import is_lasting, key_of
from splitkit.costs.timing import NOTHING, ROUNDS, Record, Run, progress, record
from splitkit.errors import CostError
from splitkit.graph.ambient import SETTINGS, closed_by, opened_by
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import storage_key, tensors

SAVE_EVERY = 5.0  # seconds
MOST_ROUNDS = 9


def measured(
    gm: fx.GraphModule | Dataflow,
    inputs: Any,
    device: torch.device | str = "cpu",
    *,
    cache: str | os.PathLike[str] | bool | None = True,
    min_run_time: float = 0.02,
) -> Measured:
    """Costs by real times on a CPU or a CUDA device.

    Runs the graph once, without autograd, and times the first node of each group on its real arguments: after a
    warm-up, the median, by ``torch.utils.benchmark`` with the threads that torch has now, or by CUDA events. An op that
    writes its arguments gets copies of them each time. On a CPU the graph then runs a few times more, from the same
    state, and each op is timed where it stands: with what its dispatch takes (views too), memory that is given anew and
    arguments that the caches have lost; so the prices of a part's nodes add up to the time that the part takes. A
    graph in which an op acts on the outside world runs once, and keeps the times of the ops alone. Parameters, buffers,
    inputs and random state stay as they are; nothing is copied on a CPU but the inputs and the buffers that the graph
    writes. Memory is that of a run that frees each value after its last use, plus the results and copied arguments of
    one op. On a GPU torch's peak-memory statistics start anew.

    What the numbers leave out: on a GPU, or where the graph may run only once, a view (of any kind that yields the
    memory of an argument and writes nothing) takes 0, and arguments lie in the caches, where a real run may find them
    cold; what autograd and an op's backward cost is not in the graph. An op that acts on the outside world, or of which
    nothing is known, runs once, as in the graph; declare it with `splitkit.extend.declare` to have it measured. A shape
    or branch that depends on data is that of ``inputs``.

    Times are kept in a file by op, shapes, dtypes, modes, device, torch version and threads; a call that finds all of
    them there measures nothing. Ctrl-C keeps what is measured so far. A damaged file is ignored with a warning, and
    rewritten. Functions without a name of their own (lambdas, local ones, those of a script) are not kept.

    Args:
        gm: a graph with ``meta["val"]``, or facts about it.
        inputs: a tuple of positional inputs, a dict of keyword inputs, or one tensor.
        device: where to measure. Parameters and inputs that are elsewhere are copied there, and devices in the graph
            are replaced.
        cache: the file; ``True`` for ``$XDG_CACHE_HOME/splitkit/costs.json``, ``False`` for none.
        min_run_time: seconds for each group, alone and again in place; a group that takes longer runs a few times.

    Raises:
        GraphError: SK101, SK103 or SK104 as `splitkit.analyze`; SK102 when nodes have no ``meta["val"]``.
        CostError: SK321 when there is no such device; SK324 when the graph does not run on these inputs, or
            ``min_run_time`` is not positive.
        FileError: SK504 when the cache is there and cannot be read.
    """
    flow = facts_of(gm)
    counter, where = flops(flow), find_device(device)
    if not is_number(min_run_time) or not 0 < float(min_run_time) <= LONGEST:
        raise CostError("SK324", f"min_run_time is {shown(min_run_time)} seconds", "Give a number above 0.")
    if not isinstance(cache, str | os.PathLike | bool | None):
        raise CostError("SK324", f"cache is {shown(cache)}", "Name a file, or give True or False.")
    path = default_path() if cache is True else Path(cache).expanduser() if cache else None
    kept = CostCache(path, environment(where))
    private = Private(flow, where)
    values = private.inputs(inputs)
    with progress(len(flow.index)) as advance, torch.random.fork_rng(_generators(where)), torch.no_grad():
        dice = torch.random.get_rng_state()
        run = _Run(flow, private, kept, min_run_time, advance)
        with run.safely():
            run.run(*values, enable_io_processing=False)
        del private, values
        if run.keys and not run.acts_outside and where.type == "cpu":
            _time_in_place(run, inputs, dice)
    return Measured(flow.root, where, run.found, counter)


@dataclass(frozen=True)
class Measured:
    """See `measured`; ``device`` is where, ``counter`` counts FLOPs."""

    gm: fx.GraphModule
    device: torch.device
    _records: Mapping[Node, Record] = field(repr=False, compare=False)
    counter: Flops = field(repr=False, compare=False)

    __repr__ = brief

    @property
    def note(self) -> str:
        """What the seconds are, for reports."""
        return f"measured on {self.device}"

    def seconds(self, node: Node) -> float:
        """Median time of the node's group; 0 for inputs, attributes and state ops, and for views on a GPU.

        Raises:
            CostError: SK325 for a node that was not in the graph when it was measured.
        """
        return self._record(node).seconds

    def workspace(self, node: Node) -> int:
        """Most bytes that are allocated at once while the node runs, beyond its inputs and results.

        Raises:
            CostError: SK325 as `seconds`.
        """
        return self._record(node).workspace

    def flops(self, node: Node) -> float:
        """As `splitkit.costs.flops`."""
        return self.counter.flops(node)

    def nbytes(self, node: Node) -> int:
        """Bytes of the node's value."""
        return self.counter.nbytes(node)

    def param_bytes(self, node: Node) -> int:
        """Bytes of the parameters and buffers that the node reads."""
        return self.counter.param_bytes(node)

    def _record(self, node: Node) -> Record:
        if node not in self._records:
            raise CostError(
                "SK325",
                f"{node.name} was not measured: it was not in the graph then",
                "Measure again after editing a graph: splitkit.costs.measured(gm, inputs).",
                [node],
            )
        return self._records[node]


class _Run(fx.Interpreter):
    """Runs the graph on its private values; ``found`` is what each node takes."""

    def __init__(
        self, flow: Dataflow, private: Private, cache: CostCache, min_run_time: float, advance: Callable[[], None]
    ) -> None:
        super().__init__(flow.root)
        self.extra_traceback = False
        self.flow, self.private, self.cache = flow, private, cache
        self.min_run_time, self.advance = min_run_time, advance
        self.found: dict[Node, Record] = {}
        self.keys: dict[Node, str] = {}  # of the ops that are measured in this call
        self.acts_outside = False
        self._passing: dict[str, Record] = {}  # of ops whose keys mean nothing to another process, and of views
        self._new: set[str] = set()
        self._open: dict[Node, Any] = {}  # regions, with their handles
        self._saved = time.monotonic()

    @contextmanager
    def safely(self) -> Iterator[None]:
        """Keep what is measured and restore the ambient state, whatever happens."""
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
        """Run ``n`` and note what it takes."""
        self.found[n] = NOTHING
        try:
            if is_state_op(n):
                result = self._set_state(n)
            elif n.op.startswith("call_") and n.target is not operator.getitem:
                result = self._measured(n)
            else:
                result = super().run_node(n)
        except Exception as error:
            raise unfit(f"{n.name} ({_torch.target_name(n)}) fails on them: {error}", n) from error
        self.advance()
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The private copy of an attribute."""
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
        key = key_of(n, callee, args, kwargs)
        effects = self.flow.effects[n]
        outside = effects.impure or effects.ambient
        self.acts_outside |= outside
        known = self.cache.get(key) or self._passing.get(key)
        if known is None or key in self._new:
            self.keys[n] = key
            self._new.add(key)
        if known is not None:
            self.found[n] = known
            return _call(n, callee, args, kwargs)()
        writes = bool(effects.writes) and not outside
        given = copied((args, kwargs)) if writes else (args, kwargs)
        start = time.perf_counter()
        result = _call(n, callee, args, kwargs)()
        found = Record(time.perf_counter() - start, 0)
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
            args, kwargs = copied(given) if writes else given
            return _call(n, callee, args, kwargs)

        with torch.random.fork_rng(_generators(self.private.device)):
            return record(prepare, self.private.device, writes, self.min_run_time)

    def keep(self, n: Node, key: str, found: Record) -> None:
        """Remember what a node takes, for others of its group and other calls too."""
        self.found[n] = found
        if not is_lasting(key):
            self._passing[key] = found
            return
        self.cache.put(key, found)
        if time.monotonic() - self._saved > SAVE_EVERY:
            self.cache.save()
            self._saved = time.monotonic()


class _Again(_Run):
    """Runs the graph once more, and times the ops of a run where they stand."""

    def __init__(self, run: _Run, samples: dict[str, list[float]]) -> None:
        private = Private(run.flow, run.private.device)
        super().__init__(run.flow, private, run.cache, run.min_run_time, lambda: None)
        self._asked, self._samples = run.keys, samples

    def _measured(self, n: Node) -> Any:
        args, kwargs = self.private.moved(self.fetch_args_kwargs_from_env(n))
        call = _call(n, self.private.module(str(n.target)) if n.op == "call_module" else n.target, args, kwargs)
        start = time.perf_counter()
        result = call()
        took = time.perf_counter() - start
        if (key := self._asked.get(n)) is not None:
            self._samples.setdefault(key, []).append(took)
        return result


def _time_in_place(run: _Run, inputs: Any, dice: torch.Tensor) -> None:
    """What ops take among the others: dispatch, memory that is given anew, arguments that the caches have lost.

    The graph runs some times more, always from the same state; the median of a group's times is its price. Views are
    priced too.

    Args:
        run: the first run.
        inputs: as they were given.
        dice: the state of the random generator before it.
    """
    samples: dict[str, list[float]] = {}
    rounds, end = 0, time.perf_counter() + run.min_run_time * len(set(run.keys.values()))
    while rounds < ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() < end):
        torch.random.set_rng_state(dice)
        again = _Again(run, samples)
        with again.safely():
            again.run(*again.private.inputs(inputs), enable_io_processing=False)
        rounds += 1
    for node, key in run.keys.items():
        run.keep(node, key, Record(statistics.median(samples[key]), run.found[node].workspace))
    run.cache.save()


def _call(n: Node, callee: Any, args: Any, kwargs: Any) -> Run:
    if n.op == "call_method":
        return partial(getattr(args[0], callee), *args[1:], **kwargs)
    return partial(callee, *args, **kwargs)


def _is_view(result: Any, given: Any) -> bool:
    found = [storage_key(t) for t in tensors(result)]
    return bool(found) and {storage_key(t) for t in tensors(given)}.issuperset(found)


def _generators(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
