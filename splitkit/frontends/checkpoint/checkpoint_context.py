"""Carry out what a policy saves of a layer by torch's selective checkpointing, in eager mode."""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.fx import Node
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from splitkit._torch import pytree
from splitkit.costs import Costs, default
from splitkit.engine.pair import Pair, divide
from splitkit.errors import PlanError
from splitkit.frontends.capture.capture_errors import require_module
from splitkit.frontends.checkpoint.real_integers import no_fake_run
from splitkit.frontends.checkpoint.recorded_ops import (
    DRAWN,
    RecordedLayer,
    RecordedOp,
    constant_key,
    is_transformers_layer,
    item_key,
    keys_of,
    reads_floats,
    record_layers,
)
from splitkit.frontends.compile.budget_words import BudgetLike, as_policy
from splitkit.frontends.joint.joint_capture import Joint, capture_joint
from splitkit.frontends.joint.train_step import Loss, sum_of_outputs
from splitkit.frontends.trace_settings import without_meta_errors
from splitkit.graph.node_selection import no_module
from splitkit.graph.storages import storages_shown
from splitkit.plans.policy import PolicyLike
from splitkit.short_repr import brief
from splitkit.training.flow import JointFlow


@dataclass(frozen=True)
class CheckpointContext:
    """What one layer saves, as a ``context_fn`` for ``torch.utils.checkpoint``; make one with `checkpoint_context`.

    Attributes:
        layers: the names of the layers that run these ops.
        ops: the ops of a layer in eager mode, in order, without ops that read integers alone: these run again.
        saved: the positions of those whose results are saved; all others run again in backward.
        note: the note of the plan of a layer.
    """

    layers: tuple[str, ...]
    ops: tuple[Any, ...]
    saved: frozenset[int]
    note: str

    __repr__ = brief

    def __str__(self) -> str:
        kept = ", ".join(str(self.ops[i]) for i in sorted(self.saved)) or "nothing but its inputs"
        note = f"; {self.note}" if self.note else ""
        return f"{len(self.layers)} layers of {len(self.ops)} ops, each saves {kept}{note}"

    def __deepcopy__(self, memo: object) -> CheckpointContext:
        """Return itself: it is constant, and a copy of a model carries it."""
        return self

    def __call__(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of one call of a layer: for its forward, and for its recompute.

        Raises:
            PlanError: SK307 inside the contexts, if a layer runs other ops than those which were planned.
        """
        return create_selective_checkpoint_contexts(_Decisions(self))  # type: ignore[no-any-return, no-untyped-call]


class _Decisions:
    """The policy function of one call of a layer: what happens to each op, in the order in which they run."""

    def __init__(self, context: CheckpointContext) -> None:
        self.context = context
        self.positions = {False: 0, True: 0}

    def __call__(self, state: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not reads_floats(args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        ops, position = self.context.ops, self.positions[state.is_recompute]
        self.positions[state.is_recompute] += 1
        if position >= len(ops) or ops[position] is not op:
            planned = ops[position] if position < len(ops) else "no further op"
            raise PlanError(
                "SK307",
                f"op {position} of a checkpointed layer is {op}, but {planned} was planned",
                "Plan with the inputs and the mode that training has: splitkit.checkpoint_context(model, 0.5, "
                "**batch). Enter an autocast in the model's forward, where planning sees it. If the ops of the layer "
                "depend on its values, use splitkit.apply.",
            )
        return CheckpointPolicy.MUST_SAVE if position in self.context.saved else CheckpointPolicy.PREFER_RECOMPUTE


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
    _tag_unsavable(joint, {n for n in keys if n in drawn or keys[n] not in positions})
    prices = (costs or default)(joint.graph_module)
    pair = divide(_repeatable(joint.flow), chosen, prices)
    saved = _saved_ops(joint, pair, keys, positions)
    note = pair.plan.note if pair.plan is not None else ""
    targets = tuple(op.target for op in first.decided)
    return CheckpointContext(tuple(layer.name for layer in recorded), targets, saved, note)


def _repeatable(flow: JointFlow) -> JointFlow:
    """Return the facts of a layer whose random ops may run again: checkpoints restore the state of the generator."""
    drawing = {n for n, effects in flow.effects.items() if effects.random and not effects.writes}
    once = {n: why for n, why in flow.once.items() if n not in drawing}
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


def _tag_unsavable(joint: Joint, unsavable: Collection[Node]) -> None:
    """Tag the nodes of forward that eager mode does not save alone, so that plans compute them again."""
    for node in unsavable:
        if joint.flow.producer(node) is node:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


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
    state = {**signature.parameters, **signature.buffers}
    own, passed, drawn = dict[Node, Hashable](), dict[Node, Hashable](), set[Node]()

    def key(value: Any) -> Hashable:
        return passed[value] if isinstance(value, Node) else constant_key(value)

    for node in joint.graph_module.graph.nodes:
        if node.op == "placeholder":
            passed[node] = ("state", state[node.name]) if node.name in state else _input_key(signature.inputs, node)
        elif node.op == "get_attr":
            passed[node] = constant_key(node.meta.get("val"))
        elif node.target is operator.getitem:
            passed[node] = item_key(passed[node.args[0]], node.args[1])
        elif node.op == "call_function":
            own[node], passed[node] = keys_of(node.target, node.args, node.kwargs, key, effects[node].random)
            if passed[node] == DRAWN or effects[node].random:
                drawn.add(node)
    return own, drawn


def _input_key(inputs: Mapping[str, int], node: Node) -> Hashable:
    return ("input", inputs[node.name]) if node.name in inputs else ("tangent", node.name)
