"""Carry out what a policy saves of a layer by torch's selective checkpointing, in eager mode."""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (  # 2.11, 2.13, 2.15
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.fx import Node
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,  # 2.11, 2.13, 2.15
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from splitkit._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
    fake_mode,
    pytree,
    without_modes,
    written_arguments,
)
from splitkit.costs import Costs, default
from splitkit.engine.pair import Pair, divide
from splitkit.errors import CaptureError, PlanError, message_line
from splitkit.frontends.capture.capture_errors import require_module
from splitkit.frontends.capture.first_call import hook_state_restored
from splitkit.frontends.compile.compile import BudgetLike, as_policy
from splitkit.frontends.joint_capture import Joint, Loss, capture_joint, no_loss_error, sum_of_outputs
from splitkit.frontends.trace_settings import without_meta_errors
from splitkit.graph.losses import loss_of
from splitkit.graph.node_selection import no_module
from splitkit.graph.storages import storages_shown, tensors
from splitkit.memory.measurement import MeasuredMemory, measure_memory
from splitkit.plans.policy import PolicyLike
from splitkit.short_repr import brief
from splitkit.training.flow import BACKWARD, JointFlow


@dataclass(frozen=True)
class CheckpointContext:
    """What one layer saves, as a ``context_fn`` for ``torch.utils.checkpoint``; make one with `checkpoint_context`.

    Attributes:
        layers: the names of the layers that run these ops.
        ops: the ops of a layer in eager mode, in order, without ops that read integers alone: these run again.
        saved: the positions of those whose results are saved; all others run again in backward.
        note: the note of the plan of a layer.
        replays: the positions of views that autograd makes again, of fake tensors only, after a write to a view.
    """

    layers: tuple[str, ...]
    ops: tuple[Any, ...]
    saved: frozenset[int]
    note: str
    replays: frozenset[int] = frozenset()

    __repr__ = brief

    def __str__(self) -> str:
        kept = ", ".join(str(self.ops[i]) for i in sorted(self.saved)) or "nothing but its inputs"
        note = f"; {self.note}" if self.note else ""
        return f"{len(self.layers)} layers of {len(self.ops) - len(self.replays)} ops, each saves {kept}{note}"

    def __deepcopy__(self, memo: object) -> CheckpointContext:
        """Return itself: it is constant, and a copy of a model carries it."""
        return self

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of one call of a layer: for its forward, and for its recompute.

        Raises:
            PlanError: SK307 inside the contexts, if a layer runs other ops than those which were planned.
        """
        decide = partial(self._decide, {False: 0, True: 0})
        return create_selective_checkpoint_contexts(decide)  # type: ignore[no-any-return, no-untyped-call]

    def _decide(self, positions: dict[bool, int], state: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """Return what happens to an op of one call of a layer; they come in the order in which they run."""
        if not reads_floats(args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        ops, position = self.ops, positions[state.is_recompute]
        if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            while position in self.replays:
                position += 1
        positions[state.is_recompute] = position + 1
        if position >= len(ops) or ops[position] is not op:
            planned = ops[position] if position < len(ops) else "no further op"
            raise PlanError(
                "SK307",
                f"op {position} of a checkpointed layer is {op}, but {planned} was planned",
                "Plan with the inputs and the mode that training has: splitkit.checkpoint_context(model, 0.5, "
                "**batch). Enter an autocast in the model's forward, where planning sees it. If the ops of the layer "
                "depend on its values, use splitkit.apply.",
            )
        return CheckpointPolicy.MUST_SAVE if position in self.saved else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint_context(
    model: nn.Module,
    policy: PolicyLike | BudgetLike,
    *args: Any,
    layers: str | None = None,
    costs: Callable[[fx.GraphModule], Costs] | None = None,
    **kwargs: Any,
) -> CheckpointContext:
    """Plan what each layer of a model saves for backward, as a ``context_fn`` for ``torch.utils.checkpoint``.

    This is selective activation checkpointing for eager mode, with an unmodified model. One layer is planned, and the
    plan applies to all layers that run the same ops::

        context = splitkit.checkpoint_context(model, 0.5, **batch)
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": context})  # transformers
        checkpoint(layer, x, use_reentrant=False, context_fn=context)                            # any other

    The context saves, op by op, what the plan of the layer saves. When backward reaches the layer,
    ``torch.utils.checkpoint`` recomputes the rest of it at once and in the order of forward, including ops that only
    lead to saved values. An op with several results is saved as a whole. A value that the joint graph computes once may
    be computed twice in eager mode; then its first copy is saved. Random ops are recomputed from the same RNG state.
    `dry_run` predicts the peak of a step to the byte, without running it.

    Older versions of transformers call ``activation_checkpointing_enable`` ``gradient_checkpointing_enable``.

    The model runs once, on fake tensors; it is not changed, and nothing is computed.

    Args:
        model: the model, in training mode; or the layer itself.
        policy: plans one layer; or a budget for what one layer saves: ``"least"`` for its inputs only, bytes
            (``"2MiB"``), or a share (0.5) of the bytes saved without activation checkpointing.
        args: example inputs of the model.
        layers: a pattern for the names of layers (``"blocks.*"``). The default is the layers that transformers
            checkpoints, or the whole model if it has none.
        costs: returns the costs of a joint graph, as in `backend`.
        kwargs: example keyword inputs.

    Raises:
        CaptureError: SK401 if the model does not run on fake tensors of the inputs, or a layer cannot be captured.
        PlanError: SK307 if the layers differ, or a layer cannot be checkpointed with this plan: it writes to its inputs
            or buffers, or to a value that would be saved, or a saved value does not exist in eager mode.
        PolicyError: SK304 for a pattern without a layer, else as in `backend`.
    """
    require_module(model)
    chosen = as_policy(policy, of="saved")
    names = _names(model, layers)
    try:
        with without_meta_errors():
            recorded = record_layers(model, names, args, kwargs)
    except Exception as error:
        raise no_fake_run(model, error, "splitkit.apply(model, policy, **batch), which looks at real values") from error
    first = _equal(recorded, names)
    joint = _joint(model.get_submodule(first.name), first)
    keys, drawn = _keys(joint)
    positions = _positions(first.ops)
    unsavable = {n for n in keys if n in drawn or keys[n] not in positions}
    for node in unsavable:  # eager mode does not save it alone, so plans compute it again
        if joint.flow.producer(node) is node:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    prices = (costs or default)(joint.graph_module)
    pair = divide(_as_checkpointed(joint.flow, unsavable), chosen, prices)
    saved = _saved_ops(joint, pair, keys, positions)
    note = pair.plan.note if pair.plan is not None else ""
    targets = tuple(op.target for op in first.decided)
    return CheckpointContext(tuple(layer.name for layer in recorded), targets, saved, note, first.replays)


def _as_checkpointed(flow: JointFlow, unsavable: Collection[Node]) -> JointFlow:
    """Return the facts of a layer whose random ops may run again: checkpoints restore the state of the generator.

    What eager mode does not save, and backward computes, stays in backward.
    """
    drawing = {n for n, effects in flow.effects.items() if effects.random and not effects.writes}
    late = {n: "forward does not run it in eager mode" for n in unsavable if flow.save_all.home(n) == BACKWARD}
    once = {n: why for n, why in {**flow.once, **late}.items() if n not in drawing}
    kept = {n: tuple(b for b in before if b not in drawing or n not in drawing) for n, before in flow.after.items()}
    return replace(flow, once=MappingProxyType(once), after=defaultdict(tuple, kept))


def _names(model: nn.Module, pattern: str | None) -> list[str]:
    known = dict(model.named_modules())
    if pattern is None:
        found = [name for name, module in known.items() if is_transformers_layer(module)]
        return found or [""]
    found = [name for name in known if fnmatchcase(name, pattern) and name.count(".") == pattern.count(".")]
    if not found:
        raise no_module(f"the pattern {pattern!r} matches no module of the model", pattern, known)
    return found


def _equal(recorded: Sequence[RecordedLayer], names: Sequence[str]) -> RecordedLayer:
    """Return the first layer; raise SK307 if another one runs other ops, or one may not run twice."""
    if not recorded:
        raise PlanError(
            "SK307",
            f"the model runs none of its layers {', '.join(names[:3])} ... as checkpoints",
            "Call model.train(): layers of transformers are checkpoints in training only. Or name layers that run: "
            "checkpoint_context(model, 0.5, layers='blocks.*', ...).",
        )
    first = recorded[0]
    for other in recorded[1:]:
        if [op.target for op in other.decided] != [op.target for op in first.decided]:
            raise PlanError(
                "SK307",
                f"layers {first.name} and {other.name} run different ops, but one context is for equal layers only",
                "Plan them one by one, each with its own context: checkpoint_context(model, 0.5, "
                f"layers={other.name!r}, **batch).",
            )
    for op in first.ops:
        if any(number < 0 for number in op.writes):
            raise PlanError(
                "SK307",
                f"layer {first.name or type(first).__name__} writes to an input, a parameter or a buffer "
                f"({op.target}), and its recomputation in backward would write again",
                "Use splitkit.apply, which never runs a write twice, or leave this layer out of the checkpoints.",
            )
    return first


def _joint(layer: nn.Module, recorded: RecordedLayer) -> Joint:
    """Return the joint graph of a layer on inputs such as the recorded ones."""

    def real(value: Tensor) -> Tensor:
        made = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
        return made.requires_grad_(value.requires_grad)

    plain = copy.copy(layer)
    if is_transformers_layer(layer):
        plain.gradient_checkpointing = False  # type: ignore[assignment]
    args, kwargs = pytree.tree_map_only(Tensor, real, (recorded.args, dict(recorded.kwargs)))
    return capture_joint(plain, *args, loss=cast(Loss, sum_of_outputs), **kwargs)


def _positions(ops: Sequence[RecordedOp]) -> dict[Hashable, int]:
    """Return key -> the position of the first op with that key, without those whose results an op writes to."""
    written = {number for op in ops for number in op.writes}
    found: dict[Hashable, int] = {}
    for position, op in enumerate(op for op in ops if op.decided):
        if written.isdisjoint(op.made):
            found.setdefault(op.key, position)
    return found


def _saved_ops(
    joint: Joint, pair: Pair, keys: Mapping[Node, Hashable], positions: Mapping[Hashable, int]
) -> frozenset[int]:
    """Return the positions of the ops that are saved; raise SK307 for a saved value that eager mode cannot save."""
    nodes, flow = {n.name: n for n in joint.graph_module.graph.nodes}, joint.flow
    held = storages_shown(joint.graph_module.graph.find_nodes(op="placeholder"))
    makers = {name: flow.producer(nodes[name]) for name in pair.saved if not storages_shown([nodes[name]]) <= held}
    lost = [name for name, maker in makers.items() if keys.get(maker) not in positions]
    if lost:
        raise PlanError(
            "SK307",
            f"the plan saves {lost[0]}, and torch.utils.checkpoint cannot: no op of eager mode yields it alone, or a "
            "later op writes to it",
            "Use splitkit.apply, which carries out any plan, or a policy that does not save it.",
            lost,
        )
    return frozenset(positions[keys[maker]] for maker in makers.values())


def _keys(joint: Joint) -> tuple[Mapping[Node, Hashable], set[Node]]:
    """Return node -> the key of its op, as `recorded_ops` has them, and the nodes that come from random numbers."""
    signature, effects = joint.signature, joint.flow.effects
    inputs, state = signature.inputs, {**signature.parameters, **signature.buffers}
    own, passed, drawn = dict[Node, Hashable](), dict[Node, Hashable](), set[Node]()

    def key(value: Any) -> Hashable:
        return passed[value] if isinstance(value, Node) else constant_key(value)

    for node in joint.graph_module.graph.nodes:
        if node.op == "placeholder":
            given = ("input", inputs[node.name]) if node.name in inputs else ("tangent", node.name)
            passed[node] = ("state", state[node.name]) if node.name in state else given
        elif node.op == "get_attr":
            passed[node] = constant_key(node.meta.get("val"))
        elif node.target is operator.getitem:
            passed[node] = item_key(passed[node.args[0]], node.args[1])
        elif node.op == "call_function":
            own[node], passed[node] = keys_of(node.target, node.args, node.kwargs, key, effects[node].random)
            if passed[node] == DRAWN or effects[node].random:
                drawn.add(node)
    return own, drawn


# Record the ops of checkpointed layers in eager mode, and name their results so that a joint graph's can be matched.
#
# A joint graph and eager mode run the same ops below autograd, but in a joint graph equal ops are merged, dead ones
# are dropped, and none is in place. So ops are not matched by position: the key of a value is its op and the keys of
# what the op reads, down to parameters and inputs::
#
#     x, weight      ("input", 0), ("parameter", "linear.weight")
#     t              (aten.t, key of weight)
#     mm             (aten.mm, key of x, key of t)
#
# An op in place has the key of the op that is not. ``detach`` and ``clone`` pass the key of their input on, since the
# two differ in where they copy. Dropout is one op here and four there: what is computed of random numbers alone has
# the key ``DRAWN``, and its product with x the key ``(DROPOUT, key of x)``.
#
# Ops that read integers alone always run again. Some run other ops on real tensors, whose values they check, than on
# fakes (``one_hot``), and need not match.


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
        reads: the tensors that it reads, by id.
        gives: the tensors that it returns, by id.
        is_view: whether these lie in memory that was there.
    """

    target: Any
    key: Hashable
    made: frozenset[int]
    writes: frozenset[int]
    decided: bool
    reads: frozenset[int]
    gives: frozenset[int]
    is_view: bool


