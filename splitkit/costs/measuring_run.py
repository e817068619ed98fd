"""Measure costs op by op: the graph runs several times on real inputs, and each op is timed in place.

Nodes that call one op with the same shapes, strides, dtypes and other arguments in the same modes form a group, whose
nodes have one price. The arguments are those of a real run, so that indices, labels and masks are valid.
"""

from __future__ import annotations

import operator
import resource
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.checks import LONGEST, is_number, shown
from splitkit.costs.flop_formulas import CountedCosts, Flops, flops
from splitkit.costs.run_inputs import Private, measuring_device, unfit_inputs_error
from splitkit.costs.training import FromOps
from splitkit.errors import CostError
from splitkit.graph.ambient import SETTINGS, closed_by, opened_by
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.joint_marks import is_joint
from splitkit.graph.losses import loss_of
from splitkit.graph.node_values import Gradients
from splitkit.graph.scope import is_state_op
from splitkit.graph.shards import collective_group
from splitkit.graph.shared_memory import memory_classes
from splitkit.graph.storages import storage_key, tensors
from splitkit.short_repr import brief

_BUSY = ", which was busy with other work: the prices may be too high"
ROUNDS = 3
"""The least number of runs that are timed."""
MOST_ROUNDS = 9
"""The most runs that are timed, however long each takes to settle."""

Seconds = tuple[float, float]
"""Seconds of forward and of backward."""
_Times = tuple[Mapping[Node, float], Mapping[Node, float]]
"""Node -> its seconds in forward, and the same of backward."""


def measured(
    gm: fx.GraphModule | Dataflow,
    inputs: Any,
    device: torch.device | str = "cpu",
    *,
    min_run_time: float = 0.02,
    backward: bool = False,
) -> Measured | MeasuredSteps:
    """Return costs by real times on a CPU or a CUDA device.

    **Forward.** The graph runs several times without autograd, and each op is timed in place: with the clock on a CPU,
    with CUDA events on a GPU. A first run warms up and measures the workspace of each op. On a CPU, times include
    dispatch (also of views), newly allocated memory and arguments that are no longer in the caches. For each group, the
    run with the least mean counts, since other work on the machine only adds time. Thus the prices of the nodes of a
    part add up to the time of the part. A graph with an op that has effects outside the graph runs only once, and its
    workspaces are not measured.

    Parameters, buffers, inputs and random state are not changed. On a CPU nothing is copied but the inputs and the
    buffers that the graph writes. The memory needed is that of a run that frees each value after its last use. On a
    GPU, torch's peak-memory statistics are reset.

    **Not included.** On a GPU, a view costs 0 (any op that returns the memory of an argument and writes nothing).
    Without ``backward``, the costs of autograd and of an op's backward are missing. An op that is unknown, or has
    effects outside the graph, runs once, as in the graph; declare it with `splitkit.extend.declare` to have the graph
    measured more often. Data-dependent shapes and branches are those of ``inputs``.

    **Backward.** With ``backward``, the runs are steps of forward and backward, and prices include both. They start
    from the outputs that are losses (a single number that requires grad), or from all outputs that require grad if none
    is. The time of forward includes autograd's work, the time of backward an op's gradients and their summation. If no
    step writes what the next one reads, a step reuses the memory of the step before. No parameter gets a gradient; the
    memory needed is what such a step takes. Without ``backward``, `splitkit.costs.training` estimates it op by op.

    **Busy machines.** Other work on the machine makes times too long. Therefore only runs count that, as the operating
    system reports, waited for a CPU for at most 5 % of their time, and runs are repeated until there is one. If there
    is none, the prices have ``busy`` set, and ``note`` says so. If torch uses one thread, such prices are still nearly
    right, since the time of other processes is left out; with several threads, they are the least times of all runs.

    Args:
        gm: a graph with ``meta["val"]``, or facts about it.
        inputs: a tuple of positional inputs, a dict of keyword inputs, or one tensor.
        device: where to measure. Parameters and inputs on other devices are copied there, and devices in the graph
            are replaced.
        min_run_time: seconds for each group; there are at least three runs, and at most nine.
        backward: whether to measure backward too; only on a CPU and if the graph may run more than once.

    Raises:
        GraphError: SK101, SK103 or SK104 as `splitkit.analyze`; SK102 if nodes have no ``meta["val"]``.
        CostError: SK321 if the device does not exist; SK324 if the graph does not run on these inputs, or cannot be
            measured in the requested way.
    """
    flow = facts_of(gm)
    if not isinstance(backward, bool):
        raise CostError("SK324", f"backward is {shown(backward)}", "Give True or False.")
    counter, where = flops(flow), measuring_device(device)
    if not is_number(min_run_time) or not 0 < float(min_run_time) <= LONGEST:
        raise CostError("SK324", f"min_run_time is {shown(min_run_time)} seconds", "Give a number above 0.")
    if backward:
        require_steps(flow, where)
    _require_no_collectives(flow)
    on_gpu = where.type == "cuda"
    chosen: AbstractContextManager[Any] = torch.cuda.device(where) if on_gpu else nullcontext()
    with progress(1 + MOST_ROUNDS) as advance, torch.random.fork_rng([where] if on_gpu else []), chosen:
        runs = MeasuredRuns(flow, where, inputs, backward, advance)
        runs.take(min_run_time)
    seconds = dict.fromkeys(flow.graph.nodes, (0.0, 0.0)) | runs.seconds()
    workspace = dict.fromkeys(flow.graph.nodes, 0) | runs.workspace
    busy = not runs.quiet
    note = f"measured on {where}{_BUSY if busy else ''}{', forward and backward' if backward else ''}"
    found = Measured(flow.root, where, note, busy, counter, seconds, workspace)
    if not backward:
        return found
    return MeasuredSteps(flow.root, where, note, busy, counter, seconds, workspace, formula=FromOps(found, flow))


