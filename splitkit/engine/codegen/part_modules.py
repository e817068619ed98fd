"""GraphModules that are cheap to build and to call, with code generated at once or at the first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from threading import RLock
from typing import Any, cast

from torch import fx, nn

from splitkit import _torch
from splitkit.engine.codegen.tied_parameters import Tied
from splitkit.errors import GraphError
from splitkit.graph.scope import is_state_op

_MODULE_CALL = nn.Module.__call__
_MAKING_CODE = RLock()
_FORWARD, _FORWARD_PRE, _BACKWARD, _BACKWARD_PRE = _torch.HOOKS_OF_ALL_MODULES


def call_part(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``forward`` directly if no hooks are registered; otherwise do what ``nn.Module.__call__`` does.

    ``nn.Module.__call__`` makes the same test, but only after five nested calls. ``GraphModule.__call__`` also prints
    the line of the graph where an error arose; the parent of the part does that as well.
    """
    if (
        kwargs
        or self._forward_hooks
        or self._forward_pre_hooks
        or self._backward_hooks
        or self._backward_pre_hooks
        or _FORWARD
        or _FORWARD_PRE
        or _BACKWARD
        or _BACKWARD_PRE
        or self._compiled_call_impl is not None
        or nn.Module.__call__ is not _MODULE_CALL  # fx traces by replacing it
    ):
        return nn.Module.__call__(self, *args, **kwargs)
    return self.forward(*args)


class ChildDescriptor:
    """A descriptor that finds a child without the failed lookups before ``nn.Module.__getattr__``.

    It is not a data descriptor, so that what users put in the module's ``__dict__`` comes first.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Any:
        if module is None:
            return self
        try:
            return module._modules[self.name]
        except KeyError:
            raise AttributeError(f"{type(module).__name__!r} object has no attribute {self.name!r}") from None


class _CarefulPickling(Tied):
    """Refuses to pickle graphs with state ops: fx unpickles by tracing the code, which would lose them."""

    graph: fx.Graph

    def __reduce__(self) -> Any:
        """Return the reduction for pickle; raise SK107 for a graph with regions."""
        kind: type[fx.GraphModule] = EagerPart if isinstance(self, (EagerPart, LazyPart)) else EagerParent
        return reduce_module(cast(fx.GraphModule, self), kind, super().__reduce__)


def reduce_module(module: fx.GraphModule, kind: type[fx.GraphModule], reduce: Callable[[], Any]) -> Any:
    """Return the reduction for pickle: that of fx, restored as a ``kind``, with the hooks that stand alone.

    Fx drops all hooks, but a hook that refuses wrong inputs must not get lost.

    Raises:
        GraphError: SK107 for a graph with regions.
    """
    if state_ops := [n for n in module.graph.nodes if is_state_op(n)]:
        raise GraphError(
            "SK107",
            f"torch.fx loses {state_ops[0].name} and every other region when it unpickles a graph",
            "Save the plan (plan.save) and the weights (module.state_dict), and split again; or copy with "
            "copy.deepcopy.",
            state_ops,
        )
    _, (body, imports) = cast(tuple[Any, tuple[dict[str, Any], str]], reduce())
    checks = [hook for hook in module._forward_pre_hooks.values() if stands_alone(hook)]
    without = {field: type(hooks)() for field, hooks in body.items() if field.endswith(("_hooks", "_with_kwargs"))}
    return _restored, (kind, {**body, **without}, imports, checks)


def _restored(
    kind: type[fx.GraphModule], body: dict[str, Any], imports: str, checks: list[Callable[..., Any]]
) -> fx.GraphModule:
    module = _torch.unpickled(kind, body, imports)
    for check in checks:
        cast(Any, check).watch(module)
    return module


def stands_alone(hook: object) -> bool:
    """Whether a hook is independent of the module it is called for; such a hook has ``watch``, which registers it."""
    return hasattr(hook, "watch")


class EagerParent(_CarefulPickling, fx.GraphModule):
    """A parent whose code is generated when it is built."""


class EagerPart(_CarefulPickling, fx.GraphModule):
    """A part whose code is generated when it is built."""

    def recompile(self) -> Any:
        """Generate the code again after the graph was edited."""
        code = super().recompile()
        type(self).__call__ = call_part  # type: ignore[method-assign]  # replaces GraphModule's
        return code


class _Unmade:
    """A ``forward`` whose code is not generated yet. It is not a data descriptor: an instance may have its own."""

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is None:
            return self
        module.real_recompile()
        return module.forward


class _Lazy(_CarefulPickling, _torch.LazyGraphModule):  # type: ignore[misc]
    """A GraphModule whose code is generated when its ``forward`` is first accessed.

    Torch's own class generates the code inside the first call and then calls the module once more, so that hooks fire
    twice and Dynamo meets a function that it must not trace.
    """

    # TorchScript would compile the property, which takes a lock (torch 2.11, 2.13, 2.15).
    __jit_unused_properties__ = (*fx.GraphModule.__jit_unused_properties__, "code")
    _lazy_forward = forward = _Unmade()  # torch compares the two to see whether code is missing (2.11, 2.13, 2.15)

    def real_recompile(self) -> None:
        """Generate the code unless it exists. The lock is needed: two threads would confuse fx's table of names."""
        with _MAKING_CODE:
            super().real_recompile()


class LazyPart(_Lazy):
    """A part whose code is generated at its first call."""

    def _real_recompile(self) -> Any:  # 2.11, 2.13, 2.15
        code = super()._real_recompile()
        type(self).__call__ = call_part  # type: ignore[method-assign]
        return code


class LazyParent(_Lazy):
    """A parent whose code, with that of its parts, is generated at its first call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the parts."""
        if isinstance(type(self).forward, _Unmade):  # a test that Dynamo can trace
            self.real_recompile()  # installs fx's __call__, which prints the line where an error arose
            return self(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _real_recompile(self) -> Any:  # 2.11, 2.13, 2.15
        code = super()._real_recompile()
        for part in self.children():
            if isinstance(part, _Lazy):  # Dynamo cannot generate code while it traces
                part.real_recompile()
        return code


def bare_module(kind: type[fx.GraphModule], graph: fx.Graph, name: str, training: bool) -> fx.GraphModule:
    """Return a GraphModule without the attributes that its graph reads, in half of the constructor's time.

    The constructor sets some thirty fields, each through ``nn.Module.__setattr__``. This function copies them from a
    module that the constructor has made.
    """
    module = kind.__new__(kind)
    _fill(module, kind, _graph=graph, training=training)
    type(module).__name__ = name
    graph.owning_module = module
    module.recompile()
    return module


def bare_container(training: bool) -> nn.Module:
    """Return an ``nn.Module()`` to hold attributes."""
    module = nn.Module.__new__(nn.Module)
    _fill(module, nn.Module, training=training)
    return module


@cache
def _fields_of(kind: type[nn.Module]) -> tuple[Mapping[str, Any], tuple[tuple[str, Callable[[], Any]], ...]]:
    """Return the fields that the constructor sets, and the classes of those that are empty containers."""
    made = kind({}, fx.Graph()) if issubclass(kind, fx.GraphModule) else kind()
    fields = dict(made.__dict__)
    return fields, tuple((name, type(v)) for name, v in fields.items() if isinstance(v, (dict, list, set)) and not v)


def _fill(module: nn.Module, kind: Any, **values: Any) -> None:
    fields, containers = _fields_of(kind)
    filled = module.__dict__
    filled.update(fields)
    for name, make in containers:
        filled[name] = make()
    filled.update(values)