@dataclass(frozen=True)
class RecordedLayer:
    """A run of a layer.

    Attributes:
        name: the name of the layer in the model.
        args: its arguments, as fake tensors.
        kwargs: its keyword arguments.
        ops: what it ran, as `torch.utils.checkpoint` sees it.
        replays: the positions, of the ops about which a context decides, at which autograd made a view again.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    ops: tuple[RecordedOp, ...]
    replays: frozenset[int]

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
        if any(is_transformers_layer(copied.get_submodule(name)) for name in names):
            for module in copied.modules():  # with checkpoints, transformers' models use no cache
                if hasattr(module, "gradient_checkpointing"):
                    module.gradient_checkpointing = True
                if is_transformers_layer(module):
                    module._gradient_checkpointing_func = operator.call
        for name in names:
            _watch(copied.get_submodule(name), name, found)
        copied(*inputs, **named)
    return found


def _watch(layer: nn.Module, name: str, found: list[RecordedLayer]) -> None:
    def recorded(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = run.keywords if isinstance(run, partial) else {}
        given = {**bound, **kwargs}
        recorder = Recorder(layer, args, given)
        with recorder:
            output = run(*args, **kwargs)
        decided = [op for op in recorder.ops if op.decided]
        found.append(RecordedLayer(name, args, given, tuple(recorder.ops), _replays(decided, output)))
        return output

    if is_transformers_layer(layer):
        layer._gradient_checkpointing_func = recorded  # type: ignore[assignment]
    else:
        layer.forward = partial(recorded, layer.forward)


def _replays(ops: Sequence[RecordedOp], output: Any) -> frozenset[int]:
    """Return the positions of the views that autograd made again, after a write to a view of the same memory.

    It needs their ``grad_fn`` alone, so nothing reads them.
    """
    first: dict[Hashable, int] = {}
    found, read = set[int](), {id(leaf) for leaf in pytree.tree_leaves(output)}
    for i, op in enumerate(ops):
        first.setdefault(op.key, i)
    for i, op in reversed(list(enumerate(ops))):
        if op.is_view and i > first[op.key] and read.isdisjoint(op.gives):
            found.add(i)
        else:
            read |= op.reads
    return frozenset(found)


def is_transformers_layer(module: nn.Module) -> bool:
    """Return whether transformers' ``model.activation_checkpointing_enable()`` checkpoints this module."""
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the ops that run, with the keys of their results."""

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RecordedOp] = []
        self._keys: dict[int, Hashable] = {}
        self._alive: list[Tensor] = []  # so that no id is used again
        self._storages: dict[Any, int] = {}
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            self._name(tensor, ("state", name), outside=True)
        for i, leaf in enumerate(pytree.tree_leaves((args, dict(kwargs)))):
            if isinstance(leaf, Tensor):
                self._name(leaf, ("input", i), outside=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op and record it."""
        kwargs, before = kwargs or {}, len(self._storages)
        output = func(*args, **kwargs)
        own, passed = keys_of(func, args, kwargs, self._key, draws(func, args, kwargs))
        leaves = list(tensors(output))
        for i, tensor in enumerate(leaves):
            self._name(tensor, passed if isinstance(output, Tensor) else item_key(passed, i))
        if func in SAC_IGNORED_OPS:
            return output
        written = list(tensors(written_arguments(func, args, kwargs) if isinstance(func, OpOverload) else []))
        for tensor in written:
            self._keys[id(tensor)] = passed
        made = frozenset(self._storage(t) for t in leaves)
        writes = frozenset(self._storage(t) for t in written)
        read = frozenset({id(leaf) for leaf in pytree.tree_leaves((args, kwargs))} & self._keys.keys())
        given, is_view = frozenset(map(id, leaves)), not written and len(self._storages) == before
        self.ops.append(RecordedOp(func, own, made, writes, reads_floats(args, kwargs), read, given, is_view))
        return output

    def _name(self, tensor: Tensor, key: Hashable, outside: bool = False) -> None:
        self._keys[id(tensor)] = key
        self._alive.append(tensor)
        self._storage(tensor, outside)

    def _storage(self, tensor: Tensor, outside: bool = False) -> int:
        number = len(self._storages) + 1
        if tensor.layout is not torch.strided:
            return number
        return self._storages.setdefault(tensor.untyped_storage()._cdata, -number if outside else number)

    def _key(self, value: Any) -> Hashable:
        if id(value) in self._keys:
            return self._keys[id(value)]
        return constant_key(value)


