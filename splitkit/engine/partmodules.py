"""Parts as modules: GraphModules that cost little to call, with their code made at once or on the first call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from threading import RLock
from typing import Any, cast

from torch import fx, nn

from splitkit import _torch
from splitkit.engine.ties import Tied
from splitkit.errors import GraphError
from splitkit.graph.scope import is_state_op

_MODULE_CALL = nn.Module.__call__
_MAKING_CODE = RLock()
_FORWARD, _FORWARD_PRE, _BACKWARD, _BACKWARD_PRE = _torch.HOOKS_OF_ALL_MODULES


def call_part(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``nn.Module.__call__`` with its test for hooks in front, instead of behind five other calls.

    What a GraphModule adds to it, a print of the line of the graph where an error arose, its parent does as well.
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


class Child:
    """``module.name`` for a child, without the failed lookups that end in ``nn.Module.__getattr__``.

    No data descriptor: what users put in the module's ``__dict__`` comes first.
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


class _Picky(Tied):
    """Refuses what ``fx`` would unpickle wrongly: it traces the code, in which state ops run and leave no node."""

    graph: fx.Graph

    def __reduce__(self) -> Any:
        """What pickle asks for; SK107 for a graph with regions."""
        kind: type[fx.GraphModule] = EagerPart if isinstance(self, (EagerPart, LazyPart)) else EagerParent
        return reduced(cast(fx.GraphModule, self), kind, super().__reduce__)


def reduced(module: fx.GraphModule, kind: type[fx.GraphModule], reduce: Callable[[], Any]) -> Any:
    """What pickle asks a graph for: what fx gives it, restored as a ``kind``, with those of its hooks that stand alone.

    Fx drops all hooks; one that refuses wrong inputs, and asks nothing of the module, must not get lost.

    Raises:
        GraphError: SK107 for a graph with regions.
    """
    if state_ops := [n for n in module.graph.nodes if is_state_op(n)]:
        raise GraphError(
            "SK107",
            f"torch.fx loses {state_ops[0].name} and every other region when it unpickles a graph",
            "Save the plan (plan.save) and the weights (state_dict), and split again; or copy with copy.deepcopy.",
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
    """Whether a hook asks nothing of the module that it is called for: it has ``watch``, which registers it."""
    return hasattr(hook, "watch")


class EagerParent(_Picky, fx.GraphModule):
    """A parent whose code is made when it is built."""


class EagerPart(_Picky, fx.GraphModule):
    """A part whose code is made when it is built."""

    def recompile(self) -> Any:
        """Make the code again after the graph was edited."""
        code = super().recompile()
        type(self).__call__ = call_part  # type: ignore[method-assign]  # where GraphModule has put its own
        return code


class _Unmade:
    """Stands for a ``forward`` whose code is to be made. No data descriptor: an instance may have its own."""

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is None:
            return self
        module.real_recompile()
        return module.forward


class _Lazy(_Picky, _torch.LazyGraphModule):  # type: ignore[misc]
    """A GraphModule whose code is made when its ``forward`` is first asked for.

    Torch's own makes it inside the first call and then calls itself once more, so that hooks fire twice and Dynamo
    meets a function that it must not trace.
    """

    # TorchScript compiles properties, and knows no locks; 2.11, 2.13, 2.15.
    __jit_unused_properties__ = (*fx.GraphModule.__jit_unused_properties__, "code")
    _lazy_forward = forward = _Unmade()  # compared by torch: 2.11, 2.13, 2.15

    def real_recompile(self) -> None:
        """Make the code unless it is there; two threads at once would mix up its names."""
        with _MAKING_CODE:
            super().real_recompile()


class LazyPart(_Lazy):
    """A part whose code is made when it is first called."""

    def _real_recompile(self) -> Any:  # 2.11, 2.13, 2.15
        code = super()._real_recompile()
        type(self).__call__ = call_part  # type: ignore[method-assign]
        return code


class LazyParent(_Lazy):
    """A parent whose code, and that of its parts, is made when it is first called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the parts."""
        if isinstance(type(self).forward, _Unmade):  # a test that Dynamo can trace
            self.real_recompile()  # puts fx's own __call__ in front, which shows the line where an error arose
            return self(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _real_recompile(self) -> Any:  # 2.11, 2.13, 2.15
        code = super()._real_recompile()
        for part in self.children():
            if isinstance(part, _Lazy):  # Dynamo cannot make code while it traces
                part.real_recompile()
        return code


def bare_module(kind: type[fx.GraphModule], graph: fx.Graph, name: str, training: bool) -> fx.GraphModule:
    """A GraphModule of a graph, without the attributes that it reads, in half of the time that its constructor takes.

    The constructor sets some thirty fields, each through ``nn.Module.__setattr__``. Here they are copied from a module
    that the constructor has made.
    """
    module = kind.__new__(kind)
    _fill(module, kind, _graph=graph, training=training)
    type(module).__name__ = name
    graph.owning_module = module
    module.recompile()
    return module


def bare_container(training: bool) -> nn.Module:
    """An ``nn.Module()`` to put attributes into."""
    module = nn.Module.__new__(nn.Module)
    _fill(module, nn.Module, training=training)
    return module


@cache
def _fields_of(kind: type[nn.Module]) -> tuple[Mapping[str, Any], tuple[tuple[str, Callable[[], Any]], ...]]:
    """What the constructor sets, and how to make those of the values anew that are containers: they are empty."""
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
