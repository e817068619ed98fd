"""The private torch names that the core cannot do without, in one place.

Checked on torch 2.11, 2.13 and 2.15; ``tests/test_torch_private.py`` fails when one of them goes away. Capture and
the joint-graph door hold their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket  # 2.11, 2.13, 2.15
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # 2.11, 2.13, 2.15
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx import _lazy_graph_module
from torch.fx import graph_module as _graph_module
from torch.nn.modules import module as _module
from torch.utils import _pytree as pytree  # the public torch.utils.pytree lacks paths (2.11)

from splitkit._gc import collector_at_rest

__all__ = ["FakeTensor", "FakeTensorMode", "HigherOrderOperator", "OpOverload", "OpOverloadPacket", "pytree"]

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
TOP_HOOKS: Any = torch._C._autograd._top_saved_tensors_default_hooks
# What else Dynamo writes as calls that overwrite a value (2.11, 2.13, 2.15).
IS_FWD_GRAD: Any = torch._C._is_fwd_grad_enabled
SET_FWD_GRAD: Any = torch._C._set_fwd_grad_enabled
FORBID_HOOKS: Any = torch._C._autograd._saved_tensors_hooks_disable
ALLOW_HOOKS: Any = torch._C._autograd._saved_tensors_hooks_enable
HOOKS_MESSAGE: Any = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
# Tensors as torch.func hands them to the function that it transforms (2.11, 2.13, 2.15).
_functorch: Any = torch._C._functorch
# The layout of torch.Tensor.to_mkldnn (2.11, 2.13, 2.15).
MKLDNN: Any = torch._mkldnn  # type: ignore[attr-defined]
SET_DETERMINISTIC: Any = torch._C._set_deterministic_algorithms


# An empty kernel of so many cycles, and the view that is_neg() says (2.11, 2.13, 2.15).
CUDA_SLEEP: Any = torch.cuda._sleep
NEG_VIEW: Any = torch._neg_view


class Attributes(NamedTuple):
    """What a module itself holds, by name; changing a dictionary changes the module."""

    parameters: dict[str, nn.Parameter | None]
    buffers: dict[str, torch.Tensor | None]
    modules: dict[str, nn.Module | None]
    unsaved: set[str]


def attributes_of(module: nn.Module) -> Attributes:
    """The tables of `nn.Module`, also entries that are None and names that mean one thing (2.11, 2.13, 2.15)."""
    return Attributes(module._parameters, module._buffers, module._modules, module._non_persistent_buffers_set)


def inputs_of(node: fx.Node) -> Collection[fx.Node]:
    """``node.all_input_nodes`` without a copy: 2.11, 2.13, 2.15."""
    return node._input_nodes.keys()


def make_wrapper(kind: Any, size: Any, dtype: torch.dtype) -> Any:
    """A tensor of a subclass that has a size and no memory of its own (2.11, 2.13, 2.15)."""
    return torch.Tensor._make_wrapper_subclass(kind, size, dtype=dtype)


def schema_of(op: Any) -> Any:
    """The schema of an overload: name, arguments, returns (2.11, 2.13, 2.15)."""
    return op._schema


def is_view(tensor: torch.Tensor) -> bool:
    """Whether autograd knows it as a view (2.11, 2.13, 2.15)."""
    return tensor._is_view()


def is_dispatched() -> bool:
    """Whether a mode of ``__torch_dispatch__`` is at work, as in tracing: it sees operators (2.11, 2.13, 2.15)."""
    return bool(torch._C._len_torch_dispatch_stack())


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold the memory of one: those inside wrapper subclasses, ``torch.func`` and sparse layouts."""
    if _functorch.is_functorch_wrapped_tensor(tensor):
        yield from plain_tensors(_functorch.get_unwrapped(tensor))
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in cast(Any, tensor).__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # the public ones want a coalesced tensor: 2.11, 2.13, 2.15
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
    else:
        yield tensor


def storage_id(storage: torch.UntypedStorage) -> int:
    """Equal for handles of one storage, while it lives (2.11, 2.13, 2.15)."""
    return int(storage._cdata)


def set_hooks_message(message: str | None) -> None:
    """Put back what ``HOOKS_MESSAGE()`` gave: why saved-tensors hooks are forbidden, ``None`` if they are not."""
    if message is None:
        ALLOW_HOOKS()
    else:
        FORBID_HOOKS(message)