def reads_floats(args: Any, kwargs: Any) -> bool:
    """Return whether there is a tensor of floats or complex numbers among the arguments of an op."""
    return any(map(is_inexact, tensors((args, kwargs))))


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
    leaves = pytree.tree_leaves(list(args), is_leaf=lambda value: not isinstance(value, list | tuple))
    given = [key(value) for value in leaves]
    named = ((n, tuple(map(key, v)) if isinstance(v, list | tuple) else key(v)) for n, v in sorted(kwargs.items()))
    terms = (_out_of_place(func), len(args), *given, *named)
    own = sha256(repr(terms).encode()).hexdigest()  # of fixed size: terms of terms double with each residual branch
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


# Run a model on fake tensors, but compute its integers and booleans, so that it takes the path of a real run.
#
# transformers, for instance, looks whether a mask is all ones, or positions begin anew, and builds a causal mask only
# if it must. On fakes it cannot look, and always builds one: another run, with another peak.


class RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes ops whose inputs and results are integers or booleans; all others run on fakes."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, on fakes if a float is among its inputs or results."""
        kwargs = kwargs or {}
        given = list(tensors((args, kwargs)))
        if any(isinstance(t, FakeTensor) or is_inexact(t) for t in given):
            run = _grouped_mm if func is GROUPED_MM and args[0].dtype != torch.bfloat16 else func
            return run(*args, **kwargs)
        if not given:
            made = func(*args, **kwargs)  # fake
            if any(map(is_inexact, tensors(made))):
                return made
        with without_modes():
            made = func(*args, **kwargs)
        return pytree.tree_map_only(Tensor, lambda t: self.mode.from_tensor(t) if is_inexact(t) else t, made)


