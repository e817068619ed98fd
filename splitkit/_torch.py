"""The private names of torch that the core needs, in one place.

They were checked on torch 2.11, 2.13 and 2.15; ``tests/project/test_torch_private.py`` fails when one of them
disappears. The package ``frontends`` uses some more of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn
from torch._functorch import vmap as _functorch_vmap  # 2.11, 2.13, 2.15
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # 2.11, 2.13, 2.15
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx import _lazy_graph_module
from torch.utils import _pytree as pytree  # the public torch.utils.pytree lacks paths (2.11)
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11, 2.13, 2.15
from torch.utils._python_dispatch import _disable_current_modes as without_modes  # 2.11, 2.13, 2.15

from splitkit._gc import paused_collector

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "OpOverloadPacket",
    "TorchDispatchMode",
    "pytree",
    "without_modes",
]

# Dynamo and pre-dispatch graphs write these targets for `with` blocks (2.11, 2.13, 2.15).
ENTER_AUTOCAST: Any = torch.amp._enter_autocast  # type: ignore[attr-defined]
EXIT_AUTOCAST: Any = torch.amp._exit_autocast  # type: ignore[attr-defined]
SET_GRAD: Any = torch._C._set_grad_enabled
ENTER_INFERENCE: Any = _enter_inference_mode
EXIT_INFERENCE: Any = _exit_inference_mode
ENTER_RECORD: Any = torch.ops.profiler._record_function_enter_new
ENTER_OLD_RECORD: Any = torch.ops.profiler._record_function_enter
EXIT_RECORD: Any = torch.ops.profiler._record_function_exit
# The stack of torch.autograd.graph.saved_tensors_hooks (2.11, 2.13, 2.15).
PUSH_HOOKS: Any = torch._C._autograd._push_saved_tensors_default_hooks
POP_HOOKS: Any = torch._C._autograd._pop_saved_tensors_default_hooks
# Other calls in Dynamo's graphs that set a value of the ambient state (2.11, 2.13, 2.15).
IS_FWD_GRAD: Any = torch._C._is_fwd_grad_enabled
SET_FWD_GRAD: Any = torch._C._set_fwd_grad_enabled
FORBID_HOOKS: Any = torch._C._autograd._saved_tensors_hooks_disable
ALLOW_HOOKS: Any = torch._C._autograd._saved_tensors_hooks_enable
HOOKS_MESSAGE: Any = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
# The wrapped tensors that torch.func passes to the function that it transforms (2.11, 2.13, 2.15).
_functorch: Any = torch._C._functorch
# The layout of torch.Tensor.to_mkldnn (2.11, 2.13, 2.15).
MKLDNN: Any = torch._mkldnn  # type: ignore[attr-defined]
SET_DETERMINISTIC: Any = torch._C._set_deterministic_algorithms


# A CUDA kernel that only waits for a number of cycles, and the view for which is_neg() is true (2.11, 2.13, 2.15).
CUDA_SLEEP: Any = torch.cuda._sleep
NEG_VIEW: Any = torch._neg_view


class Attributes(NamedTuple):
    """The tables of a module by name; changing a table changes the module."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    modules: dict[str, nn.Module | None]
    unsaved: set[str]


def attributes_of(module: nn.Module) -> Attributes:
    """Return the tables of a module, including entries that are None and aliases (2.11, 2.13, 2.15).

    TorchScript's modules have tables of their own, which are no dicts: they are copied.
    """
    parameters, buffers, modules = module._parameters, module._buffers, module._modules
    if isinstance(module, torch.jit.ScriptModule):
        parameters, buffers, modules = dict(parameters.items()), dict(buffers.items()), dict(modules.items())
    return Attributes(parameters, buffers, modules, module._non_persistent_buffers_set)