def _require_no_collectives(flow: Dataflow) -> None:
    """Raise SK324 for a graph of ranks that exchange tensors: one process stands for all, and nothing is sent."""
    for node in flow.nodes:
        if (group := collective_group(node)) is not None:
            reason = f"{node.name} is a collective over {group}, which one process cannot measure"
            remedy = f"Estimate it: splitkit.costs.roofline(graph, device, mesh={{{group.dimension!r}: 'nvlink4'}})."
            raise CostError("SK324", reason, remedy, [node])


def require_steps(flow: Dataflow, device: torch.device) -> None:
    """Raise SK324 for a graph whose training steps cannot be measured."""
    if is_joint(flow.graph):
        raise CostError(
            "SK324", "backward is in this graph already", "Measure it without backward=True: measured(joint, inputs)."
        )
    if device.type != "cpu":
        raise CostError(
            "SK324",
            f"backward can be measured only on a CPU, not on {device}",
            "Estimate it there: splitkit.costs.training(splitkit.costs.measured(gm, inputs, device)).",
        )
    if _acts_outside(flow):
        raise CostError(
            "SK324",
            "an op acts on the outside world, so that the graph may run only once",
            "Declare it with splitkit.extend.declare, or estimate backward: training(measured(gm, inputs)).",
        )


