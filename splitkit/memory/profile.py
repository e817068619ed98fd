"""How much memory a graph takes: every byte at every step, without running it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from splitkit._gc import collector_at_rest
from splitkit.brief import brief
from splitkit.graph.dataflow import module_path
from splitkit.memory.options import SplitLike, bytes_of_block, check, checked, leaves_returned, unfit
from splitkit.memory.run import MemoryRun, Value
from splitkit.memory.stored import BEFORE, HELD, Buffer
from splitkit.shown import ShownOverTime
from splitkit.units import at_most, size

CUDA_BLOCK = 512
"""Torch's CUDA allocator hands out multiples of this many bytes."""


@dataclass(frozen=True)
class MemoryProfile(ShownOverTime):
    """The memory of one run, as simulated.

    In a notebook it draws the bytes over time; `view`, `to_html` and `to_svg` take ``memory``, the bytes that there are
    (``"80GiB"``).

    Attributes:
        peak: the most bytes that are alive at once: parameters, inputs and outputs included.
        at: the node that runs at the peak, ``None`` for a graph that computes nothing.
        index: its step.
        steps: the nodes that compute, in the order in which they run.
        timeline: bytes alive while each step runs.
        buffers: every storage: how large, what made it, from which step to which it lives.
        saved: bytes that forward leaves for backward beyond inputs and parameters; 0 without a backward.
        calls: what ran when: ``"forward"`` and ``"backward"``, or the names of parts -> a range of steps.
        parts: part -> what it takes if it runs alone: its parameters, inputs and outputs, and its own work.
        bounds: symbol -> the upper bound that it counts as, for sizes that only the data decides; and, if a branch or a
            loop (``torch.cond``, ``scan`` ...) runs at the peak, its name -> the most bytes that its bodies take. If
            there are any, the bytes are what the run takes *at most*.
    """

    peak: int
    at: Node | None
    index: int
    steps: tuple[Node, ...]
    timeline: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    saved: int
    calls: Mapping[str, range]
    parts: Mapping[Hashable, MemoryProfile]
    bounds: Mapping[str, int] = field(default_factory=dict)

    __repr__ = brief

    @property
    def baseline(self) -> int:
        """Bytes that are there before the run: parameters, buffers, inputs."""
        return sum(b.nbytes for b in self.buffers if b.born == BEFORE)

    @property
    def end(self) -> int:
        """Bytes that are there after the run: the baseline, less inputs that were given up, and the outputs."""
        return sum(b.nbytes for b in self.buffers if b.dies == HELD)

    @cached_property
    def live_at_peak(self) -> tuple[Buffer, ...]:
        """What is alive at the peak, the largest first."""
        return self.live_at(self.index)

    def live_at(self, step: int) -> tuple[Buffer, ...]:
        """What is alive while ``step`` runs, the largest first."""
        alive = [b for b in self.buffers if b.nbytes and b.born <= step <= b.dies]
        return tuple(sorted(alive, key=lambda b: -b.nbytes))

    def peak_of(self, call: str) -> int:
        """The most bytes alive at once while ``"forward"``, ``"backward"`` or a part runs.

        Raises:
            GraphError: SK110 if nothing of that name ran.
        """
        if call not in self.calls:
            raise unfit(f"nothing called {call!r} ran", f"What ran is {', '.join(self.calls) or 'the graph alone'}.")
        return max((self.timeline[step] for step in self.calls[call]), default=0)

    @property
    def peaks(self) -> Mapping[str, int]:
        """`peak_of` each call, in the order in which they run."""
        return {call: self.peak_of(call) for call in self.calls}

    def on(self, device: torch.device | str) -> int:
        """The most bytes alive at once on one device; what kernels take besides their results is not in it.

        Raises:
            GraphError: SK110 if that is no device.
        """
        try:
            wanted, change = torch.device(device), Counter[int]()
        except RuntimeError as error:
            raise unfit(f"{device!r} is no device", "Give one such as 'cpu' or 'cuda:0'.") from error
        for buffer in self.buffers:
            if buffer.device == wanted:
                change[max(buffer.born, 0)] += buffer.nbytes
                change[buffer.dies + 1] -= buffer.nbytes
        live = peak = 0
        for step in sorted(change):
            live += change[step]
            peak = max(peak, live)
        return peak

    def to_dict(self, top: int | None = 20) -> dict[str, Any]:
        """The profile as plain data; ``top`` of what is alive at the peak, all of it for ``None``."""
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
            "live_at_peak": [_described(b) for b in self.live_at_peak[:top]],
            "timeline": list(self.timeline),
        }

    def __str__(self) -> str:
        at = "" if self.at is None else f" at {self.at.name}"
        calls = ", ".join(f"{call} {size(peak)}" for call, peak in self.peaks.items())
        saved = f", {size(self.saved)} saved" if self.saved else ""
        text = f"peak {at_most(self.peak, self.bounds)}{at}, {size(self.baseline)} before{saved}" + (
            f" ({calls})" if calls else ""
        )
        inside = {name: nbytes for name, nbytes in self.bounds.items() if self.at is not None and name == self.at.name}
        bounds = ", ".join(f"{symbol} = {bound}" for symbol, bound in self.bounds.items() if symbol not in inside)
        text += f"; for {bounds}, which only the data decides" if bounds else ""
        return text + "".join(f"; {name} takes up to {size(nbytes)} inside" for name, nbytes in inside.items())

    def to_chrome_trace(self) -> dict[str, Any]:
        """The bytes that are alive, and the node that runs, in the Trace Event Format; a step lasts a microsecond."""
        events: list[dict[str, Any]] = [
            {"ph": "C", "name": "bytes alive", "pid": 0, "ts": step, "args": {"bytes": nbytes}}
            for step, nbytes in enumerate(self.timeline)
        ]
        for name, steps, row in ((name, steps, 0) for name, steps in self.calls.items() if len(steps)):
            events.append({"ph": "X", "name": name, "pid": 0, "tid": row, "ts": steps.start, "dur": len(steps)})
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
    block: int | str = 1,
    workspace: Callable[[Node], int] | None = None,
) -> MemoryProfile:
    """The bytes that are alive at each step of a run without autograd, to the byte.

    It counts storages: views share one, a tied parameter is one, a tensor that was given for several inputs at capture
    is one, and what an op holds inside is counted while it runs (composite ops are run on fake tensors). What a kernel
    takes inside, unseen by the dispatcher, is known only to ``workspace``.

    A pair of ``forward`` and ``backward``, as AOTAutograd makes them, runs one after the other::

        forward(*primals)  -> *user outputs, *saved          user outputs: held by the caller throughout
        backward(*saved, *tangents) -> *gradients            saved: freed at their last use; gradients: held

    A saved value is found by its name, a placeholder of ``backward`` without its like in ``forward`` is a tangent, and
    primals and tangents are held by the caller. A value is freed with its last reader of *both* graphs.

    Args:
        graph: a graph with ``meta["val"]``, a `splitkit.Split`, or the forward graph of a pair.
        backward: the backward graph of a pair.
        user_outputs: how many of the outputs of ``forward`` are the caller's. ``None``: those that ``backward`` does
            not take, and those that stand in the output a second time.
        keep_inputs: the caller holds the inputs to the end, as Python's calls do; else they are freed with their last
            reader, as boxed calls do.
        sizes: symbol -> size: an upper bound for a size that only the data decides (``{"u0": 128}``), so that the bytes
            are those that the run takes at most; or another size for one that was seen at capture (``{"s0": 64}``).
        block: the allocator hands out multiples of this many bytes (``"2MiB"``); `CUDA_BLOCK` on a GPU.
        workspace: node -> the bytes that it takes besides its results while it runs, where that is more than what the
            dispatcher sees, such as ``costs.measured(...).workspace``.

    Raises:
        GraphError: SK101 if it is no graph, SK102 if nodes have no ``meta["val"]``, SK108 if a size that only the data
            decides has no bound, SK109 if the values do not show who shares memory, SK110 for options that make no
            sense.
    """
    check(graph, backward, user_outputs, sizes or {})
    run = MemoryRun(sizes or {}, bytes_of_block(block), checked(workspace))
    parts: dict[Hashable, MemoryProfile] = {}
    if not isinstance(graph, fx.GraphModule) and isinstance(graph, SplitLike):
        for key, part in graph.parts.items():
            parts[key] = simulate_memory(part, sizes=sizes, block=block, workspace=workspace)
        graph = graph.module
    with collector_at_rest():
        if backward is not None:
            return _profile(run, _pair(run, graph, backward, user_outputs, keep_inputs), parts)
        run.own(graph)
        _release(run, run.graph(graph, lambda n: run.input(n, "input", keep_inputs)), "output")
        return _profile(run, 0, parts)


