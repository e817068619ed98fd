"""Predict how much memory a graph takes, to the byte at every step, without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx
from torch.fx import Node

from splitkit._gc import paused_collector
from splitkit.display import ShownOverTime
from splitkit.errors import GraphError
from splitkit.graph.dataflow import module_path
from splitkit.memory.kernels.vmap_batches import ends_inside, run_vmap
from splitkit.memory.simulation import (
    MemorySimulation,
    SimulatedStorage,
    SplitLike,
    ValueStorages,
    bad_option,
    check_options,
    checked_workspace,
    leaves_returned,
)
from splitkit.memory.storage_watch import BEFORE, HELD
from splitkit.short_repr import brief
from splitkit.units import bounded, size

_NAMED = 3  # ops in a text


@dataclass(frozen=True)
class MemoryProfile(ShownOverTime):
    """The memory of one run, as simulated.

    In a notebook it draws the bytes over time.

    Attributes:
        peak: the most bytes alive at once, with parameters, inputs and outputs.
        at: the node that runs at the peak, ``None`` for a graph that computes nothing.
        index: the step of the peak.
        steps: the nodes that compute, in the order in which they run.
        timeline: bytes alive while each step runs.
        buffers: all storages, each with its size, its maker, and its first and last step.
        saved: bytes that forward saves for backward, without inputs and parameters; 0 without a backward.
        calls: ``"forward"`` and ``"backward"``, or the names of parts -> a range of steps.
        parts: part -> its profile if it runs alone, with its parameters, inputs and outputs.
        bounds: symbol -> the upper bound that it counts as, for data-dependent sizes; and, if a branch or a loop
            (``torch.cond``, ``scan`` ...) runs at the peak, its name -> the most bytes that its bodies take. If there
            are any, all bytes are upper bounds.
        unseen: names of ops in the graph whose kernels take more memory than is counted (``convolution`` on a CPU),
            unless ``workspace`` was given. If there are any, all bytes are lower bounds.
    """

    peak: int
    at: Node | None
    index: int
    steps: tuple[Node, ...]
    timeline: tuple[int, ...]
    buffers: tuple[SimulatedStorage, ...]
    saved: int
    calls: Mapping[str, range]
    parts: Mapping[Hashable, MemoryProfile]
    bounds: Mapping[str, int] = field(default_factory=dict)
    unseen: frozenset[str] = frozenset()

    __repr__ = brief

    @property
    def baseline(self) -> int:
        """The bytes alive before the run: parameters, buffers, inputs."""
        return sum(b.nbytes for b in self.buffers if b.born == BEFORE)

    @property
    def end(self) -> int:
        """The bytes alive after the run: the outputs, and the baseline without inputs that the caller gave up."""
        return sum(b.nbytes for b in self.buffers if b.dies == HELD)

    @cached_property
    def live_at_peak(self) -> tuple[SimulatedStorage, ...]:
        """The storages alive at the peak, the largest first."""
        alive = [b for b in self.buffers if b.nbytes and b.born <= self.index <= b.dies]
        return tuple(sorted(alive, key=lambda b: -b.nbytes))

    def peak_of(self, call: str) -> int:
        """Return the most bytes alive at once while ``"forward"``, ``"backward"`` or a part runs.

        Raises:
            GraphError: SK110 if nothing with that name ran.
        """
        if call not in self.calls:
            raise bad_option(
                f"nothing called {call!r} ran",
                f"Name one of {', '.join(self.calls)}." if self.calls else "This profile has no calls: take its peak.",
            )
        return max((self.timeline[step] for step in self.calls[call]), default=0)

    @property
    def peaks(self) -> Mapping[str, int]:
        """The peak of each call, in the order in which they run."""
        return {call: self.peak_of(call) for call in self.calls}

    def to_dict(self, top: int | None = 20) -> dict[str, Any]:
        """Return the profile as plain data, with the ``top`` storages alive at the peak, or all for ``None``."""
        return {
            "peak": self.peak,
            "at": None if self.at is None else _place(self.at),
            "step": self.index,
            "baseline": self.baseline,
            "end": self.end,
            "saved": self.saved,
            "peaks": dict(self.peaks),
            "parts": {str(key): part.to_dict(top) for key, part in self.parts.items()},
            "bounds": dict(self.bounds),
            "unseen": sorted(self.unseen),
            "live_at_peak": [_described(b) for b in self.live_at_peak[:top]],
            "timeline": list(self.timeline),
        }

    def __str__(self) -> str:
        at = "" if self.at is None else f" at {self.at.name}"
        calls = ", ".join(f"{call} {size(peak)}" for call, peak in self.peaks.items())
        saved = f", {size(self.saved)} saved" if self.saved else ""
        text = f"peak {bounded(self.peak, self.bounds, self.unseen)}{at}, {size(self.baseline)} before{saved}" + (
            f" ({calls})" if calls else ""
        )
        inside = {name: nbytes for name, nbytes in self.bounds.items() if self.at is not None and name == self.at.name}
        bounds = ", ".join(f"{symbol} = {bound}" for symbol, bound in self.bounds.items() if symbol not in inside)
        text += f"; for {bounds}, which depend on the data" if bounds else ""
        more = len(self.unseen) - _NAMED
        named = ", ".join(sorted(self.unseen)[:_NAMED]) + (f" and {more} more" if more > 0 else "")
        text += f"; without what the kernels of {named} take inside" if named else ""
        return text + "".join(f"; {name} takes up to {size(nbytes)} inside" for name, nbytes in inside.items())

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return the live bytes and the nodes in the Trace Event Format, where each step lasts a microsecond."""
        events: list[dict[str, Any]] = [
            {"ph": "C", "name": "bytes alive", "pid": 0, "ts": step, "args": {"bytes": nbytes}}
            for step, nbytes in enumerate(self.timeline)
        ]
        for name, steps in self.calls.items():
            if len(steps):
                events.append({"ph": "X", "name": name, "pid": 0, "tid": 0, "ts": steps.start, "dur": len(steps)})
        for step, node in enumerate(self.steps):
            about = {"module": module_path(node)}
            events.append({"ph": "X", "name": node.name, "pid": 0, "tid": 1, "ts": step, "dur": 1, "args": about})
        return {"traceEvents": events, "displayTimeUnit": "ns"}


