"""Export with ``no_grad``, ``inference_mode`` and autocast blocks as the nodes that they are, not as hidden bodies.

torch.export's last two passes turn such blocks into higher-order ops, and lose a ``no_grad`` inside autocast or around
``torch.cond``: here they are left out. What tracing writes for a grad-mode block are constants, as the mode was at
capture; here each such node is marked with what wrote it, so that the end of a block restores what the caller has::

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
from splitkit.frontends.capture_errors import lost_data, lost_hook
from splitkit.frontends.gradflags import DATA_SETTERS, HOOKS, GradFlags

_MARK = "splitkit_block"
_LOCK = threading.RLock()  # export itself cannot run twice at a time either


@contextmanager
def blocks_as_nodes(flags: GradFlags) -> Iterator[None]:
    """Within, torch.export keeps blocks as nodes and marks them for `restore_callers_grad`.

    ``flags`` hears of ``requires_grad_``, which tracing loses; a hook on a gradient is refused (SK405).
    """
    writer: list[str] = []  # what is setting grad mode now, outermost first
    me = threading.get_ident()  # other threads set their own grad mode meanwhile

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
            raise lost_hook("the model hooks the gradient of a tensor")
        if func in DATA_SETTERS:
            raise lost_data()
        if flags.asked(func, args, kwargs):
            flags.set(args[0], mode.tracer)
        result = traced(mode, func, types, args, kwargs)
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


class Checkpointed:
    """Marks what a reentrant checkpoint computes. Only while `blocks_as_nodes` is open does that mean anything.

    Args:
        wants: whether an argument of the checkpoint requires grad; without one, no gradient reaches what is inside.
    """

    def __init__(self, wants: bool) -> None:
        self.wants = wants

    def __enter__(self) -> None:
        self.before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.wants)

    def __exit__(self, *why: object) -> None:
        torch._C._set_grad_enabled(self.before)


# `with set_grad_enabled(m)` sets the mode when it is made, and again when it is entered.
_WRITERS: tuple[tuple[Any, str, str], ...] = (
    (torch.no_grad, "__enter__", "begin"),
    (torch.enable_grad, "__enter__", "begin"),
    (torch.set_grad_enabled, "__init__", "make"),
    (torch.set_grad_enabled, "__enter__", "begin made"),
    *((kind, "__exit__", "end") for kind in (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)),
    (Checkpointed, "__enter__", "begin checkpoint"),
    (Checkpointed, "__exit__", "end checkpoint"),
)


def _enter_inference(writer: list[str], me: int) -> Callable[..., None]:
    """Inference mode is not traced; what it does to gradients is."""
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
    """Let the end of a marked block restore what was before it: the caller's mode for an outermost one. In place.

    Calls of ``torch.set_grad_enabled(mode)`` that begin no block stay what they are: they set the mode for good. A
    reentrant checkpoint takes no gradient where its caller takes none, so ``enable_grad`` inside it means the
    caller's mode, and what a call sets inside it ends with it.
    """
    nodes = [n for n in graph.nodes if n.target is _torch.SET_GRAD]
    if not any(_MARK in n.meta for n in nodes):
        return
    with graph.inserting_before(nodes[0]):
        callers = graph.call_function(torch.is_grad_enabled)
    modes = _Modes(callers)
    for node in nodes:
        how = node.meta.pop(_MARK, None)
        before = modes.now
        node.args = (modes.after(how, bool(node.args[0])),)
        if how in ("begin checkpoint", "end checkpoint") and before is modes.now:
            graph.erase_node(node)
    if not callers.users:
        graph.erase_node(callers)


class _Modes:
    """The grad mode along a graph: a constant, or the node that asks the caller.

    Attributes:
        now: the mode after the last node.
    """

    def __init__(self, callers: Node) -> None:
        self.now: bool | Node = callers
        self._before: list[bool | Node] = []  # what was before each block that is open
        self._made: list[bool | Node] = []  # and before each `set_grad_enabled` that is made and not entered
        self._most: list[bool | Node] = [True]  # what "on" means: in a checkpoint the mode that it was called under

    def after(self, how: str | None, mode: bool) -> bool | Node:
        """The mode after a node that ``how`` wrote to set ``mode``."""
        if how in ("end", "end checkpoint") and self._before:
            if how == "end checkpoint":
                self._most.pop()
            self.now = self._before.pop()
            return self.now
        if how in ("begin", "begin checkpoint"):
            self._before.append(self.now)
        elif how == "make":
            self._made.append(self.now)
        elif how == "begin made" and self._made:
            self._before.append(self._made.pop())
        if how == "begin checkpoint":
            self._most.append(mode and self.now)
        self.now = mode and self._most[-1]
        return self.now
