"""Change torch's global settings while it traces: loggers, warnings, partial graphs, Dynamo's globals, oneDNN, ops."""

from __future__ import annotations

import builtins
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from functools import partial
from io import StringIO
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._C import DispatchKey  # 2.11, 2.13, 2.15
from torch._decomp import global_decomposition_table  # 2.11, 2.13, 2.15
from torch._dynamo import symbolic_convert  # TensorifyState: 2.11, 2.13, 2.15
from torch._dynamo.exc import TensorifyScalarRestartAnalysis  # 2.11, 2.13, 2.15

from splitkit import _torch
from splitkit.memory.kernels.target_kernels import CPU, attention

_LOG_METHODS = ("debug", "info", "warn", "error", "exception", "critical", "fatal", "log", "isEnabledFor")
_IGNORE_SETTINGS = ("ignore_logging_functions", "ignore_logger_methods")  # 2.13, 2.15; 2.11


class _Unlisted(set[Any]):
    """A set that iterates as empty: torch 2.11 sorts settings and writes them as JSON to its log, which fails here."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def without_logging() -> AbstractContextManager[None]:
    """Let Dynamo skip calls that log, warn or print, at which it would otherwise break the graph.

    ``logger.isEnabledFor`` is skipped too, since it guards logging.
    """
    config: Any = torch._dynamo.config
    name = next(name for name in _IGNORE_SETTINGS if hasattr(config, name))
    ignored = _Unlisted({*getattr(config, name), *_logging_functions()})
    return cast(AbstractContextManager[None], config.patch({name: ignored}))


def with_gradients_on_meta() -> AbstractContextManager[None]:
    """Let autograd see what ``nll_loss``, ``where`` and other composite ops call on ``meta``.

    Torch's Python dispatcher runs their shape functions there, which have no backward: the gradients of a cross entropy
    would be missing from the graph, and torch only warns.
    """
    kernels: dict[Any, Callable[..., Any]] = {}
    for op in cast(Any, global_decomposition_table["post_autograd"]):
        known = getattr(op, "py_kernels", {})  # 2.11, 2.13, 2.15
        if DispatchKey.Meta in known and DispatchKey.AutogradMeta not in known and _torch.is_composite(op):
            kernels[op] = op.decompose
    return _with_kernels_on_meta(kernels)


def with_attention_on_meta() -> AbstractContextManager[None]:
    """Let attention on ``meta`` have the results of the CPU's kernels, with strides as on GPUs.

    Torch takes its ops one by one there, and what a model does next copies their result: a graph from ``meta`` had two
    nodes, and the bytes of a copy, more than one from the CPU.
    """
    op = torch.ops.aten.scaled_dot_product_attention.default
    again = DispatchKey.AutogradMeta in op.py_kernels  # one capture within another
    return _with_kernels_on_meta({} if again else {op: partial(attention, CPU, _one_by_one)})


@contextmanager
def _with_kernels_on_meta(kernels: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    key = DispatchKey.AutogradMeta
    for op, kernel in kernels.items():
        op.py_impl(key)(kernel)
    try:
        yield
    finally:
        for op in kernels:
            del op.py_kernels[key]  # 2.11, 2.13, 2.15
            op._dispatch_cache.clear()


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, **options: Any) -> Tensor:
    made: Tensor = torch.ops.aten._scaled_dot_product_attention_math.default(query, key, value, attn_mask, **options)[0]
    return made


@contextmanager
def without_partial_graph() -> Iterator[None]:
    """Drop the partial graph that a failing ``torch.export`` prints to stderr, twice (2.13, 2.15).

    All other output to stderr is printed at the end.
    """
    written, graph = StringIO(), None
    try:
        with redirect_stderr(written):
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", None)
        raise
    finally:
        text = written.getvalue()
        sys.stderr.write(text if graph is None else text.replace(f"{graph}\n", ""))


@contextmanager
def without_meta_errors() -> Iterator[None]:
    """Keep torch from logging an error of a fake tensor, with a long traceback, before it raises that error.

    Checked on torch 2.11, 2.13 and 2.15.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(_is_no_meta_error)
    try:
        yield
    finally:
        log.removeFilter(_is_no_meta_error)


def _is_no_meta_error(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


def _logging_functions() -> Iterator[Callable[..., Any]]:
    """Yield all functions that log, also methods that libraries added to loggers (``warning_once``)."""
    yield from (builtins.print, warnings.warn)
    for kind in (logging.Logger, *subclasses_of(logging.Logger)):
        for name, value in vars(kind).items():
            if name.startswith(_LOG_METHODS) and callable(value):
                yield value


def subclasses_of(kind: Any) -> Iterator[Any]:
    """Yield the subclasses of a class, and theirs."""
    for below in kind.__subclasses__():
        yield below
        yield from subclasses_of(below)


def as_in_export() -> AbstractContextManager[None]:
    """Let models take the branches that they take in ``torch.export``, outside of it (2.11, 2.13, 2.15)."""
    from torch._export.utils import _compiling_state_context

    return _compiling_state_context()


@contextmanager
def as_in_steps() -> Iterator[None]:
    """Let dynamic sizes be 0 and 1 too, which a graph would otherwise refuse, and let fake tensors compute each result.

    To cache results takes longer than it saves where sizes are dynamic.
    """
    from torch.fx.experimental import _config

    sizes, results = cast(Any, _config), cast(Any, torch._dynamo.config)  # 2.11, 2.13, 2.15
    with sizes.patch(backed_size_oblivious=True), results.patch(fake_tensor_cache_enabled=False):
        yield


@contextmanager
def without_globals(function: Callable[..., Any]) -> Iterator[None]:
    """Remove what Dynamo adds to the globals of a function, which would keep model and inputs alive forever."""
    names: dict[str, Any] = function.__globals__
    before = names.keys() | set()
    try:
        yield
    finally:
        for name in names.keys() - before:  # __compiled_fn_..: 2.11, 2.13, 2.15
            del names[name]


@contextmanager
def scalar_writes_kept(graph: fx.Graph, own: set[str]) -> Iterator[None]:
    """Compile a graph of Dynamo without letting AOTAutograd ask for another one, which would lack writes.

    A 0-dim float64 tensor on the CPU may stand for a Python number. If no node uses that number, AOTAutograd lets
    Dynamo trace again without it, and Dynamo then drops every node of that value without users: the write of
    ``self.total.add_(1)``, with each backend of torch but ``"eager"`` (2.13).

    Args:
        graph: the graph.
        own: names of the numbers of which earlier tries to compile this graph asked; modified in place. Torch does not
            forget what was asked for other graphs: if there is more, Dynamo traces again without that.
    """
    state = getattr(symbolic_convert, "TensorifyState", None)
    asked: set[str] = getattr(state, "force_specializations", set())
    if asked - own:
        asked.clear()
        own.clear()
        raise TensorifyScalarRestartAnalysis
    values = ((n, getattr(n.meta.get("example_value"), "item_memo", None)) for n in graph.find_nodes(op="placeholder"))
    names = {
        str(number.node._expr)
        for node, number in values
        if isinstance(number, torch.SymFloat) and any(user.target != "item" for user in node.users)
    } - asked
    asked |= names
    try:
        yield
    except BaseException:
        asked -= names
        own |= asked
        raise
    asked.clear()
    own.clear()