def simulate_memory(
    graph: fx.GraphModule | SplitLike,
    backward: fx.GraphModule | None = None,
    *,
    user_outputs: int | None = None,
    keep_inputs: bool = True,
    sizes: Mapping[str, int] | None = None,
    workspace: Callable[[Node], int] | None = None,
) -> MemoryProfile:
    """Predict the bytes alive at each step of a run without autograd.

    Storages are counted: views share one, tied parameters are one, and so is a tensor that was passed for several
    inputs at capture. What a composite op allocates internally counts while it runs (such ops are run on fake tensors).
    Pass memory that kernels allocate without the dispatcher as ``workspace``; otherwise ``unseen`` names the ops that
    are known to do so, and the text says "at least".

    A pair of ``forward`` and ``backward``, as AOTAutograd makes them, runs one after the other::

        forward(*primals)  -> *user outputs, *saved          user outputs: held by the caller to the end
        backward(*saved, *tangents) -> *gradients            saved: freed after their last use; gradients: held

    Saved values are matched by name; a placeholder of ``backward`` that is not an output of ``forward`` is a tangent.
    The caller holds primals and tangents. A value is freed after its last reader in *either* graph.

    Args:
        graph: a graph with ``meta["val"]``, a `splitkit.engine.split.Split`, or the forward graph of a pair.
        backward: the backward graph of a pair.
        user_outputs: how many outputs of ``forward`` are the caller's. ``None``: those that ``backward`` does not take,
            and those that occur in the output twice.
        keep_inputs: whether the caller holds the inputs to the end, as in Python's calls; otherwise they are freed
            after their last reader, as in boxed calls.
        sizes: symbol -> size: an upper bound for a data-dependent size (``{"u0": 128}``), which makes the result an
            upper bound too; or another size for one that was seen at capture (``{"s0": 64}``).
        workspace: node -> the bytes that it takes besides its results while it runs, where that is more than the
            dispatcher sees, such as ``costs.measured(...).workspace``.

    Raises:
        GraphError: SK101 if it is not a graph, SK102 if nodes have no ``meta["val"]``, SK108 if a data-dependent size
            has no bound, SK109 if the values do not show which of them share memory or the graph ends inside a
            ``torch.vmap``, SK110 for invalid options.
    """
    check_options(graph, backward, user_outputs, sizes or {})
    run = MemorySimulation(sizes or {}, checked_workspace(workspace))
    parts: dict[Hashable, MemoryProfile] = {}
    if not isinstance(graph, fx.GraphModule) and isinstance(graph, SplitLike):
        inside = run_vmap(graph.module)
        run.know(inside)
        for key, part in graph.parts.items():
            alone = MemorySimulation(run.sizes, run.workspace)
            alone.know(inside)
            parts[key] = _profile_alone(alone, part, {}, workspace is not None)
        graph = graph.module
    elif backward is None and ends_inside(graph):
        raise GraphError(
            "SK109",
            "the graph begins or ends inside a torch.vmap: its values show one example of a batch",
            "Give simulate_memory the Split: parts[...] of the profile is what the part takes alone.",
        )
    with paused_collector():
        if backward is not None:
            return _profile(run, _pair(run, graph, backward, user_outputs, keep_inputs), parts, workspace is not None)
        return _profile_alone(run, graph, parts, workspace is not None, keep_inputs)