GROUPED_MM = torch.ops.aten._grouped_mm.default  # 2.11, 2.13, 2.15


def _grouped_mm(rows: Tensor, matrices: Tensor, offsets: Tensor | None = None, *_: Any, **others: Any) -> Tensor:
    """Return the fake result of a product of groups of rows (by experts) with a matrix each.

    torch's fake kernel takes bfloat16 only (2.13, 2.15), but its kernels take any floats.
    """
    offsets = others.get("offs", offsets)
    groups = list(rows.shape[:-2] if offsets is None else offsets.shape if rows.ndim == matrices.ndim == 2 else ())
    return rows.new_empty(*groups, rows.shape[-2], matrices.shape[-1])


def is_inexact(tensor: Tensor) -> bool:
    """Return whether a tensor has floats or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


@contextmanager
def on_fakes(model: nn.Module, inputs: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a copy of a model with fake parameters, and its inputs; inside, only integers are computed.

    The state of the random generators, and of the model's forward hooks, is restored at the end.
    """
    hooks = hook_state_restored(model)
    with fake_mode() as mode, RealIntegers(mode), torch.enable_grad(), torch.random.fork_rng(), hooks:
        made: dict[int, Tensor] = {}

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                with without_modes():
                    made[id(tensor)] = mode.from_tensor(tensor) if is_inexact(tensor) else tensor.clone()
            return made[id(tensor)]

        state = {id(t): fake(t) for t in (*model.parameters(), *model.buffers())}
        copied = copy.deepcopy(model, dict[int, Any](state))
        yield copied, pytree.tree_map_only(Tensor, fake, inputs)


