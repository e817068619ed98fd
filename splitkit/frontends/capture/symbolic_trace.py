"""Capture with ``torch.fx.symbolic_trace``: calls of torch's modules stay nodes; a run on fake tensors gives shapes."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._ops import OpOverload  # 2.11, 2.13, 2.15
from torch.fx import Node
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11, 2.13, 2.15

from splitkit._torch import pytree, written_arguments
from splitkit.errors import CaptureError
from splitkit.frontends.capture.autograd_functions import functions_as_fx_nodes
from splitkit.frontends.capture.capture_errors import DATA_SETTERS, lost_data_error, user_line
from splitkit.frontends.capture.first_call import is_of_user
from splitkit.graph.fake_runs import set_values
from splitkit.graph.storages import storage_key


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    """Trace ``model`` and set ``meta["val"]`` of every node, without real computation.

    Inputs without tensors (flags, ``None``, defaults) are constants of the graph: they stay in the signature, and other
    values are refused.

    Raises:
        CaptureError: SK401 if the model writes to its own tensors, which would happen now and never again, or has hooks
            that the graph would not have.
    """
    _refuse_lost_hooks(model)
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    constants = {
        name: value
        for name, value in bound.arguments.items()
        if signature.parameters[name].kind not in variadic and not any(map(torch.is_tensor, pytree.tree_leaves(value)))
    }
    with (
        functions_as_fx_nodes(),
        _refuse_proxy_assignment(),
        _RefuseDataAssignment(),
        _RefuseWrites(),
        _refuse_rebound_buffers(model),
        refuse_seeding(),
    ):
        gm = fx.symbolic_trace(model, concrete_args=constants)
    _fold_constants(gm, constants)
    set_values(gm, bound.arguments)
    if constants:
        check = _ConstantInputs(signature, constants)
        check.watch(gm)
        gm._register_deepcopy_hook(check.watch)  # 2.11, 2.13, 2.15
    return gm


class _RefuseWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to existing tensors: no proxy stands for them, so the graph would not contain the writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        changed = written_arguments(func, args, kwargs) if isinstance(func, OpOverload) else []
        if any(storage_key(t) not in self.made for t in filter(torch.is_tensor, pytree.tree_leaves(changed))):
            raise _lost_write(f"writes to a tensor that existed before ({func}){user_line()}")
        result = func(*args, **kwargs)
        given = {storage_key(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = ((storage_key(t), t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        self.made.update((key, t) for key, t in made if key not in given)  # not a view of an existing tensor
        return result


class _RefuseDataAssignment(TorchFunctionMode):
    """Refuses ``p.data = y`` for an existing tensor: it would be assigned now and never again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DATA_SETTERS:
            raise lost_data_error()
        return func(*args, **(kwargs or {}))


_SET_ON_PROXIES = ("data", "real", "imag", "requires_grad")


@contextmanager
def _refuse_proxy_assignment() -> Iterator[None]:
    """Refuse ``z.data = y`` for a value of the graph: a proxy accepts any attribute, which the graph then lacks."""
    original = fx.Proxy.__setattr__

    def assign(proxy: fx.Proxy, name: str, value: Any) -> None:
        if name in _SET_ON_PROXIES:
            raise lost_data_error(name)
        original(proxy, name, value)

    with patch.object(fx.Proxy, "__setattr__", assign):
        yield


@contextmanager
def _refuse_rebound_buffers(model: nn.Module) -> Iterator[None]:
    """Refuse a model that rebinds a buffer, to a value that would be computed now and never again."""
    held = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    yield
    for now, before in held:
        for name, buffer in before.items():
            if now.get(name) is not buffer:
                raise _lost_write(f"rebinds its buffer {name}")