class MeasuredRuns:
    """The runs of one graph, always from the same inputs and random state.

    Attributes:
        quiet: for each run without other work on the machine the seconds of nodes in forward and in backward.
        busy: the same for each run on a busy machine; they count only if there are no others.
        workspace: node -> bytes.
    """

    def __init__(
        self, flow: Dataflow, device: torch.device, inputs: Any, trains: bool, advance: Callable[[], None]
    ) -> None:
        self.quiet: list[_Times] = []
        self.busy: list[_Times] = []
        self.workspace: dict[Node, int] = {}
        self._flow, self._device, self._inputs, self._trains, self._advance = flow, device, inputs, trains, advance
        self._groups: dict[Node, Hashable] = {}
        self._rng_state = torch.random.get_rng_state()

    def take(self, min_run_time: float) -> None:
        """Run as often as is needed."""
        if _acts_outside(self._flow):
            self._timed(self._state())
            return
        first = FirstRun(self._flow, Private(self._flow, self._device))
        with torch.no_grad():
            first.measure(first.private.inputs(self._inputs))
        self._groups, self.workspace = _by_gradients(first.groups, self._flow, self._trains), first.workspace
        del first
        self._advance()
        took = list[float]()
        lasting = self._state() if _leaves_state(self._flow) else None
        end = time.perf_counter() + min_run_time * len({*self._groups.values()})
        for number in range(MOST_ROUNDS):
            # the first steps of training wait for memory that the allocator later keeps
            no_faster = len(took) > 2 and min(took[-2:]) > 0.99 * min(took[:-2])
            is_settled = self.enough and (no_faster or not self._trains)
            if number >= ROUNDS and time.perf_counter() >= end and is_settled:
                return
            seconds = self._timed(lasting or self._state(), counts=number > 0 or not self._trains)
            took += [seconds] if number else []

    @property
    def enough(self) -> bool:
        """Whether there was a quiet run, or so many busy runs that none is to be expected."""
        return bool(self.quiet) or len(self.busy) >= 2 * ROUNDS

    def seconds(self) -> dict[Node, Seconds]:
        """Return node -> the mean times of its group's nodes, each in the run where that mean is least.

        The least mean counts because other work only adds time. It is a mean within one run so that the prices of all
        nodes add up to the time of a run. A node that is missing in a run took 0.
        """
        members: dict[Hashable, list[Node]] = {}
        for node, group in self._groups.items():
            members.setdefault(group, []).append(node)
        runs, found = self.quiet or self.busy, dict[Node, Seconds]()
        for nodes in members.values():
            forward, backward = (min(fmean(run[half].get(n, 0.0) for n in nodes) for run in runs) for half in (0, 1))
            found |= dict.fromkeys(nodes, (forward, backward))
        return found

    def _state(self) -> tuple[Private, Any]:
        private = Private(self._flow, self._device, trained=self._trains)
        return private, private.inputs(self._inputs)

    def _timed(self, state: tuple[Private, Any], counts: bool = True) -> float:
        """Run once, and return how long it took; the first step of training is a warm-up that does not count."""
        private, values = state
        torch.random.set_rng_state(self._rng_state)
        for tensor in [*private.tensors(), *tensors(values)]:
            tensor.grad = None
        run = MeasuringRun(self._flow, private)
        with torch.set_grad_enabled(self._trains):
            run.measure(values)
        self._groups = self._groups or {node: node for node in run.seconds}
        if counts:
            (self.busy if run.clock.is_busy() else self.quiet).append((run.seconds, run.backward))
        self._advance()
        return sum(run.seconds.values()) + sum(run.backward.values())


def _by_gradients(groups: Mapping[Node, Hashable], flow: Dataflow, trains: bool) -> dict[Node, Hashable]:
    """Return the groups of nodes, of which in training those are divided whose inputs differ in requiring grad."""
    if not trains:
        return dict(groups)
    gradients = flow.fact(Gradients)
    found: dict[Node, Hashable] = {}
    for node, group in groups.items():
        reads = gradients.reads.get(node, frozenset()) if node in gradients.needed else frozenset()
        found[node] = group, tuple(n in reads for n in node.all_input_nodes)
    return found


def _acts_outside(flow: Dataflow) -> bool:
    """Whether an op acts on the outside world, so that the graph may run only once."""
    ops = (n for n in flow.graph.nodes if n.op.startswith("call_") and not is_state_op(n))
    return any(flow.effects[n].impure or flow.effects[n].ambient for n in ops if n.target is not operator.getitem)


def _leaves_state(flow: Dataflow) -> bool:
    """Whether no run writes what the next one reads.

    Then all runs share one state, as in a training loop: gradients and activations reuse memory of the step before.
    """
    if flow.written or any(e.writes_state or not e.known for e in flow.effects.values()):
        return False
    memory = memory_classes(flow.effects, flow.root)
    return all(memory.members.get(n, n) not in memory.written for n in flow.graph.find_nodes(op="placeholder"))


@contextmanager
def progress(total: int, what: str = "measuring", hidden: bool = False) -> Iterator[Callable[..., None]]:
    """Show a progress bar on standard error while ops run, if that is a terminal; yield what advances the bar."""
    from rich.console import Console
    from rich.progress import Progress

    # a slow refresh, as the thread that draws the bar competes with the ops
    hidden = hidden or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, refresh_per_second=2, disable=hidden) as bar:
        task = bar.add_task(what, total=total)
        yield lambda **shown: bar.update(task, advance=1, **shown)


# Prices of nodes that were measured: of forward alone, or of forward and backward.


