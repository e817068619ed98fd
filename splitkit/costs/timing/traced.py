"""Price the nodes of a graph by a trace of torch's profiler, so that plans for a machine need only one run on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from statistics import median

import torch
from torch import fx
from torch.fx import Node

from splitkit._torch import OpOverload
from splitkit.costs.formulas.flop_count import Flops, flops
from splitkit.costs.timing.measured_prices import Measured, MeasuredSteps, Seconds
from splitkit.costs.timing.profiler_trace import ProfiledOp, ProfiledStep, load_steps
from splitkit.errors import CostError, listed
from splitkit.files import PathLike
from splitkit.graph.dataflow import Dataflow, facts_of
from splitkit.graph.joint_marks import is_joint
from splitkit.graph.symbols import value_of

MOST_ABSENT = 0.01
"""The share of the graph's FLOPs that nodes may have which the trace does not show: masks and positions, which models
build in another way under capture. In the examples they have 0 FLOPs; a layer of a model with 48 has 2 %."""


def traced(gm: fx.GraphModule | Dataflow, trace: PathLike) -> Measured | MeasuredSteps:
    """Return costs by the times in a trace of torch's profiler, of the model as it ran on any machine.

    Run the model that was captured, with inputs of the same sizes, in one process and in eager mode::

        with profile(record_shapes=True, schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
                     on_trace_ready=lambda p: p.export_chrome_trace("trace.json")) as prof:
            for _ in range(5):
                model(**inputs).loss.backward()
                prof.step()

    The ops of each step are aligned with the nodes of the graph, by name and by the shape of the first argument. The
    price of a node is the median over the steps. If the trace has a backward, prices include it, with the accumulation
    of gradients; the backward time of an op is the time of the autograd nodes that it created. On a GPU, times are
    kernel times. The time that Python takes between ops is not included.

    Some models build masks and positions differently under capture. Nodes that the trace lacks are priced like other
    nodes with their op, or as the quickest op, as long as they have at most 1 % of the graph's FLOPs.

    Args:
        gm: the graph of `splitkit.capture`, or facts about it.
        trace: a file written by ``export_chrome_trace``. It is read as JSON and never runs code.

    Raises:
        GraphError: SK101 if ``gm`` is not a graph, SK102 if nodes have no ``meta["val"]``.
        FileError: SK504 if the file cannot be read, SK510 if it is not a trace of torch's profiler.
        CostError: SK326 if the trace was taken from another model or with other sizes.
    """
    flow = facts_of(gm)
    counter = flops(flow)
    if is_joint(flow.graph):
        raise CostError("SK326", "backward is in this graph already", "Read the trace for the graph of capture.")
    nodes = [node for node in flow.nodes if isinstance(node.target, OpOverload)]
    steps = load_steps(trace)
    found: dict[Node, list[Seconds]] = defaultdict(list)
    known = total = 0.0
    for step in steps:
        for node, op in _aligned(nodes, step):
            found[node].append((op.forward, op.backward))
            known += op.forward + op.backward
        total += sum(op.forward + op.backward for op in step.ops)
    absent = tuple(node for node in nodes if node not in found)
    _require_most(nodes, absent, counter, trace)
    seconds = {node: (median(f for f, _ in rows), median(b for _, b in rows)) for node, rows in found.items()}
    seconds |= _like_others(absent, seconds)
    coverage, on_gpu = known / total if total else 1.0, any(step.on_gpu for step in steps)
    what, device = ("kernels", "cuda") if on_gpu else ("ops", "cpu")
    note = f"traced in {Path(trace).name}, {len(steps)} steps, {coverage:.0%} of the time of its {what}"
    priced = dict.fromkeys(flow.graph.nodes, (0.0, 0.0)) | seconds
    costs = Measured(flow.root, torch.device(device), note, False, counter, priced, {})
    return MeasuredSteps.of(costs, flow) if any(step.trains for step in steps) else costs


def _aligned(nodes: Sequence[Node], step: ProfiledStep) -> Iterator[tuple[Node, ProfiledOp]]:
    """Yield pairs of a node and the op that it was."""
    shaped = any(op.shape is not None for op in step.ops)
    ours = [_key(node, shaped) for node in nodes]
    theirs = [(op.name, op.shape if shaped else None) for op in step.ops]
    for kind, a, b, c, d in SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes():
        if kind == "equal":
            yield from zip(nodes[a:b], step.ops[c:d], strict=True)
        elif kind == "replace" and b - a == d - c == 1 and ours[a][1] == theirs[c][1]:
            yield nodes[a], step.ops[c]  # one op by two names: transformers::grouped_mm_fallback runs _grouped_mm


def _key(node: Node, shaped: bool) -> tuple[str, tuple[int, ...] | None]:
    first = node.args[0] if node.args else None
    value = value_of(first) if isinstance(first, Node) else None
    shape = tuple(map(int, value.shape)) if isinstance(value, torch.Tensor) else ()
    return _qualified(node), shape if shaped else None


def _qualified(node: Node) -> str:
    namespace, name, _ = str(node.target).split(".")  # aten.add.Tensor
    return f"{namespace}::{name}"


def _require_most(nodes: Sequence[Node], absent: Sequence[Node], counter: Flops, trace: PathLike) -> None:
    """Refuse a trace that lacks nodes that compute."""
    whole = sum(map(counter.flops, nodes))
    lacking = sorted((node for node in absent if counter.flops(node)), key=counter.flops, reverse=True)
    share = sum(map(counter.flops, lacking)) / whole if whole else 0.0
    if len(absent) < len(nodes) and share <= MOST_ABSENT:
        return
    names = listed([node.name for node in lacking or absent], 4)
    raise CostError(
        "SK326",
        f"{trace} does not show {len(absent)} of {len(nodes)} ops, which have {share:.0%} of the FLOPs: {names}",
        "Trace the captured model in eager mode, with inputs of the captured sizes.",
        lacking or absent,
    )


def _like_others(absent: Sequence[Node], known: Mapping[Node, Seconds]) -> dict[Node, Seconds]:
    """Price nodes that the trace lacks by the median forward of their op, or of the quickest op."""
    by_op: dict[str, list[float]] = defaultdict(list)
    for node, (forward, _) in known.items():
        by_op[_qualified(node)].append(forward)
    medians = {op: median(times) for op, times in by_op.items()}
    least = min(medians.values(), default=0.0)
    return {node: (medians.get(_qualified(node), least), 0.0) for node in absent}