def _refuse_lost_hooks(model: nn.Module) -> None:
    """Refuse hooks that are not in the graph: the whole model's, whose ``forward`` is traced, and power iterations.

    A call of a module of torch stays a node, which runs its hooks. Elsewhere the hook of ``spectral_norm`` is traced,
    without the ``no_grad`` around its power iteration, which writes to a buffer.
    """
    hooks = (*model._forward_hooks.values(), *model._forward_pre_hooks.values())  # 2.11, 2.13, 2.15
    if any(not isinstance(model, fx.GraphModule) or is_of_user(hook) for hook in hooks):  # others check inputs
        raise _lost_hooks("does not call the forward hooks of the model itself, such as the hook of weight_norm")
    for name, module in model.named_modules():
        iterates = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
        if iterates and module.training and not fx.Tracer().is_leaf_module(module, name):
            where = f"{name} ({type(module).__name__})"
            raise _lost_hooks(f"loses the no_grad around the power iteration of the spectral_norm of {where}")


def _lost_hooks(what: str) -> CaptureError:
    return CaptureError("SK401", f"symbolic_trace {what}", 'Use how="export".')


def _lost_write(what: str) -> CaptureError:
    return CaptureError(
        "SK401",
        f"symbolic_trace loses what the model does: it {what}",
        'Use how="export", or make the module that does it a leaf of your own tracer.',
    )


def _fold_constants(gm: fx.GraphModule, constants: Mapping[str, Any]) -> None:
    """Drop the checks that fx adds for constant inputs, and restore the names of these inputs (``y_1`` -> ``y``).

    The checks would be nodes that a policy places; a hook on the module replaces them.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    for name, value in constants.items():
        node = next((n for n in inputs if n.target in (name, f"{name}_1")), None)
        if node is None:
            continue
        for user in reversed(list(_readers(node))):
            gm.graph.erase_node(user)
        node.target = name
        node.meta["val"] = value
    gm.graph.lint()
    gm.recompile()


def _readers(node: Node) -> dict[Node, None]:
    """Return all nodes that depend on ``node``, which for a constant input are its check, in graph order."""
    found: dict[Node, None] = {}
    for user in node.users:
        found[user] = None
        found.update(_readers(user))
    return found


class _ConstantInputs:
    """A hook that refuses other values for inputs that were fixed at capture."""

    def __init__(self, signature: inspect.Signature, constants: Mapping[str, Any]) -> None:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = [name for name, p in signature.parameters.items() if p.kind in kinds]
        self.constants = dict(constants)

    def watch(self, gm: fx.GraphModule) -> None:
        """Register the check on ``gm``."""
        gm.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Plain loops, since Dynamo cannot trace inspect.Signature.bind.
        for i in range(min(len(args), len(self.positional))):
            self._require(self.positional[i], args[i])
        for name in kwargs:
            self._require(name, kwargs[name])

    def _require(self, name: str, given: Any) -> None:
        wanted = self.constants.get(name, given)
        if not (given is wanted or (type(given) is type(wanted) and bool(given == wanted))):
            raise RuntimeError(f"Expected input {name} to be {wanted!r}, as at capture, but got {given!r}")


# Refuse a model that seeds a random number generator while it is traced: the seed would be set now and never again.


_TORCH = str(Path(torch.__file__).parent)  # torch saves and restores the RNG state around its own traces
_SEEDING = ("manual_seed", "seed", "set_rng_state")
_LOCK = threading.RLock()  # patches of two threads that overlap would not all be undone


@contextmanager
def refuse_seeding() -> Iterator[None]:
    """Refuse calls of ``torch.manual_seed`` and its like by code outside of torch.

    No tracer records them: export and ``symbolic_trace`` run them once, and the graph draws other numbers than the
    model. ``Generator.manual_seed`` is not seen, since its class cannot be patched; `splitkit.compare` notices it.

    Raises:
        CaptureError: SK410 with the line of the model.
    """
    me = threading.get_ident()  # other threads may seed meanwhile
    with _LOCK, ExitStack() as stack:
        for name in _SEEDING:
            for module in (torch, torch.random):
                stack.enter_context(patch.object(module, name, _refusing(name, getattr(module, name), me)))
        yield


def _refusing(name: str, original: Callable[..., Any], thread: int) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or sys._getframe(1).f_code.co_filename.startswith(_TORCH):
            return original(*args, **kwargs)
        raise CaptureError(
            "SK410",
            f"the model calls torch.{name}, which tracing loses: the graph would draw other numbers{user_line()}",
            "Seed before the model is called, or make the random numbers an input.",
        )

    return refuse