def _pair(
    run: MemoryRun, forward: fx.GraphModule, backward: fx.GraphModule, user_outputs: int | None, keep: bool
) -> int:
    """Run both; return the bytes saved between them."""
    run.own(forward)
    run.own(backward)
    outputs = run.graph(forward, lambda n: run.input(n, _kind_of_primal(n), keep))
    run.calls["forward"] = range(len(run.steps))
    taken = {n.name for n in backward.graph.find_nodes(op="placeholder")}
    users, kept = _sorted_out(outputs, taken, None if user_outputs is None else _nodes_among(forward, user_outputs))
    _release(run, users, "output")
    saved = {node.name: value for node, value in kept}
    passing = {number for value in saved.values() for number in value.values() if run.buffers[number].born != BEFORE}
    for number in passing:
        run.buffers[number].kind = "saved"
    gradients = run.graph(backward, lambda n: saved[n.name] if n.name in saved else run.input(n, "tangent"))
    run.calls["backward"] = range(run.calls["forward"].stop, len(run.steps))
    _release(run, gradients, "gradient")
    return sum(run.buffers[number].nbytes for number in passing)


def _nodes_among(forward: fx.GraphModule, count: int) -> int:
    """How many of the first ``count`` outputs are values: a frozen weight's, say, may be ``None``."""
    return sum(isinstance(leaf, Node) for leaf in leaves_returned(forward)[:count])


