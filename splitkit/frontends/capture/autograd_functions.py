"""Keep each ``torch.autograd.Function`` as one node in export and fx tracing, so that its backward is kept too.

Tracing runs the forward of a Function and records its ops, but not its backward: a straight-through estimator or a
gradient reversal would become a plain function with other gradients, or none. Here::

    y = Reverse.apply(x, 0.5)       ==>       y = call Reverse (x, 0.5)       one node; autograd finds the backward

Forward runs on fake tensors, and its writes, aliases and random draws are recorded. Since it is Python code, it is
also assumed to have side effects, so that no plan runs it twice. Functions that torch itself uses for other purposes
(checkpointing, hooks) are traced through.

To see every call, ``apply`` is replaced while a trace runs. ``relu = Relu.apply``, as in PyTorch's tutorials, goes past
a patch of ``Function.apply``. Where ``apply`` is Python (2.11, 2.13), such a call still goes through the base
class, which is patched too. Where it is C (2.15), only its call of ``forward`` can be seen, and the call is refused.

All names below are private to torch; checked on 2.11, 2.13 and 2.15.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import EllipsisType, ModuleType, NoneType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._ops import _get_dispatch_mode_pre_dispatch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import Function
from torch.export import ExportedProgram
from torch.export.custom_ops import _call_custom_autograd_function_in_pre_dispatch as _STAND_IN
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree
from torch.nn.modules._functions import BackwardHookFunction
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointFunction

from splitkit._torch import pytree
from splitkit.errors import CaptureError
from splitkit.frontends.capture.capture_errors import ReentrantCheckpoint, lost_hook_error, user_line
from splitkit.frontends.capture.first_call import closure_value
from splitkit.frontends.trace_settings import subclasses_of
from splitkit.graph.ops import op_tables
from splitkit.graph.ops.facts import Described, Effects, unknown_effects
from splitkit.graph.storages import storage_key

_mode_of = cast(Any, _get_dispatch_mode_pre_dispatch)
_BASE: Any = Function.__mro__[1]  # _SingleLevelFunction: 2.11, 2.13, 2.15
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Types that a node can hold as constants, and further types that hold no tensor.
_SHOWN = (int, float, complex, bool, str, NoneType, torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (*_SHOWN, *_SYMBOLS, bytes, EllipsisType, type, slice, ModuleType, torch.Generator)
# The last has ModIndex, a lookup in a mask or score of FlexAttention, which torch makes a node of.
_TRACED_MODULES = (
    *("torch.utils.checkpoint", "torch._higher_order_ops", "torch._library", "torch._functorch"),
    "torch._dynamo._trace_wrapped_higher_order_op",  # 2.11, 2.13, 2.15
)


class FunctionCall(Described):
    """A call of a Function, as the target of a node. It keeps the arguments that a graph cannot hold.

    Attributes:
        function: the Function.
        constants: position among the leaves of the arguments -> the argument; the node has ``None`` at that position.
        writes: positions of the argument nodes that forward writes to.
        aliases: positions of the argument nodes that an output may share memory with.
        random: whether forward draws random numbers.
        known: whether the effects of forward were recorded.
    """

    def __init__(self, function: type[Function], constants: dict[int, Any]) -> None:
        self.function, self.constants = function, constants
        self.writes: tuple[int, ...] = ()
        self.aliases: tuple[int, ...] = ()
        self.random, self.known = False, False
        self.__name__ = function.__name__
        self.__qualname__ = function.__qualname__
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``function.apply``."""
        if self.constants:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            filled = [self.constants.get(i, leaf) for i, leaf in enumerate(leaves)]
            args, kwargs = pytree.tree_unflatten(filled, spec)
        return cast(Any, self.function).apply(*args, **kwargs)

    def effects(self, node: fx.Node) -> Effects:
        """Return the recorded effects of forward; every effect, if none were recorded or the arguments were changed."""
        leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
        inputs = [leaf for leaf in leaves if isinstance(leaf, fx.Node)]
        if not self.known or max((*self.writes, *self.aliases), default=-1) >= len(inputs):
            return unknown_effects(node)
        writes, aliases = (tuple(inputs[i] for i in at) for at in (self.writes, self.aliases))
        return Effects(writes, aliases, random=self.random, impure=True)