@dataclass(frozen=True)
class Measured(CountedCosts):
    """The costs of `splitkit.costs.measured` without ``backward``.

    Attributes:
        gm: the graph.
        device: where it was measured.
        note: what the seconds are, for reports.
        busy: whether the machine was busy with other work at every attempt, so that prices may be too high.
        counter: counts FLOPs, by formula.
    """

    gm: fx.GraphModule
    device: torch.device
    note: str
    busy: bool
    counter: Flops = field(repr=False, compare=False)
    _seconds: Mapping[Node, Seconds] = field(repr=False, compare=False)
    _workspace: Mapping[Node, int] = field(repr=False, compare=False)

    __repr__ = brief

    def seconds(self, node: Node) -> float:
        """Time of the node's group in forward; 0 for inputs, attributes and state ops, and for views on a GPU.

        Raises:
            CostError: SK325 for a node that was not in the graph when it was measured.
        """
        return self.both(node)[0]

    def both(self, node: Node) -> Seconds:
        """Seconds of forward and of backward, which are 0 if it was not measured.

        Raises:
            CostError: SK325 as `seconds`.
        """
        self._require(node, self._seconds)
        return self._seconds[node]

    def workspace(self, node: Node) -> int:
        """Peak bytes allocated while the node runs forward, beyond its inputs and results.

        Raises:
            CostError: SK325 as `seconds`.
        """
        self._require(node, self._workspace)
        return self._workspace[node]

    def _require(self, node: Node, known: Mapping[Node, object]) -> None:
        if node not in known:
            raise CostError(
                "SK325",
                f"{node.name} was not measured: it was not in the graph then",
                "Measure again after editing a graph: splitkit.costs.measured(gm, inputs).",
                [node],
            )


@dataclass(frozen=True)
class MeasuredSteps(Measured):
    """The costs of `splitkit.costs.measured` with ``backward``.

    Attributes:
        formula: counts the FLOPs of forward and backward.
    """

    formula: FromOps = field(kw_only=True, repr=False, compare=False)

    __repr__ = brief

    def seconds(self, node: Node) -> float:
        """Time of the node's group in forward and backward; 0 for inputs, attributes and state ops.

        Raises:
            CostError: SK325 as `both`.
        """
        return sum(self.both(node))

    def backward(self, node: Node) -> float:
        """Ratio of the node's time in backward to its time in forward."""
        forward, backward = self.both(node)
        return backward / forward if forward else 0.0

    def flops(self, node: Node) -> float:
        """FLOPs of forward and backward, by formula."""
        return self.formula.flops(node)


# Run a graph, or a training step of it, and time each op where it stands among the others.
#
# Backward is timed by hooks on autograd's nodes: a hook reads the clock when a node begins, and the node's time lasts
# until the next one begins. So the times add up to the whole, including the summation of gradients::
#
#     forward   mm ── relu ── sum          an op owns the new autograd nodes behind its result
#     backward  sum ─▶ relu ─▶ mm ─▶ accumulate (the weight's, owned by the first op that reads the weight)
#               └ t ─┘└─ t ─┘└t┘└─ t ─┘


PAUSE = 500_000
"""GPU cycles, about 0.3 ms: the CPU launches an op meanwhile, so that no kernel waits for its launch."""

Call = Callable[[], Any]