def deterministic() -> tuple[bool, bool]:
    """Whether deterministic algorithms are in force, and whether a lack of one only warns."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def set_deterministic(value: tuple[bool, bool]) -> None:
    """Put back what `deterministic` gave."""
    SET_DETERMINISTIC(value[0], warn_only=value[1])


def spellings(target: Any) -> tuple[Any, ...]:
    """The targets that mean it: a custom operator is the object that was defined, its packet and its overloads."""
    overload = getattr(target, "_opoverload", target)  # of torch.library.custom_op: 2.11, 2.13, 2.15
    packet: Any = overload.overloadpacket if isinstance(overload, OpOverload) else overload
    if not isinstance(packet, OpOverloadPacket):
        return (target,)
    return (target, packet, *(getattr(packet, name) for name in cast(Any, packet).overloads()))


# A GraphModule that makes its code when it is first called, and torch's own switch for it (2.11, 2.13, 2.15).
LazyGraphModule: Any = _lazy_graph_module._LazyGraphModule


# The hooks that apply to every module; dictionaries that nn.Module.__call__ asks (2.11, 2.13, 2.15).
HOOKS_OF_ALL_MODULES: tuple[dict[int, Any], ...] = (
    _module._global_forward_hooks,
    _module._global_forward_pre_hooks,
    _module._global_backward_hooks,
    _module._global_backward_pre_hooks,
)


def unpickled(kind: type[fx.GraphModule], body: dict[str, Any], imports: str) -> fx.GraphModule:
    """What ``GraphModule.__reduce__`` has saved, as a module of a class of ours: 2.11, 2.13, 2.15."""
    forward = _graph_module._forward_from_src(imports + body["_code"], {})
    return cast(fx.GraphModule, _graph_module._deserialize_graph_module(forward, body, kind))


def wants_lazy_code() -> bool:
    """Whether torch's ``_use_lazy_graph_module(True)`` is in force."""
    return _lazy_graph_module._get_graph_module_cls() is LazyGraphModule


def codegen_of(graph: fx.Graph) -> Any:
    """A copy of the code generator of a graph, which holds the pytree signature; there is no public getter."""
    return copy.copy(graph._codegen)


def pytree_codegen(names: list[str], ins: Any, outs: Any) -> Any:
    """A code generator as graphs of ``torch.export`` have: names of the inputs, and the forms of inputs and outputs.

    2.11, 2.13, 2.15; ``tests/test_torch_private.py`` fails when it goes away.
    """
    from torch.fx import graph

    return graph._PyTreeCodeGen(graph._PyTreeInfo(names, ins, outs))


def size_hint(value: object) -> int:
    """A plain int for an int or a ``SymInt``: the value seen at capture.

    Raises ``TypeError`` for a symbol that only the data decides (unbacked).
    """
    if isinstance(value, int):
        return value
    node = cast(Any, value).node  # SymInt.node.hint: 2.11, 2.13, 2.15
    if node.hint is None:
        raise TypeError(f"{value} depends on data: it has no size before the model runs")
    return int(node.hint)


def is_composite(op: OpOverload) -> bool:
    """Whether the op is made of others that the dispatcher sees: ``linear``, ``dropout``; not ``addmm``."""
    keys = torch._C._dispatch_has_kernel_for_dispatch_key  # 2.11, 2.13, 2.15
    return bool(keys(cast(Any, op).name(), "CompositeImplicitAutograd"))


def meta_of(module: nn.Module) -> dict[str, Any]:
    """``GraphModule.meta``, which type checkers take for a submodule."""
    return cast(dict[str, Any], getattr(module, "meta", {}))


def qualified_name(target: Any) -> str:
    """What a function is called in the code of a graph, with dots (2.11, 2.13, 2.15)."""
    try:
        return fx.node._get_qualified_name(target)
    except Exception:
        return str(getattr(target, "__name__", target))


