"""Record the ops of checkpointed layers in eager mode, and name their results so that a joint graph's can be matched.

A joint graph and eager mode run the same ops below autograd, but in a joint graph equal ops are merged, dead ones are
dropped, and none is in place. So ops are not matched by position: the key of a value is its op and the keys of what the
op reads, down to parameters and inputs::

    x, weight      ("input", 0), ("parameter", "linear.weight")
    t              (aten.t, key of weight)
    mm             (aten.mm, key of x, key of t)

An op in place has the key of the op that is not. ``detach`` and ``clone`` pass the key of their input on, since the two
differ in where they copy. Dropout is one op here and four there: what is computed of random numbers alone has the key
``DRAWN``, and its product with x the key ``(DROPOUT, key of x)``.

Ops that read integers alone always run again. Some run other ops on real tensors, whose values they check, than on
fakes (``one_hot``), and need not match.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11, 2.13, 2.15
from torch.utils.checkpoint import SAC_IGNORED_OPS  # 2.11, 2.13, 2.15

from splitkit._torch import OpOverload, OpOverloadPacket, pytree, written_arguments
from splitkit.frontends.checkpoint.real_integers import GROUPED_MM, is_inexact, on_fakes

DRAWN, DROPOUT = "drawn", "dropout"
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default)
_GROUPED_MM_OF_EXPORT = "transformers.grouped_mm_fallback.default"  # what its experts run in a joint graph
_SCALED = (torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor)


@dataclass(frozen=True)
class RecordedOp:
    """An op of a layer.

    Attributes:
        target: the op.
        key: the key of its result.
        made: the storages of its results, by number.
        writes: the storages that it writes to; those of inputs, parameters and buffers have negative numbers.
        decided: whether a context decides about it; otherwise it runs again.
    """

    target: Any
    key: Hashable
    made: frozenset[int]
    writes: frozenset[int]
    decided: bool


@dataclass(frozen=True)
class RecordedLayer:
    """A run of a layer.

    Attributes:
        name: the name of the layer in the model.
        args: its arguments, as fake tensors.
        kwargs: its keyword arguments.
        ops: what it ran, as `torch.utils.checkpoint` sees it.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    ops: tuple[RecordedOp, ...]

    @property
    def decided(self) -> tuple[RecordedOp, ...]:
        """The ops about which a context decides."""
        return tuple(op for op in self.ops if op.decided)


