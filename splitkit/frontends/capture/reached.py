"""Recovers the partial graph of a failed capture for its error: what the tracer had recorded so far."""

from __future__ import annotations

import traceback
from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import fx, nn

from splitkit.errors import CaptureError, SplitError
from splitkit.frontends.capture.capture_errors import source_of

_ROOT = "_export_root"
"""The name of the model inside the wrapper that torch.export traces (2.11, 2.13, 2.15); a test fails if it changes."""


def note_reached(refusal: SplitError, cause: BaseException) -> None:
    """Set ``reached`` and ``stopped_at`` of a `CaptureError`, as far as the traceback of ``cause`` tells.

    Nothing here may hide why the capture failed, so a graph that cannot be copied is left out.
    """
    if not isinstance(refusal, CaptureError):
        return
    graphs = [tracer for tracer in _tracers(cause) if any(n.op.startswith("call") for n in tracer.graph.nodes)]
    if not graphs:
        return
    try:
        tracer = max(graphs, key=lambda tracer: len(tracer.graph.nodes))
        refusal.reached = _copied(tracer)
        refusal.stopped_at = source_of(cause)
    except Exception:
        refusal.reached = None


def _tracers(error: BaseException) -> Iterator[fx.Tracer]:
    """Yield the tracers in the frames of an error and of what caused it."""
    current: BaseException | None = error
    while current is not None:
        for frame, _ in traceback.walk_tb(current.__traceback__):
            for value in list(frame.f_locals.values()):
                if isinstance(value, fx.Tracer) and isinstance(getattr(value, "graph", None), fx.Graph):
                    yield value
        current = current.__cause__ or current.__context__


def _copied(tracer: fx.Tracer) -> fx.GraphModule:
    """Return the graph of a tracer without the nodes at its end that make no tensor: the value that stopped it."""
    graph = fx.Graph()
    kept = list(tracer.graph.nodes)
    while kept and not isinstance(kept[-1].meta.get("val", torch.Tensor()), torch.Tensor):
        kept.pop()
    made: dict[fx.Node, fx.Node] = {}
    for node in kept:
        copy = made[node] = graph.node_copy(node, made.__getitem__)
        if stack := copy.meta.get("nn_module_stack"):
            copy.meta["nn_module_stack"] = OrderedDict(
                (key, (path.removeprefix(_ROOT).removeprefix("."), kind)) for key, (path, kind) in stack.items() if path
            )
    graph.output(made[kept[-1]] if kept else ())
    root = tracer.root if isinstance(tracer.root, nn.Module) else nn.Module()
    return fx.GraphModule(root, graph)
