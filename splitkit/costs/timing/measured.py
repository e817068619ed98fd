"""Measure costs op by op: the graph runs several times on real inputs, and each op is timed in place.

Nodes that call one op with the same shapes, strides, dtypes and other arguments in the same modes form a group, whose
nodes have one price. The arguments are those of a real run, so that indices, labels and masks are valid.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit.checks import LONGEST, is_number, shown
from splitkit.costs.formulas.flop_count import flops
from splitkit.costs.timing.measured_prices import Measured, MeasuredSteps
from splitkit.costs.timing.measuring_run import FirstRun, MeasuringRun
from splitkit.costs.timing.op_timing import MOST_ROUNDS, MeasuredRuns, timing_rounds
from splitkit.costs.timing.run_inputs import Private, measuring_device
from splitkit.errors import CostError
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.gradients import Gradients
from splitkit.graph.joint_marks import is_joint
from splitkit.graph.scope import is_state_op
from splitkit.graph.shared_memory import memory_classes
from splitkit.graph.storages import tensors

_BUSY = ", which was busy with other work: the prices may be too high"


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
    on_gpu = where.type == "cuda"
    chosen: AbstractContextManager[Any] = torch.cuda.device(where) if on_gpu else nullcontext()
    with progress(1 + MOST_ROUNDS) as advance, torch.random.fork_rng([where] if on_gpu else []), chosen:
        runs = _Runs(flow, where, inputs, backward, advance)
        runs.take(min_run_time)
    seconds = dict.fromkeys(flow.graph.nodes, (0.0, 0.0)) | runs.seconds()
    workspace = dict.fromkeys(flow.graph.nodes, 0) | runs.workspace
    busy = not runs.forward.quiet
    note = f"measured on {where}{_BUSY if busy else ''}"
    found = Measured(flow.root, where, note, busy, counter, seconds, workspace)
    return MeasuredSteps.of(found, flow) if backward else found


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


class _Runs:
    """The runs of one graph, always from the same inputs and random state.

    Attributes:
        forward: the times of forward.
        backward: the times of backward.
        workspace: node -> bytes.
    """

    def __init__(
        self, flow: Dataflow, device: torch.device, inputs: Any, trains: bool, advance: Callable[[], None]
    ) -> None:
        self.forward, self.backward = MeasuredRuns(), MeasuredRuns()
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
        settled = lambda: self.forward.enough and (not self._trains or _no_faster(took))  # noqa: E731
        for number in timing_rounds(len({*self._groups.values()}), min_run_time, settled):
            seconds = self._timed(lasting or self._state(), counts=number > 0 or not self._trains)
            took += [seconds] if number else []

    def seconds(self) -> dict[Node, tuple[float, float]]:
        """Return node -> the seconds of its group in forward and in backward."""
        forward, backward = self.forward.seconds(self._groups), self.backward.seconds(self._groups)
        return {node: (forward[node], backward[node]) for node in self._groups}

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
            busy = run.clock.is_busy()
            self.forward.add(run.seconds, busy=busy)
            self.backward.add(run.backward, busy=busy)
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


def _no_faster(took: Sequence[float]) -> bool:
    """Whether steps get no faster: the first ones wait for memory that the allocator later keeps."""
    return len(took) > 2 and min(took[-2:]) > 0.99 * min(took[:-2])


@contextmanager
def progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error while ops are measured, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # a slow refresh, as the thread that draws the bar competes with the ops
    with Progress(console=Console(stderr=True), transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("measuring", total=total)
        yield lambda: bar.advance(task)