def member_of(owner: object, name: str) -> Any:
    """Return ``getattr(owner, name)``, at a third of its cost for children of modules (2.11, 2.13, 2.15).

    Python finds a child only after all other places have failed, by the slow call ``nn.Module.__getattr__``.
    """
    if isinstance(owner, nn.Module):
        held = owner.__dict__
        children = held["_modules"]
        child = children.get(name) if type(children) is dict else None  # TorchScript's is no dict
        if child is not None and name not in held:
            for kind in type(owner).__mro__:
                if name in kind.__dict__:
                    break
            else:
                return child
    return getattr(owner, name)


def inputs_of(node: fx.Node) -> Collection[fx.Node]:
    """Return ``node.all_input_nodes`` without a copy (2.11, 2.13, 2.15)."""
    return node._input_nodes.keys()


_LIBRARY = torch.library.Library("splitkit", "FRAGMENT")  # type: ignore[no-untyped-call]


def define_op(
    schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], *, inference: bool = False, **options: str
) -> Any:
    """Define an operator of ``torch.ops.splitkit`` and return its overload; nothing in this is private to torch.

    Args:
        schema: its name, arguments and results.
        kernel: what it does, on all devices.
        fake: the same on fake tensors.
        inference: whether it runs for inference only: torch would warn of gradients when a plan looks for them.
        options: further options of ``torch.library.Library.define``.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, **options)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    if inference:
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"splitkit::{name}", fake, lib=_LIBRARY, allow_override=True)
    return getattr(torch.ops.splitkit, name).default


def schema_of(op: Any) -> Any:
    """Return the schema of an overload: name, arguments, returns (2.11, 2.13, 2.15)."""
    return op._schema


def is_written(argument: Any) -> bool:
    """Return whether an argument of a schema is one that its op writes to (``alias_info``: 2.11, 2.13, 2.15)."""
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def written_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call that an overload writes to by its schema; ``None`` for those left out."""
    written = [(i, a.name) for i, a in enumerate(schema_of(op).arguments) if is_written(a)]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written]


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether autograd treats a tensor as a view (2.11, 2.13, 2.15)."""
    return tensor._is_view()


def is_dispatched() -> bool:
    """Return whether a ``__torch_dispatch__`` mode is active, as in tracing (2.11, 2.13, 2.15)."""
    return bool(torch._C._len_torch_dispatch_stack())


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that have the memory of a tensor: the inner ones of a wrapper or a sparse layout."""
    if _functorch.is_functorch_wrapped_tensor(tensor):
        yield from plain_tensors(_functorch.get_unwrapped(tensor))
    elif hasattr(tensor, "__tensor_flatten__"):
        inner = (getattr(tensor, name) for name in cast(Any, tensor).__tensor_flatten__()[0])
        for held in inner:
            if isinstance(held, torch.Tensor):  # a DTensor names its mesh as well: 2.13
                yield from plain_tensors(held)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # the public ones need a coalesced tensor: 2.11, 2.13, 2.15
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


def storage_id(storage: torch.UntypedStorage) -> int:
    """Return a number that is equal for handles of one storage, while it lives (2.11, 2.13, 2.15)."""
    return int(storage._cdata)


def set_hooks_message(message: str | None) -> None:
    """Restore what ``HOOKS_MESSAGE()`` returned: why saved-tensors hooks are forbidden, ``None`` if they are not."""
    if message is None:
        ALLOW_HOOKS()
    else:
        FORBID_HOOKS(message)


def deterministic() -> tuple[bool, bool]:
    """Return whether deterministic algorithms are required, and whether a missing one only warns."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def set_deterministic(value: tuple[bool, bool]) -> None:
    """Restore what `deterministic` returned."""
    SET_DETERMINISTIC(value[0], warn_only=value[1])


def spellings(target: Any) -> tuple[Any, ...]:
    """Return all targets of one operator: for a custom one its definition, its packet and its overloads."""
    overload = getattr(target, "_opoverload", target)  # for torch.library.custom_op: 2.11, 2.13, 2.15
    packet: Any = overload.overloadpacket if isinstance(overload, OpOverload) else overload
    if not isinstance(packet, OpOverloadPacket):
        return (target,)
    return (target, packet, *(getattr(packet, name) for name in cast(Any, packet).overloads()))


# A GraphModule that generates its code when it is first called (2.11, 2.13, 2.15).
LazyGraphModule: Any = _lazy_graph_module._LazyGraphModule


def wants_lazy_code() -> bool:
    """Return whether torch's ``_use_lazy_graph_module(True)`` is active."""
    return _lazy_graph_module._get_graph_module_cls() is LazyGraphModule