def record_layers(
    model: nn.Module, names: list[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[RecordedLayer]:
    """Run a copy of the model on fake tensors, and return what its layers with these names do, in order."""
    found: list[RecordedLayer] = []
    with on_fakes(model, (args, dict(kwargs))) as (copied, (inputs, named)):
        for name in names:
            _watch(copied.get_submodule(name), name, found)
        if any(is_transformers_layer(copied.get_submodule(name)) for name in names):
            for module in copied.modules():  # with checkpoints, transformers' models use no cache
                if hasattr(module, "gradient_checkpointing"):
                    module.gradient_checkpointing = True
        copied(*inputs, **named)
    return found


def _watch(layer: nn.Module, name: str, found: list[RecordedLayer]) -> None:
    def recorded(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = run.keywords if isinstance(run, partial) else {}
        given = {**bound, **kwargs}
        recorder = Recorder(layer, args, given)
        with recorder:
            output = run(*args, **kwargs)
        found.append(RecordedLayer(name, args, given, tuple(recorder.ops)))
        return output

    if is_transformers_layer(layer):
        layer._gradient_checkpointing_func = recorded  # type: ignore[assignment]
    else:
        layer.forward = partial(recorded, layer.forward)


def is_transformers_layer(module: nn.Module) -> bool:
    """Return whether transformers' ``model.activation_checkpointing_enable()`` checkpoints this module."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


@dataclass
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops that run, with the keys of their results."""

    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    ops: list[RecordedOp] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys: dict[int, Hashable] = {}
        self._alive: list[Tensor] = []  # so that no id is used again
        self._storages: dict[Any, int] = {}
        for name, tensor in (*self.layer.named_parameters(), *self.layer.named_buffers()):
            self._name(tensor, ("state", name), outside=True)
        for i, leaf in enumerate(pytree.tree_leaves((self.args, dict(self.kwargs)))):
            if isinstance(leaf, Tensor):
                self._name(leaf, ("input", i), outside=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and record it."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        own, passed = keys_of(func, args, kwargs, self._key, draws(func, args, kwargs))
        leaves = [t for t in pytree.tree_leaves(output) if isinstance(t, Tensor)]
        for i, tensor in enumerate(leaves):
            self._name(tensor, passed if isinstance(output, Tensor) else item_key(passed, i))
        if func in SAC_IGNORED_OPS:
            return output
        written = _written(func, args, kwargs)
        for tensor in written:
            self._keys[id(tensor)] = passed
        made = frozenset(self._storage(t) for t in leaves)
        writes = frozenset(self._storage(t) for t in written)
        self.ops.append(RecordedOp(func, own, made, writes, reads_floats(args, kwargs)))
        return output

    def _name(self, tensor: Tensor, key: Hashable, outside: bool = False) -> None:
        self._keys[id(tensor)] = key
        self._alive.append(tensor)
        self._storage(tensor, outside)

    def _storage(self, tensor: Tensor, outside: bool = False) -> int:
        if tensor.layout is not torch.strided:
            return len(self._storages) + 1
        number = len(self._storages) + 1
        return self._storages.setdefault(tensor.untyped_storage()._cdata, -number if outside else number)

    def _key(self, value: Any) -> Hashable:
        if id(value) in self._keys:
            return self._keys[id(value)]
        return constant_key(value)


def reads_floats(args: Any, kwargs: Any) -> bool:
    """Return whether there is a tensor of floats or complex numbers among the arguments of an op."""
    return any(isinstance(leaf, Tensor) and is_inexact(leaf) for leaf in pytree.tree_leaves((args, kwargs)))


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an op writes to."""
    given = written_arguments(func, args, kwargs) if isinstance(func, OpOverload) else []
    return [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an op draws random numbers: attention without dropout does not, although torch tags it so."""
    if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, argument in enumerate(func._schema.arguments):  # 2.11, 2.13, 2.15
        if argument.name == "dropout_p":
            return bool((args[i] if i < len(args) else kwargs.get("dropout_p", argument.default_value)) != 0)
    return True


def keys_of(
    func: Any, args: Any, kwargs: Any, key: Callable[[Any], Hashable], is_random: bool
) -> tuple[Hashable, Hashable]:
    """Return the key of an op, and that of its result for its readers.

    Args:
        func: the op.
        args: its arguments.
        kwargs: its keyword arguments.
        key: the key of an argument.
        is_random: whether it draws random numbers.
    """
    leaves = pytree.tree_leaves(list(args), is_leaf=_is_leaf)
    given = [key(value) for value in leaves]
    own = (_out_of_place(func), len(args), *given, *((n, _deep(v, key)) for n, v in sorted(kwargs.items())))
    if func is torch.ops.aten.native_dropout.default:
        return own, (DROPOUT, given[0])
    read = [k for k, value in zip(given, leaves, strict=True) if isinstance(value, Tensor | Node)]
    if is_random or (read and all(k == DRAWN for k in read)):
        return own, DRAWN
    if func in _SCALED and DRAWN in given:
        return own, (DROPOUT, given[0] if given[1] == DRAWN else given[1])
    return own, given[0] if func in _SAME else own


def _out_of_place(func: Any) -> Any:
    """Return the op that computes what an op in place writes, or what a fallback computes; otherwise the op itself."""
    if str(func) == _GROUPED_MM_OF_EXPORT:
        return GROUPED_MM
    name, _, overload = str(func).removeprefix("aten.").partition(".")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") and not name.startswith("_") else None
    return getattr(packet, overload, func) if isinstance(packet, OpOverloadPacket) else func


def _deep(value: Any, key: Callable[[Any], Hashable]) -> Hashable:
    return tuple(map(key, value)) if isinstance(value, list | tuple) else key(value)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, list | tuple)


def item_key(key: Hashable, position: int) -> Hashable:
    """Return the key of a member of a tuple; the first result of a dropout is what is left of its input."""
    if isinstance(key, tuple) and key[0] == DROPOUT:
        return key if position == 0 else DRAWN
    return ("item", position, key)


def constant_key(value: Any) -> Hashable:
    """Return the key of what no op has made: a number by type and value, a tensor by what it looks like."""
    if isinstance(value, Tensor):
        return ("constant", tuple(map(int, value.shape)), value.dtype)
    return (type(value), str(value))