def _sorted_out(
    outputs: list[tuple[Node, Value]], taken: set[str], count: int | None
) -> tuple[list[tuple[Node, Value]], list[tuple[Node, Value]]]:
    """The outputs of a forward graph: the caller's (``count``, if known), and those that backward takes."""
    if count is not None:
        return outputs[:count], outputs[count:]
    seen = Counter(node.name for node, _ in outputs)
    users = [(n, v) for n, v in outputs if n.name not in taken or seen[n.name] > 1]
    return users, [(n, v) for n, v in outputs if n.name in taken]


def _release(run: MemoryRun, outputs: Iterable[tuple[Node, Value]], kind: str) -> None:
    """Hand values to the caller, who holds them from now on."""
    for _, value in outputs:
        run.hold(value, HELD)
        for buffer in (run.buffers[number] for number in value.values()):
            if buffer.kind == "activation":
                buffer.kind = kind


def _kind_of_primal(node: Node) -> str:
    """What AOTAutograd says that a placeholder is; "input" if it says nothing."""
    described = type(node.meta.get("desc")).__name__  # ParamAOTInput, BufferAOTInput ...: 2.11, 2.13, 2.15
    return {"ParamAOTInput": "parameter", "BufferAOTInput": "buffer"}.get(described, "input")


def _profile(run: MemoryRun, saved: int, parts: Mapping[Hashable, MemoryProfile]) -> MemoryProfile:
    timeline = run.timeline()
    index = max(range(len(timeline)), key=timeline.__getitem__, default=0)
    peak = timeline[index] if timeline else sum(b.nbytes for b in run.buffers if b.born == BEFORE)
    at = run.steps[index] if timeline else None
    return MemoryProfile(
        peak,
        at,
        index,
        tuple(run.steps),
        tuple(timeline),
        tuple(run.buffers),
        saved,
        dict(run.calls),
        dict(parts),
        run.bounds | {node.name: nbytes for node, nbytes in run.from_above.items() if node is at},
    )


def _place(node: Node) -> dict[str, Any]:
    """Where a node is from."""
    return {"node": node.name, "module": module_path(node), "stack": node.meta.get("stack_trace")}


def _described(buffer: Buffer) -> dict[str, Any]:
    module = "" if buffer.node is None else module_path(buffer.node)
    return {"name": buffer.name, "nbytes": buffer.nbytes, "kind": buffer.kind, "module": module}