def no_fake_run(model: nn.Module, error: Exception, instead: str) -> CaptureError:
    """Return the SK401 for a model that failed on fakes.

    Args:
        model: the model.
        error: how it failed.
        instead: what takes a model that looks at values of floats, or at integers that follow from them.
    """
    reason = f"the model does not run on fake tensors of these inputs: {message_line(error)}"
    if not isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        remedy = "Give inputs that the model accepts; register fake kernels for custom ops; let copy.deepcopy copy it."
        return CaptureError("SK401", reason, remedy)
    experts = getattr(getattr(model, "config", None), "_experts_implementation", None)  # transformers >= 5
    blind = experts is None or experts in _BLIND_EXPERTS
    other = "" if blind else 'Call model.set_experts_implementation("batched_mm") first. Or use '
    return CaptureError("SK401", f"{reason} needs values", f"{other or 'Use '}{instead}.")


_BLIND_EXPERTS = ("grouped_mm", "batched_mm")
"""Ways in which transformers runs experts without looking at how many tokens each has."""


# Measure the memory of a training step that does not run: on fake tensors.


def dry_run(
    model: nn.Module,
    *args: Any,
    loss: Loss | None = None,
    **kwargs: Any,
) -> MeasuredMemory:
    """Return the memory of a training step of a model as `measure_memory` would measure it, without running it.

    The step is forward, the loss and backward, with the model's activation checkpointing, hooks and autograd functions.
    A copy of the model runs on fake tensors: nothing is computed or allocated, and the model is not changed.

    Args:
        model: the model, in the mode (train or eval) in which it will run.
        args: inputs, of which only shapes and dtypes count.
        loss: a function of the model's output that returns a scalar; the default is as in `capture_joint`.
        kwargs: keyword inputs.

    Raises:
        CaptureError: SK401 if the model does not run on fakes of the inputs, or has no loss.
    """
    require_module(model)

    def step(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        # The output is not held during backward, as in `model(**batch).loss.backward()`.
        value = (loss_of if loss is None else loss)(module(*inputs, **named))
        if value is None:
            raise no_loss_error(model, args, kwargs)
        value.backward()  # type: ignore[no-untyped-call]

    try:
        with without_meta_errors(), on_fakes(model, (args, kwargs)) as (copied, (inputs, named)):
            return measure_memory(step, copied, inputs, named)
    except CaptureError:
        raise
    except Exception as error:
        raise no_fake_run(model, error, "splitkit.measure_memory, which runs the step") from error