def target_name(node: fx.Node) -> str:
    """What a node calls: ``aten.linear.default``, ``_operator.getitem``, ``transformer.wte.weight``."""
    target = node.target
    if isinstance(target, str | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", type(target).__name__)
    place = getattr(target, "__module__", None)
    return f"{place}.{name}" if place else str(name)


def rename(names: Mapping[fx.Node, str]) -> None:
    """Give nodes of a graph names that may be those of others among them; ``Node._rename`` avoids any that is taken.

    Args:
        names: node -> its new name; different ones, that no other node of the graph has.
    """
    for node, name in names.items():
        node.name = name
        node.graph._graph_namespace._rename_object(node, name)  # 2.11, 2.13, 2.15


def fake_mode() -> FakeTensorMode:
    """A mode of fakes, in which modules may keep what is real, and whose answers do not depend on what ran before.

    Torch remembers what ops gave, in all modes of a process, and rebuilds it from strides: a storage that is larger
    than what lies in it is not rebuilt as it was.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.cache_enabled = False  # 2.11, 2.13, 2.15
    return mode


CLOSE_VMAP: Callable[[], object] = torch._C._functorch._vmap_decrement_nesting  # 2.11, 2.13, 2.15
"""Closes the innermost level that ``torch.vmap`` has opened."""


def functorch_depth() -> int:
    """How many levels of functorch (``vmap``, ``grad``) are open."""
    return len(torch._C._functorch.get_interpreter_stack() or ())  # 2.11, 2.13, 2.15


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that holds the memory of one inside functorch: of a ``vmap``, the whole batch."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # 2.11, 2.13, 2.15
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def allocations(run: Callable[[], Any]) -> list[int]:
    """Bytes that the CPU's allocator gave (positive) and took back (negative) during ``run()``, in order.

    What ``run`` returns is still there at the end. The public profiler gives sums by op, from which no peak can be
    told, and 2.13 and 2.15 write two lines to standard error each time; the legacy one (2.11, 2.13, 2.15) does not.
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
    # Garbage of others that is freed would count as taken back. The collector rests until the profiler is off: its
    # count of new objects goes on while it rests, so that it may look at the first object after it.
    with collector_at_rest():
        profiler._enable_profiler_legacy(config)
        try:
            result = run()
        finally:
            threads = profiler._disable_profiler_legacy()
        del result
    return [event.cpu_memory_usage() for events in threads for event in events if event.kind() == "memory_alloc"]


def action_schedule(stages: list[Any], count: int, loss: Any, ranks: Iterable[Iterable[object]]) -> Any:
    """A pipeline schedule that runs actions: what all schedules of several stages a rank inherit.

    2.11, 2.13, 2.15; ``tests/test_torch_private.py`` fails when it goes away.

    Args:
        stages: of this rank.
        count: microbatches.
        loss: as torch's ``loss_fn``; ``None`` to leave out what is of backward, once it is checked.
        ranks: the actions of each rank in order, forward and backward; their texts are torch's.
    """
    from torch.distributed.pipelining import schedules

    runtime: Any = schedules._PipelineScheduleRuntime
    read: Any = schedules._Action.from_str
    made = runtime(stages, count, loss_fn=loss, scale_grads=False)
    made._prepare_schedule_with_comms({rank: [read(str(a)) for a in row] for rank, row in enumerate(ranks)})
    if loss is None:
        kept = ("FORWARD", "SEND_F", "RECV_F", "WAIT_SEND_F")  # the last since 2.15
        rows = made.pipeline_order_with_comms.items()
        made.pipeline_order_with_comms = {r: [a for a in row if a.computation_type.name in kept] for r, row in rows}
    return made


def message_schedule(stage: Any, count: int, loss: Any, row: Iterable[str]) -> Any:
    """A pipeline schedule that runs what one rank computes, sends and receives, in this order and unchecked.

    2.11, 2.13, 2.15; ``tests/test_torch_private.py`` fails when it goes away.

    Args:
        stage: of this rank.
        count: its microbatches.
        loss: as torch's ``loss_fn``; ``None`` where nothing of backward is in the row.
        row: texts as torch writes its actions: ``0F0``, ``0SEND_F0``.
    """
    from torch.distributed.pipelining import schedules

    runtime: Any = schedules._PipelineScheduleRuntime
    read: Any = schedules._Action.from_str
    made = runtime([stage], count, loss_fn=loss, scale_grads=False)
    kinds: Any = schedules._ComputationType
    text = _with_waits(row) if hasattr(kinds, "WAIT_SEND_F") else row
    made.pipeline_order_with_comms = {made.rank: [read(action) for action in text]}
    return made


def _with_waits(row: Iterable[str]) -> list[str]:
    """With the ends of messages, which torch 2.15 asks for: before the backward that answers, else behind all."""
    made, sent = list[str](), list[str]()
    for action in row:
        if (wait := action.replace("B", "WAIT_SEND_F")) in sent:
            made.append(wait)
            sent.remove(wait)
        made.append(action)
        if "SEND" in action:
            sent.append(action.replace("SEND", "WAIT_SEND"))
    return made + sent


def skip_warm_up(stage: Any) -> None:
    """Let a pipeline stage exchange nothing with its neighbours before its first microbatch, once for each of them.

    2.11 sends its number, 2.13 asks whether all metadata is static, 2.15 asks all ranks at once.
    """
    static = torch.ones((), dtype=torch.int32)
    stage._get_init_p2p_neighbors_ops = list
    stage._warmup_forward_vote = lambda *args, **kwargs: static
    stage._warmup_backward_result = lambda *args, **kwargs: static


def default_store() -> Any:
    """The store of the default process group (2.11, 2.13, 2.15)."""
    from torch.distributed import distributed_c10d

    found: Any = distributed_c10d._get_default_store
    return found()


def timeout_of(group: Any) -> Any:
    """The time limit of a process group, ``None`` for the default one; ``new_group`` would take 30 minutes.

    2.11, 2.13, 2.15.
    """
    from torch import distributed as dist

    found: Any = group if group is not None else dist.group.WORLD
    kind = "cuda" if dist.get_backend(found) == "nccl" else "cpu"
    return getattr(getattr(found._get_backend(torch.device(kind)), "options", None), "_timeout", None)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called, or it is what ``torch.compile`` made of one (2.11, 2.13, 2.15)."""
    found: Any = module
    return found._compiled_call_impl is not None or hasattr(module, "_orig_mod")