def _profile_alone(
    run: MemorySimulation, graph: fx.GraphModule, parts: Mapping[Hashable, MemoryProfile], told: bool, keep: bool = True
) -> MemoryProfile:
    """Simulate one graph; ``told`` says whether the caller gave a ``workspace``."""
    run.own(graph)
    _hand_over(run, run.graph(graph, lambda n: run.input(n, "input", keep)), "output")
    return _profile(run, 0, parts, told)


def _pair(
    run: MemorySimulation, forward: fx.GraphModule, backward: fx.GraphModule, user_outputs: int | None, keep: bool
) -> int:
    """Simulate both graphs and return the bytes saved between them."""
    run.own(forward)
    run.own(backward)
    outputs = run.graph(forward, lambda n: run.input(n, _kind_of_primal(n), keep))
    run.calls["forward"] = range(len(run.steps))
    taken = {n.name for n in backward.graph.find_nodes(op="placeholder")}
    if user_outputs is None:
        seen = Counter(node.name for node, _ in outputs)
        users = [(n, v) for n, v in outputs if n.name not in taken or seen[n.name] > 1]
        kept = [(n, v) for n, v in outputs if n.name in taken]
    else:  # others of its outputs are ``None`` or constants
        count = sum(isinstance(leaf, Node) for leaf in leaves_returned(forward)[:user_outputs])
        users, kept = outputs[:count], outputs[count:]
    _hand_over(run, users, "output")
    saved = {node.name: value for node, value in kept}
    passing = {number for value in saved.values() for number in value.values() if run.storages[number].born != BEFORE}
    for number in passing:
        run.storages[number].kind = "saved"
    gradients = run.graph(backward, lambda n: saved[n.name] if n.name in saved else run.input(n, "tangent"))
    run.calls["backward"] = range(run.calls["forward"].stop, len(run.steps))
    _hand_over(run, gradients, "gradient")
    return sum(run.storages[number].nbytes for number in passing)


def _hand_over(run: MemorySimulation, outputs: Iterable[tuple[Node, ValueStorages]], kind: str) -> None:
    """Give values to the caller, who holds them to the end."""
    for _, value in outputs:
        run.hold(value, HELD)
        for storage in (run.storages[number] for number in value.values()):
            if storage.kind == "activation":
                storage.kind = kind


def _kind_of_primal(node: Node) -> str:
    """Return what kind of placeholder AOTAutograd says this is; "input" if it says nothing."""
    described = type(node.meta.get("desc")).__name__  # ParamAOTInput, BufferAOTInput ...: 2.11, 2.13, 2.15
    return {"ParamAOTInput": "parameter", "BufferAOTInput": "buffer"}.get(described, "input")


def _profile(run: MemorySimulation, saved: int, parts: Mapping[Hashable, MemoryProfile], told: bool) -> MemoryProfile:
    timeline = run.timeline()
    index = max(range(len(timeline)), key=timeline.__getitem__, default=0)
    peak = timeline[index] if timeline else sum(b.nbytes for b in run.storages if b.born == BEFORE)
    at = run.steps[index] if timeline else None
    return MemoryProfile(
        peak,
        at,
        index,
        tuple(run.steps),
        tuple(timeline),
        tuple(run.storages),
        saved,
        dict(run.calls),
        dict(parts),
        run.bounds | {node.name: nbytes for node, nbytes in run.body_peaks.items() if node is at},
        frozenset() if told else frozenset(run.unseen),
    )


def _place(node: Node) -> dict[str, Any]:
    """Return where a node comes from, as plain data."""
    return {"node": node.name, "module": module_path(node), "stack": node.meta.get("stack_trace")}


def _described(storage: SimulatedStorage) -> dict[str, Any]:
    module = "" if storage.node is None else module_path(storage.node)
    return {"name": storage.name, "nbytes": storage.nbytes, "kind": storage.kind, "module": module}
