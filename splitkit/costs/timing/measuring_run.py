"""Run a graph, or a training step of it, and time each op where it stands among the others.

Backward is timed by hooks on autograd's nodes: a hook reads the clock when a node begins, and the node's time lasts
until the next one begins. So the times add up to the whole, including the summation of gradients::

    forward   mm ── relu ── sum          an op owns the new autograd nodes behind its result
    backward  sum ─▶ relu ─▶ mm ─▶ accumulate (the weight's, owned by the first op that reads the weight)
              └ t ─┘└─ t ─┘└t┘└─ t ─┘
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.costs.timing.cpu_time import OwnTime
from splitkit.costs.timing.run_inputs import Private, unfit_inputs_error
from splitkit.graph.ambient import SETTINGS, closed_by, opened_by
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.losses import loss_of
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import storage_key, tensors

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
                self._hooks.append(found.register_prehook(self._beginning(n)))
                coming += [before for before, _ in found.next_functions]

    def _beginning(self, n: Node) -> Callable[[object], None]:
        def begin(_: object) -> None:
            self._end()
            self._now, self._since = n, self.clock.now()

        return begin

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
    held = list(accumulate(_torch.allocations(lambda: made.append(call())), initial=0))
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
