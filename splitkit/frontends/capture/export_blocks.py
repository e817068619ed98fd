"""Export ``no_grad``, ``inference_mode`` and autocast blocks as plain nodes, not as hidden bodies.

The last two passes of torch.export turn such blocks into higher-order ops, and lose a ``no_grad`` inside autocast or
around ``torch.cond``; these passes are skipped. For a grad-mode block, tracing records constants: the modes at capture.
Each such node is marked with what recorded it, so that the end of a block can restore the mode of the caller::

    with torch.no_grad():   set(False)  begin           prev = is_grad_enabled(); set(False)
        y = f(x)            y = f(x)              ==>    y = f(x)
    z = g(y)                set(True)   end             set(prev)

All names below are private to torch; checked on 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from splitkit import _torch
from splitkit.frontends.capture.capture_errors import lost_data_error, lost_hook_error
from splitkit.frontends.capture.grad_flags import DATA_SETTERS, HOOKS, GradFlags

_MARK = "splitkit_block"
_LOCK = threading.RLock()  # torch.export is not thread-safe either


@contextmanager
def blocks_as_nodes(flags: GradFlags) -> Iterator[None]:
    """Let torch.export keep blocks as nodes, marked for `restore_callers_grad`.

    Calls of ``requires_grad_``, which tracing loses, go to ``flags``; a hook on a gradient is refused (SK405).
    """
    writer: list[str] = []  # what is setting grad mode at the moment, outermost first
    me = threading.get_ident()  # grad modes of other threads do not matter

    def marked(how: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != me:
                return original(self, *args, **kwargs)
            writer.append(how)
            try:
                return original(self, *args, **kwargs)
            finally:
                writer.pop()

        return call

    traced = PreDispatchTorchFunctionMode.__torch_function__

    def trace(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in HOOKS:
            raise lost_hook_error("the model hooks the gradient of a tensor")
        if func in DATA_SETTERS:
            raise lost_data_error()
        if flags.sets_flag(func, args, kwargs):
            flags.set(args[0], mode.tracer)
        result = traced(mode, func, types, args, kwargs)
        # The outermost writer counts: `no_grad.__enter__` may call `set_grad_enabled.__init__`, which is marked too.
        if func is _torch.SET_GRAD and writer:
            next(iter(reversed(mode.tracer.graph.nodes))).meta[_MARK] = writer[0]
        return result

    with _LOCK, ExitStack() as stack:
        for name in ("replace_set_grad_with_hop_pass", "replace_autocast_with_hop_pass"):
            stack.enter_context(patch(f"torch._export.passes.{name}.{name}", lambda gm, signature: (gm, signature)))
        stack.enter_context(patch.object(PreDispatchTorchFunctionMode, "__torch_function__", trace))
        for kind, method, how in _WRITERS:
            stack.enter_context(patch.object(kind, method, marked(how, getattr(kind, method))))
        stack.enter_context(patch.object(torch.inference_mode, "__enter__", _enter_inference(writer, me)))
        stack.enter_context(patch.object(torch.inference_mode, "__exit__", _exit_inference(writer, me)))
        yield


class ReentrantCheckpoint:
    """Marks the nodes of a reentrant checkpoint while `blocks_as_nodes` is open.

    Args:
        wants: whether an argument of the checkpoint requires grad; otherwise no gradient reaches its inside.
    """

    def __init__(self, wants: bool) -> None:
        self.wants = wants

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.wants)

    def __exit__(self, *why: object) -> None:
        torch._C._set_grad_enabled(self.before)


# `with set_grad_enabled(m)` sets the mode when it is constructed, and again when it is entered.
_WRITERS: tuple[tuple[Any, str, str], ...] = (
    (torch.no_grad, "__enter__", "begin"),
    (torch.enable_grad, "__enter__", "begin"),
    (torch.set_grad_enabled, "__init__", "make"),
    (torch.set_grad_enabled, "__enter__", "begin made"),
    *((kind, "__exit__", "end") for kind in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)),
    (ReentrantCheckpoint, "__enter__", "begin checkpoint"),
    (ReentrantCheckpoint, "__exit__", "end checkpoint"),
)


def _enter_inference(writer: list[str], me: int) -> Callable[..., None]:
    """Return an ``__enter__`` that records the grad mode of inference mode, which tracing itself does not record."""
    original = torch.inference_mode.__enter__

    def enter(self: Any) -> None:
        self._splitkit_before = torch.is_grad_enabled()
        original(self)
        if threading.get_ident() == me:
            _set_grad(writer, "begin", not self.mode)

    return enter


def _exit_inference(writer: list[str], me: int) -> Callable[..., None]:
    original = torch.inference_mode.__exit__

    def leave(self: Any, *why: Any) -> None:
        original(self, *why)
        if threading.get_ident() == me:
            _set_grad(writer, "end", self._splitkit_before)

    return leave


def _set_grad(writer: list[str], how: str, mode: bool) -> None:
    writer.append(how)
    try:
        torch._C._set_grad_enabled(mode)
    finally:
        writer.pop()


def restore_callers_grad(graph: fx.Graph) -> None:
    """Let the end of each marked block restore the mode before it; for an outermost block, the caller's mode. In place.

    Calls of ``torch.set_grad_enabled(mode)`` outside of a ``with`` stay as they are: they set the mode for good. A
    reentrant checkpoint computes no gradient where its caller computes none, so ``enable_grad`` inside it means the
    caller's mode, and a mode set inside it ends with it.
    """
    nodes = [n for n in graph.nodes if n.target is _torch.SET_GRAD]
    if not any(_MARK in n.meta for n in nodes):
        return
    with graph.inserting_before(nodes[0]):
        callers = graph.call_function(torch.is_grad_enabled)
    modes = _GradModes(callers)
    for node in nodes:
        how = node.meta.pop(_MARK, None)
        # An end that sets the mode of a checkpoint which changed nothing needs no node.
        before = modes.now
        node.args = (modes.after(how, bool(node.args[0])),)
        if how in ("begin checkpoint", "end checkpoint") and before is modes.now:
            graph.erase_node(node)
    if not callers.users:
        graph.erase_node(callers)


class _GradModes:
    """The grad mode along a graph: a constant, or the node that reads the caller's mode.

    Attributes:
        now: the mode after the last node.
    """

    def __init__(self, callers: Node) -> None:
        self.now: bool | Node = callers
        self._before: list[bool | Node] = []  # the mode before each open block
        self._made: list[bool | Node] = []  # the mode before each `set_grad_enabled` that is not entered yet
        self._on: list[bool | Node] = [True]  # what "on" means: in a checkpoint, the mode of its caller

    def after(self, how: str | None, mode: bool) -> bool | Node:
        """Return the mode after a node that sets ``mode``, where ``how`` is the mark of the node."""
        if how in ("end", "end checkpoint") and self._before:
            if how == "end checkpoint":
                self._on.pop()
            self.now = self._before.pop()
            return self.now
        if how in ("begin", "begin checkpoint"):
            self._before.append(self.now)
        elif how == "make":
            self._made.append(self.now)
        elif how == "begin made" and self._made:
            self._before.append(self._made.pop())
        if how == "begin checkpoint":
            self._on.append(mode and self.now)
        # off is off everywhere; on is at most what the innermost checkpoint allows
        self.now = mode and self._on[-1]
        return self.now