class MeasuringRun(fx.Interpreter):
    """A run of the graph on private values; in grad mode with a backward from the loss.

    Attributes:
        seconds: node -> its time in forward, with autograd's work.
        backward: node whose backward has run -> seconds of it.
        clock: the clock of the run on a CPU.
    """

    def __init__(self, flow: Dataflow, private: Private) -> None:
        super().__init__(flow.root)
        self.extra_traceback = False
        self.flow, self.private = flow, private
        self.seconds: dict[Node, float] = {}
        self.backward: dict[Node, float] = {}
        self.clock = OwnTime()
        self._events: dict[Node, tuple[Any, Any]] = {}  # on a GPU: node -> when it starts and ends
        self._open: dict[Node, Any] = {}  # enter node of an open region -> its handle
        self._met: set[Any] = set()  # autograd's nodes that have a hook
        self._hooks: list[Any] = []  # handles of these hooks
        self._now: Node | None = None  # whose backward runs
        self._since = 0.0

    def measure(self, values: Any) -> None:
        """Run on the values of the placeholders, and restore the ambient state, even after an error."""
        with self._safely():
            self.clock = OwnTime()
            self.run(*values, enable_io_processing=False)
        if self._events:
            torch.cuda.synchronize()
            self.seconds |= {n: start.elapsed_time(end) / 1e3 for n, (start, end) in self._events.items()}

    @contextmanager
    def _safely(self) -> Iterator[None]:
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
            for hook in self._hooks:  # a cycle: autograd nodes hold hooks, hooks hold the run, the run holds results
                hook.remove()
            self._met.clear()

    def run_node(self, n: Node) -> Any:
        """Run ``n``, and time it if it is an op."""
        try:
            if is_state_op(n):
                return self._set_state(n)
            if n.op.startswith("call_") and n.target is not operator.getitem:
                return self._called(n)
            return super().run_node(n)
        except Exception as error:
            raise unfit_inputs_error(f"{n.name} ({_torch.target_name(n)}) fails on them: {error}", n) from error

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

    def _called(self, n: Node) -> Any:
        args, kwargs = self.private.moved(self.fetch_args_kwargs_from_env(n))
        callee: Any = self.private.module(str(n.target)) if n.op == "call_module" else n.target
        method = n.op == "call_method"
        call = partial(getattr(args[0], callee), *args[1:], **kwargs) if method else partial(callee, *args, **kwargs)
        result = self._timed(n, callee, args, kwargs, call)
        self._watch(n, result)
        return result

    def _timed(self, n: Node, callee: Any, args: Any, kwargs: Any, call: Call) -> Any:
        if self.private.device.type == "cuda":
            return self._timed_on_gpu(n, (args, kwargs), call)
        start = self.clock.now()
        result = call()
        self.seconds[n] = self.clock.now() - start
        return result

    def _timed_on_gpu(self, n: Node, given: Any, call: Call) -> Any:
        event: Any = torch.cuda.Event
        pause: Any = _torch.CUDA_SLEEP
        start, end = event(enable_timing=True), event(enable_timing=True)
        pause(PAUSE)
        start.record()
        result = call()
        end.record()
        if self.flow.effects[n].writes or not _is_view(result, given):
            self._events[n] = start, end
        return result

    def _watch(self, n: Node, result: Any) -> None:
        """Hook autograd's nodes behind a result; those behind its arguments are hooked already."""
        coming = [t.grad_fn for t in tensors(result)]
        while coming:
            found: Any = coming.pop()
            if found is not None and found not in self._met:
                self._met.add(found)
                self._hooks.append(found.register_prehook(partial(self._begin, n)))
                coming += [before for before, _ in found.next_functions]

    def _begin(self, n: Node, _: object) -> None:
        self._end()
        self._now, self._since = n, self.clock.now()

    def _end(self) -> None:
        if self._now is not None:
            self.backward[self._now] = self.backward.get(self._now, 0.0) + self.clock.now() - self._since

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run backward from the loss if there is one (`splitkit.graph.losses`), else from outputs that require grad."""
        if torch.is_grad_enabled():
            wanted = [t for t in tensors(args) if t.requires_grad]
            own = loss_of(self.graph.process_outputs(args[0]))
            losses = wanted if own is None else [own]
            try:
                if losses:
                    torch.autograd.backward(losses, [torch.ones_like(t) for t in losses])
            except Exception as error:
                raise unfit_inputs_error(f"their backward fails: {error}") from error
            self._end()
        return super().output(target, args, kwargs)


class FirstRun(MeasuringRun):
    """The run before those that are timed, which finds out what each op is.

    Attributes:
        groups: node -> what its time depends on: the op, its arguments but for the numbers in tensors, and the modes.
        workspace: node -> the peak bytes allocated inside it, beyond those of its results.
    """

    def __init__(self, flow: Dataflow, private: Private) -> None:
        super().__init__(flow, private)
        self.groups: dict[Node, Hashable] = {}
        self.workspace: dict[Node, int] = {}
        self._known: dict[Hashable, int] = {}

    def _timed(self, n: Node, callee: Any, args: Any, kwargs: Any, call: Call) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        group = self.groups[n] = (_described(callee), str(spec), *map(_described, leaves), *_modes())
        if group in self._known:
            result = call()
        else:
            result, self._known[group] = (_cuda if self.private.device.type == "cuda" else _cpu)(call)
        self.workspace[n] = self._known[group]
        return result


def _cpu(call: Call) -> tuple[Any, int]:
    """Return the result of a call, and its workspace."""
    made: list[Any] = []
    held = list(accumulate(_torch.allocations_between(lambda: made.append(call()), "")[0], initial=0))
    return made[0], max(held) - max(held[-1], 0)


def _cuda(call: Call) -> tuple[Any, int]:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    return result, torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())


def _described(value: Any) -> Hashable:
    """Return what the time of an op depends on, of an argument or of the function or module that is called."""
    if isinstance(value, torch.Tensor):
        strided = value.layout == torch.strided and not value.is_nested
        strides = value.stride() if strided else value.layout
        pending = value.is_conj(), value.is_neg()  # which ops that read it resolve
        return type(value).__qualname__, value.dtype, str(value.shape), strides, value.device.type, pending
    if isinstance(value, fx.GraphModule):
        return value.code
    if isinstance(value, nn.Module):
        held = map(_described, [*value.parameters(), *value.buffers()])
        return type(value).__qualname__, repr(value), value.training, *held
    return id(value) if callable(value) else (type(value).__qualname__, repr(value))


def _modes() -> Iterator[Hashable]:
    for device in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    yield torch.are_deterministic_algorithms_enabled()
    yield torch.is_inference_mode_enabled()


def _is_view(result: Any, given: Any) -> bool:
    found = [storage_key(t) for t in tensors(result)]
    return bool(found) and {storage_key(t) for t in tensors(given)}.issuperset(found)


# Measure the time of a computation without the time that other processes took from it on a busy machine.
#
# ``perf_counter`` measures wall time. If torch has one thread, ops run in the calling thread, and ``thread_time`` is
# the time that this thread ran on a processor. The difference is time of other processes, unless the thread gave up
# the processor voluntarily (it slept, or waited for a lock or a device); the kernel counts such context switches. With
# several threads no counter gives the time of an op, so wall time is used.
#
# The kernel also tells whether a machine was busy: it sums up how long runnable threads waited for a processor.


WAITED = 0.05
"""Share of wall time: a computation that waits longer for a processor ran on a busy machine."""
_WORKED = 0.9  # share of wall time: less CPU time shows a busy machine where the kernel does not report waiting
_TASKS = Path("/proc/self/task")


class OwnTime:
    """A clock for work of the calling thread, which also tells whether the machine was busy since it was made."""

    def __init__(self) -> None:
        self._alone = torch.get_num_threads() == 1
        self._passed, self._worked, self._waited = time.perf_counter(), self._work(), waiting_seconds()
        self._last = self._passed, self._worked, voluntary_switches()
        self._own = 0.0

    def now(self) -> float:
        """Return seconds whose differences are times of computations; reading the clock adds nothing to them."""
        if not self._alone:
            return time.perf_counter()
        before, worked, given = self._last
        passed, then, count = time.perf_counter() - before, time.thread_time(), voluntary_switches()
        self._own += passed if count > given else min(passed, then - worked)
        self._last = time.perf_counter(), then, count
        return self._own

    def is_busy(self) -> bool:
        """Whether other processes took a share of the processors that distorts the times."""
        passed, waited = time.perf_counter() - self._passed, waiting_seconds()
        if waited is None or self._waited is None:
            return self._work() - self._worked < _WORKED * passed
        return waited - self._waited > WAITED * passed

    def _work(self) -> float:
        return time.thread_time() if self._alone else time.process_time()


def voluntary_switches() -> int:
    """Return the voluntary context switches of the calling thread, or of the process where only those are counted."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw


def waiting_seconds() -> float | None:
    """Return the seconds that all threads of this process have waited for a processor; None if not counted."""
    waited = [*_nanoseconds()]
    return sum(waited) / 1e9 if waited else None


def _nanoseconds() -> Iterator[int]:
    """Yield how long each thread has waited: the second of run time, wait time and time slices in ``schedstat``."""
    with suppress(OSError):
        for task in _TASKS.iterdir():
            with suppress(OSError, ValueError, IndexError):  # a thread that has ended meanwhile, or another kernel
                yield int((task / "schedstat").read_bytes().split()[1])