# ---------------------------------------------------------------- export


@contextmanager
def functions_as_nodes() -> Iterator[Callable[[fx.GraphModule], None]]:
    """Let torch.export keep Functions as nodes; yields a function that puts their calls into the exported graph."""
    calls: list[FunctionCall] = []
    me = threading.get_ident()

    def apply(function: type[Function], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mode: Any = _mode_of(torch._C._TorchDispatchModeKey.PROXY)  # of all threads
        if mode is None or threading.get_ident() != me:
            return run(*args, **kwargs)
        if _is_batched_forward(function, (args, kwargs)):
            return cast(Any, function).forward(*args, **kwargs)
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        through = _traced_instead(function, run)
        if through is not None:
            return through(*args, **kwargs)
        call = _make_call(function, (args, kwargs))
        calls.append(call)
        return _as_node(mode.tracer, call, len(calls) - 1, args, kwargs)

    def put_in(gm: fx.GraphModule) -> None:
        for module in [m for m in gm.modules() if calls and isinstance(m, fx.GraphModule)]:
            stand_ins = module.graph.find_nodes(op="call_function", target=_STAND_IN)
            for node in stand_ins:
                if isinstance(number := node.args[0], int):
                    node.target, node.args = calls[number], node.args[1:]
            if stand_ins:
                module.recompile()
        if _lookups_as_ops(gm.graph):
            gm.recompile()

    with apply_replaced(apply), _no_saved_tensors_hooks():
        yield put_in


def _lookups_as_ops(graph: fx.Graph) -> bool:
    """Replace each lookup in a mask that is made from tensors, of which torch makes a call of a Function, by an op.

    The gradients are the same, and Dynamo can trace the op. FlexAttention's own bodies keep the Function, whose
    backward its kernels know.
    """
    calls = graph.find_nodes(op="call_function", target=torch.ops.higher_order.flat_apply)
    lookups = [node for node in calls if op_tables.LOOKUP in node.args]
    for node in lookups:
        first = node.args.index(op_tables.LOOKUP) + 1
        described = [a for a in node.args[: first - 1] if isinstance(a, fx.Node)]
        node.target, node.args = torch.ops.aten.index.Tensor, (node.args[first], list(node.args[first + 1 :]))
        for spec in described:
            if not spec.users:
                graph.erase_node(spec)
    return bool(lookups)


def _is_batched_forward(function: type[Function], inputs: Any) -> bool:
    """Whether a Function runs under ``vmap`` and needs no backward, so that its forward can be traced: torch cannot."""
    if not torch._C._are_functorch_transforms_active() or not function.generate_vmap_rule:
        return False
    leaves = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
    return not torch.is_grad_enabled() or not any(t.is_floating_point() or t.is_complex() for t in leaves)


def _traced_instead(function: type[Function], run: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return what to trace in place of a Function that torch itself uses; ``None`` for one that must stay a node."""
    name = function.__qualname__
    if function is BackwardHookFunction:
        raise lost_hook_error("a module has a backward hook")
    if function is CheckpointFunction:
        return _checkpointed
    if name.startswith("AutogradFunctionApply."):  # 2.13: it stores what backward needs between calls
        raise _lost_backward_error(
            "a torch.autograd.Function", "is in code that Dynamo traced (torch.cond and the like)"
        )
    return run if function.__module__.startswith(_TRACED_MODULES) else None


def _checkpointed(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
    """Run the function of a reentrant checkpoint, marked for `restore_callers_grad`."""
    with ReentrantCheckpoint(any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)):
        return function(*args)


def _make_call(function: type[Function], inputs: Any) -> FunctionCall:
    """Return the call of a Function; refuse one that a graph cannot hold."""
    name = function.__qualname__
    if torch._C._are_functorch_transforms_active():
        raise _lost_backward_error(name, "runs under torch.func (vmap, grad)")
    constants: dict[int, Any] = {}
    for i, leaf in enumerate(pytree.tree_leaves(inputs)):
        if isinstance(leaf, (torch.Tensor, fx.Proxy, *_SYMBOLS)) or type(leaf) in _SHOWN:
            continue
        if _holds_tensors(leaf):
            raise _lost_backward_error(
                name, f"takes a {type(leaf).__name__}, which may hold tensors that no node shows"
            )
        constants[i] = leaf
    for method in (function.forward, function.backward, function.setup_context):
        if _holds_tensors(method):
            raise _lost_backward_error(name, "closes over tensors or modules, which no node shows")
    return FunctionCall(function, constants)


def _as_node(tracer: Any, call: FunctionCall, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, (torch.Tensor, *_SYMBOLS))]
    # A write to an argument raises its version counter, also on fake tensors.
    versions = [t._version if isinstance(t, torch.Tensor) else 0 for t in tensors]
    watch = _ForwardWatch(tensors)
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction(), watch:
        output = call(*args, **kwargs)
    if any(isinstance(t, FakeTensor) and t in tracer.tensor_tracker for t in watch.foreign):
        raise _lost_backward_error(call.__qualname__, "reads tensors that are not among its arguments")
    call.known = not watch.foreign
    call.random = watch.random
    call.writes = tuple(i for i, t in enumerate(tensors) if isinstance(t, torch.Tensor) and t._version != versions[i])
    made = {storage_key(t) for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)}
    call.aliases = tuple(i for i, t in enumerate(tensors) if isinstance(t, torch.Tensor) and storage_key(t) in made)
    # The node calls a stand-in that torch.export accepts, with the number of the call; `put_in` replaces it later.
    leaves, spec = pytree.tree_flatten((args, kwargs))
    shown = [None if i in call.constants else tracer.unwrap_proxy(leaf) for i, leaf in enumerate(leaves)]
    named, keywords = pytree.tree_unflatten(shown, spec)
    proxy = tracer.create_proxy("call_function", _STAND_IN, (number, *named), keywords, name=call.__name__.lower())
    return track_tensor_tree(output, proxy, constant=None, tracer=tracer)


class _ForwardWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records whether random numbers are drawn, and tensors read that are neither arguments nor computed inside."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False
        self.foreign: list[torch.Tensor] = []
        self.own: dict[Any, torch.Tensor] = {storage_key(t): t for t in given if isinstance(t, torch.Tensor)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self.own:
                self.foreign.append(tensor)
        self.random = self.random or torch.Tag.nondeterministic_seeded in func.tags
        result = func(*args, **(kwargs or {}))
        self.own.update((storage_key(t), t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        return result


def refuse_lost_functions(program: ExportedProgram) -> None:
    """Raise SK404 for a program of strict export, which replaces a Function by its forward under ``no_grad``."""
    if not any(t.requires_grad for t in program.parameters()):
        return
    for node in (n for m in program.graph_module.modules() if isinstance(m, fx.GraphModule) for n in m.graph.nodes):
        if any(kind == "autograd.Function" for _, kind in node.meta.get("source_fn_stack", ())):  # 2.11, 2.13, 2.15
            source = [line.strip() for line in str(node.meta.get("stack_trace", "")).splitlines()]
            where = next((line for line in reversed(source) if line.startswith("File ")), "")
            raise CaptureError(
                "SK404",
                "strict export has lost the backward of a torch.autograd.Function"
                + (f"\n  at {where}" if where else ""),
                "Give the model itself: splitkit.capture(model, *inputs). For inference only, call "
                "model.requires_grad_(False) before the export.",
                [node],
            )


# ---------------------------------------------------------------- fx


@contextmanager
def functions_as_fx_nodes() -> Iterator[None]:
    """Let ``fx.symbolic_trace`` keep Functions as nodes; the effects of their forwards are not known."""

    def apply(function: type[Function], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        proxies = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, fx.Proxy)]
        if not proxies:
            return run(*args, **kwargs)
        if function is CheckpointFunction:
            raise _lost_backward_error(
                "torch.utils.checkpoint", "is reentrant, and symbolic_trace does not know what needs grad"
            )
        call = _make_call(function, (args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        shown, keywords = pytree.tree_unflatten(
            [None if i in call.constants else leaf for i, leaf in enumerate(leaves)], spec
        )
        return proxies[0].tracer.create_proxy("call_function", call, shown, keywords)

    with apply_replaced(apply), _no_saved_tensors_hooks():
        yield


# ---------------------------------------------------------------- replacing apply


@contextmanager
def apply_replaced(apply: Callable[..., Any]) -> Iterator[None]:
    """Call ``apply(function, run, ...)`` for each ``function.apply(...)``, where ``run`` is the original ``apply``.

    A Function whose forward is traced without such a call is refused.
    """
    original = Function.__dict__["apply"]
    open_calls = [0]

    def of_function(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        open_calls[0] += 1
        try:
            return apply(function, original.__get__(None, function), *args, **kwargs)
        finally:
            open_calls[0] -= 1

    def of_base(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        return apply(function, super(_BASE, function).apply, *args, **kwargs)

    def of_forward(function: type[Function], forward: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            # torch.export is tracing, or an argument is a proxy: 2.11, 2.13, 2.15
            by_export = _mode_of(torch._C._TorchDispatchModeKey.PROXY) is not None
            traced = by_export or any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves((args, kwargs)))
            if not open_calls[0] and traced:
                why = "was bound before the capture (relu = Relu.apply: write Relu.apply(...) where it is called)"
                raise _lost_backward_error(function.__qualname__, why)
            return forward(*args, **kwargs)

        return seen

    # `open_calls` tells a forward that a replaced `apply` runs from one that a bound `apply` in C runs.
    with ExitStack() as patches:
        patches.enter_context(patch.object(Function, "apply", classmethod(of_function)))
        if isinstance(original, classmethod):
            patches.enter_context(patch.object(_BASE, "apply", classmethod(of_base)))
        else:
            for function in subclasses_of(Function):
                if isinstance(forward := vars(function).get("forward"), staticmethod):
                    seen = staticmethod(of_forward(function, forward.__func__))
                    patches.enter_context(patch.object(function, "forward", seen))
        yield


# ---------------------------------------------------------------- refusals


def refuse_module_hooks(model: nn.Module) -> None:
    """Raise SK405 for a module with a backward hook: the hook would not run, and it may change gradients."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            what = f"{name or 'the model'} ({type(module).__name__}) has a backward hook"
            raise lost_hook_error(what, "splitkit.apply accepts")


@contextmanager
def _no_saved_tensors_hooks() -> Iterator[None]:
    """Refuse a model's own saved-tensor hooks, which may change values; those of torch only move tensors."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    original, me = hooks.__enter__, threading.get_ident()

    def enter(self: Any) -> None:
        own = type(self) is hooks or not type(self).__module__.startswith("torch.")
        if own and torch.is_grad_enabled() and threading.get_ident() == me:
            raise lost_hook_error("the model hooks the tensors that are saved for backward")
        original(self)

    with patch.object(hooks, "__enter__", enter):
        yield


def _lost_backward_error(name: str, why: str) -> CaptureError:
    return CaptureError(
        "SK404",
        f"the backward of {name} would be lost: it {why}, so that no node can call it{user_line()}",
        "Give apply every tensor that it needs as an argument of its own; splitkit.capture_joint and splitkit.apply "
        "accept the model as it is; for inference only, call it under torch.no_grad() in the model, or capture "
        "torch.export.export(model, args, kwargs), which has no such backward.",
    )


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    """Return whether tensors or modules may be reachable through an object that no node argument shows."""
    if isinstance(value, (torch.Tensor, nn.Module, fx.Proxy)) or depth > 4:
        return True
    if isinstance(value, _PLAIN):
        return False
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(_holds_tensors(v, depth + 1) for v in value)
    if isinstance(value, dict):
        return _holds_tensors(list(value.values()), depth + 1)
    # a function may hold tensors in its closure, an object in its attributes
    held = list(map(closure_value, getattr(value, "__closure__", None) or ()))
    held += [getattr(value, "__self__", None), *getattr(value, "__dict__", {}).values()]
    return any(_holds_tensors(v, depth + 1) for v in held)
