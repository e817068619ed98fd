"""Capture by ``torch.fx.symbolic_trace``: module calls stay whole, and shapes come from a run on fake tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch._ops import OpOverload  # 2.11, 2.13, 2.15
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11, 2.13, 2.15

from splitkit._torch import pytree
from splitkit.errors import CaptureError
from splitkit.frontends.capture_errors import line_here, lost_data
from splitkit.frontends.functions import functions_of_proxies
from splitkit.frontends.gradflags import DATA_SETTERS
from splitkit.graph.fakeruns import set_values
from splitkit.graph.storages import storage_key


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    """Trace ``model`` and give every node its ``meta["val"]``; nothing real is computed.

    Inputs without tensors (flags, ``None``, left-out defaults) are constants of the graph: they keep their place in
    the signature, and another value is refused.

    Raises:
        CaptureError: SK401 if the model writes a tensor of its own, which would happen now and never again.
    """
    signature = inspect.signature(model.forward)
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    constants = {
        name: value
        for name, value in bound.arguments.items()
        if signature.parameters[name].kind not in variadic and not _has_tensor(value)
    }
    with functions_of_proxies(), _no_assignments_to_proxies(), _NoAssignments(), _Unwritten(), _unbound(model):
        gm = fx.symbolic_trace(model, concrete_args=constants)
    _fold_constants(gm, constants)
    set_values(gm, bound.arguments)
    if constants:
        check = _ConstantInputs(signature, constants)
        _guard(check, gm)
        gm._register_deepcopy_hook(partial(_guard, check))  # 2.11, 2.13, 2.15
    return gm


def _guard(check: _ConstantInputs, gm: fx.GraphModule) -> None:
    gm.register_forward_pre_hook(check, with_kwargs=True)


class _Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to tensors that were there before: no proxy stands for them, so the graph would not have them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[Any, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        slots = func._schema.arguments if isinstance(func, OpOverload) and func._schema.is_mutable else ()
        for i, slot in enumerate(slots):
            if slot.alias_info is not None and slot.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(slot.name)
                written = filter(torch.is_tensor, pytree.tree_leaves(given))
                if any(storage_key(t) not in self.made for t in written):
                    raise _lost_write(f"writes a tensor that was there before ({func}){line_here()}")
        result = func(*args, **kwargs)
        given = {storage_key(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = ((storage_key(t), t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor))
        self.made.update((key, t) for key, t in made if key not in given)  # not a view of what was there
        return result


class _NoAssignments(TorchFunctionMode):
    """Refuses ``p.data = y`` for a tensor that is there: it would be assigned now and never again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DATA_SETTERS:
            raise lost_data()
        return func(*args, **(kwargs or {}))


_SET_ON_PROXIES = ("data", "real", "imag", "requires_grad")


@contextmanager
def _no_assignments_to_proxies() -> Iterator[None]:
    """Refuse ``z.data = y`` for a value of the graph: a proxy takes any attribute, and the graph gets none."""
    original = fx.Proxy.__setattr__

    def assign(proxy: fx.Proxy, name: str, value: Any) -> None:
        if name in _SET_ON_PROXIES:
            raise lost_data(name)
        original(proxy, name, value)

    with patch.object(fx.Proxy, "__setattr__", assign):
        yield


@contextmanager
def _unbound(model: nn.Module) -> Iterator[None]:
    """Refuse a model that binds a buffer anew, to what is computed now and never again."""
    held = [(m._buffers, dict(m._buffers)) for m in model.modules()]
    yield
    for now, before in held:
        for name, buffer in before.items():
            if now.get(name) is not buffer:
                raise _lost_write(f"binds its buffer {name} anew")


def _lost_write(what: str) -> CaptureError:
    return CaptureError(
        "SK401",
        f"symbolic_trace loses what the model does: it {what}",
        'Use how="export", or make the module that does it a leaf of a tracer of your own.',
    )


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _fold_constants(gm: fx.GraphModule, constants: Mapping[str, Any]) -> None:
    """Drop the checks that fx writes for constant inputs, and give these inputs their own names back (``y_1``: ``y``).

    The checks would be nodes that a policy places; a hook on the module does their work.
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
    """All nodes that depend on ``node``, in graph order; of a constant input: its check."""
    found: dict[Node, None] = {}
    for user in node.users:
        found[user] = None
        found.update(_readers(user))
    return found


class _ConstantInputs:
    """Refuses another value for an input that was fixed at capture."""

    def __init__(self, signature: inspect.Signature, constants: Mapping[str, Any]) -> None:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self.positional = [name for name, p in signature.parameters.items() if p.kind in kinds]
        self.constants = dict(constants)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Loops that Dynamo can trace, which inspect.Signature.bind is not.
        for i in range(min(len(args), len(self.positional))):
            self._require(self.positional[i], args[i])
        for name in kwargs:
            self._require(name, kwargs[name])

    def _require(self, name: str, given: Any) -> None:
        if name in self.constants and not _same(given, self.constants[name]):
            raise RuntimeError(
                f"Expected input {name} to be {self.constants[name]!r}, as at capture, but got {given!r}"
            )


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))