def codegen_of(graph: fx.Graph) -> Any:
    """Return a copy of a graph's code generator, which has the pytree signature; there is no public getter."""
    return copy.copy(graph._codegen)


def pytree_codegen(names: list[str], ins: Any, outs: Any) -> Any:
    """Make a code generator as in graphs of ``torch.export``, from input names and the pytrees of inputs and outputs.

    2.11, 2.13, 2.15; ``tests/project/test_torch_private.py`` fails when it disappears.
    """
    from torch.fx import graph

    return graph._PyTreeCodeGen(graph._PyTreeInfo(names, ins, outs))


def size_hint(value: object) -> int:
    """Return a plain int for an int or a ``SymInt``: the value seen at capture.

    Raises:
        TypeError: for an unbacked symbol, whose value depends on the data.
    """
    if isinstance(value, int):
        return value
    node = cast(Any, value).node  # SymInt.node.hint: 2.11, 2.13, 2.15
    if node.hint is None:
        raise TypeError(f"{value} depends on data: it has no size before the model runs")
    return int(node.hint)


def is_composite(op: OpOverload) -> bool:
    """Return whether the dispatcher decomposes an op into others: ``linear`` and ``dropout``, but not ``addmm``."""
    keys = torch._C._dispatch_has_kernel_for_dispatch_key  # 2.11, 2.13, 2.15
    return bool(keys(cast(Any, op).name(), "CompositeImplicitAutograd"))


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place; 0 where torch does not count (2.11, 2.13, 2.15)."""
    return 0 if tensor.is_inference() else tensor._version


def has_kernel(target: Any, kind: str) -> bool:
    """Return whether torch has code, be it a fallback, for a node's target on a type of device."""
    if not isinstance(target, OpOverload):
        return True
    key = torch._C._dispatch_key_for_device(kind)
    return bool(
        torch._C._dispatch_has_computed_kernel_for_dispatch_key(cast(Any, target).name(), key)
    )  # 2.11, 2.13, 2.15


def meta_of(module: nn.Module) -> dict[str, Any]:
    """Return ``GraphModule.meta``, which type checkers take for a submodule."""
    return cast(dict[str, Any], getattr(module, "meta", {}))


def qualified_name(target: Any) -> str:
    """Return the dotted name of a function in the code of a graph (2.11, 2.13, 2.15)."""
    try:
        return fx.node._get_qualified_name(target)
    except Exception:
        return str(getattr(target, "__name__", target))


def operator_in(target: Any) -> Any:
    """Return the operator that an operator of ExecuTorch's edge dialect wraps (1.5), and any other target itself."""
    wrapped = getattr(target, "_op", None) if type(target).__name__ == "EdgeOpOverload" else None
    return wrapped if isinstance(wrapped, OpOverload) else target


def mark_impure(module: nn.Module) -> None:
    """Let fx's dead code elimination keep calls of a module whose results nobody reads (2.11, 2.13, 2.15)."""
    module._is_impure = True  # type: ignore[assignment]


def target_name(node: fx.Node) -> str:
    """Return the name of a node's target: ``aten.linear.default``, ``_operator.getitem``, ``h.0.weight``."""
    target = node.target
    if isinstance(target, str | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", type(target).__name__)
    place = getattr(target, "__module__", None)
    return f"{place}.{name}" if place else str(name)


def rename(names: Mapping[fx.Node, str]) -> None:
    """Rename nodes of a graph, also to the old names of each other; ``Node._rename`` would avoid a name that is taken.

    Args:
        names: node -> its new name; the names differ, and no other node of the graph has one of them.
    """
    for node, name in names.items():
        node.name = name
        node.graph._graph_namespace._rename_object(node, name)  # 2.11, 2.13, 2.15


def fake_mode() -> FakeTensorMode:
    """Make a fake mode that accepts real parameters, and whose results do not depend on what ran before.

    Torch caches results of ops for all fake modes of a process, and rebuilds a cached tensor from its strides. If its
    storage is larger than the tensor, the rebuilt storage has another size. The cache is therefore disabled.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # 2.11, 2.13, 2.15
    return mode


_vmap: Any = _functorch_vmap
# What ``torch.vmap`` calls, and what a captured one leaves in a graph (2.11, 2.13, 2.15).
OPEN_VMAP: Any = (torch._C._functorch._vmap_increment_nesting, _vmap._vmap_increment_nesting)
CLOSE_VMAP: Any = (torch._C._functorch._vmap_decrement_nesting, _vmap._vmap_decrement_nesting)


def functorch_depth() -> int:
    """Return the number of open levels of functorch (``vmap``, ``grad``)."""
    return len(torch._C._functorch.get_interpreter_stack() or ())  # 2.11, 2.13, 2.15


@contextmanager
def levels_closed() -> Iterator[None]:
    """Close the levels of functorch that a block leaves open, as a trace or run does that fails inside a ``vmap``."""
    depth = functorch_depth()
    try:
        yield
    finally:
        if functorch_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)  # 2.11, 2.13, 2.15


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the memory of a functorch tensor: for ``vmap``, the whole batch."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # 2.11, 2.13, 2.15
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def allocations_between(run: Callable[[], Any], prefix: str) -> list[list[int]]:
    """Return the bytes that the CPU allocator allocated (positive) and freed (negative) during ``run()``, in order.

    The first list has those before the first ``record_function`` whose name has this prefix, the next those in it, and
    so on; the last list has those after the last one. The result of ``run`` is still alive at the end.

    The public profiler only has sums by op, which do not give a peak, and in 2.13 and 2.15 it writes two lines to
    standard error each time; the legacy one (2.11, 2.13, 2.15) does not.

    Args:
        run: what to run.
        prefix: the start of the names; empty for one group of all.
    """
    profiler: Any = torch.autograd
    config = profiler.ProfilerConfig(
        profiler.ProfilerState.CPU,
        False,  # shapes
        True,  # memory
        False,  # stack
        False,  # FLOPs
        False,  # modules
        torch._C._profiler._ExperimentalConfig(),
    )
    result: Any = None
    # Freeing older garbage would count as freed bytes, so the collector is paused until the profiler is off. Its count
    # of new objects goes on while it is paused, so it may run at the first object after that.
    with paused_collector():
        profiler._enable_profiler_legacy(config)
        try:
            result = run()
        finally:
            threads = profiler._disable_profiler_legacy()
        del result
    groups: list[list[int]] = [[]]
    depth, inside = 0, -1  # -1: outside all such ranges
    for event in (event for events in threads for event in events):
        kind = event.kind()
        if kind == "memory_alloc":
            groups[-1].append(event.cpu_memory_usage())
        elif kind == "push":
            depth += 1
            if prefix and inside < 0 and event.name().startswith(prefix):
                groups.append([])
                inside = depth
        elif kind == "pop":
            if depth == inside:
                groups.append([])
                inside = -1
            depth -= 1
    return groups


def action_schedule(
    stages: list[Any], count: int, loss: Any, ranks: Iterable[Iterable[object]], messages: bool = False
) -> Any:
    """Make a pipeline schedule that runs actions, of the base class of all schedules with several stages per rank.

    2.11, 2.13, 2.15; ``tests/project/test_torch_private.py`` fails when it disappears.

    Args:
        stages: the stages of this rank.
        count: the number of microbatches.
        loss: torch's ``loss_fn``; ``None`` to drop the actions of backward, after they were checked.
        ranks: the actions of each rank in order, forward and backward, as torch writes them.
        messages: whether these include the sends and receives; otherwise torch adds them.
    """
    from torch.distributed.pipelining import schedules

    runtime: Any = schedules._PipelineScheduleRuntime
    read: Any = schedules._Action.from_str
    made = runtime(stages, count, loss_fn=loss, scale_grads=False)
    rows = [list(map(str, row)) for row in ranks]
    if messages and hasattr(schedules._ComputationType, "WAIT_SEND_F"):  # since 2.15
        rows = [_with_waits(row) for row in rows]
    form = "compute_comms" if messages else "compute_only"
    made._prepare_schedule_with_comms({rank: list(map(read, row)) for rank, row in enumerate(rows)}, format=form)
    if loss is None:
        kept = ("FORWARD", "SEND_F", "RECV_F", "WAIT_SEND_F")  # the last since 2.15
        rows = made.pipeline_order_with_comms.items()
        made.pipeline_order_with_comms = {r: [a for a in row if a.computation_type.name in kept] for r, row in rows}
    return made


def _with_waits(row: Iterable[str]) -> list[str]:
    """Insert the waits for sends that torch 2.15 requires: before the backward that answers, else at the end.

    A row that has such waits is left as it is.
    """
    row = list(row)
    if any("WAIT_SEND" in action for action in row):
        return row
    made, sent = list[str](), list[str]()
    for action in row:
        if (wait := action.replace("B", "WAIT_SEND_F")) in sent:
            made.append(wait)
            sent.remove(wait)
        made.append(action)
        if "SEND" in action:
            sent.append(action.replace("SEND", "WAIT_SEND"))
    return made + sent


def default_store() -> Any:
    """Return the store of the default process group (2.11, 2.13, 2.15)."""
    from torch.distributed import distributed_c10d

    found: Any = distributed_c10d._get_default_store
    return found()


def timeout_of(group: Any) -> Any:
    """Return the time limit of a process group (``None``: the default group), since ``new_group`` would use 30 minutes.

    2.11, 2.13, 2.15.
    """
    from torch import distributed as dist

    found: Any = group if group is not None else dist.group.WORLD
    return getattr(getattr(found._get_backend(found._device_types[0]), "options", None), "_timeout", None)


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called, or ``torch.compile`` returned the module (2.11, 2.13, 2.15)."""
    found: Any = module
    return found._compiled_call_impl is not None or hasattr(module, "_orig_mod")


@contextmanager
def without_onednn() -> Iterator[None]:
    """Turn oneDNN off: its LSTM saves values for backward that its fake kernel does not show. It is then decomposed."""
    before = torch._C._get_mkldnn_enabled()  # torch.backends.mkldnn.flags warns of TF32: 2.11, 2.13, 2.15
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def without_tracing() -> AbstractContextManager[Any]:
    """Let tracers record nothing: what is called within leaves no nodes in the graph that is being made."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing  # 2.11, 2.13, 2.15

    return disable_proxy_modes_tracing()


def group_of_dimensions(mesh: Any, *names: str) -> Any:
    """Return the process group of the ranks along several dimensions of a mesh together, the last running fastest."""
    return mesh[names]._flatten("_".join(names)).get_group()  # 2.11, 2.13, 2.15


def group_of_name(name: str) -> Any:
    """Return the process group that collectives in graphs find by a name; ``None`` if there is none."""
    from torch.distributed import distributed_c10d

    private: Any = distributed_c10d
    try:
        return private._resolve_process_group(name)  # 2.11, 2.13, 2.15
    except RuntimeError:
        return None


def ranks_of_group(name: str) -> tuple[int, ...]:
    """Return the ranks of the process group that collectives in graphs find by a name; empty if there is none."""
    from torch.distributed import get_process_group_ranks

    return () if (group := group_of_name(name)) is None else tuple(get_process_group_ranks(group))


def name_group(name: str, group: Any) -> None:
    """Let collectives in graphs find a process group by another name, until it is destroyed (2.11, 2.13, 2.15)."""
    from torch.distributed import distributed_c10d

    private: Any = distributed_c10d
    private._register_process_group(name, group)
