"""Joint graphs: forward and backward of a model and its loss in one graph, captured through AOTAutograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitkit._torch import pytree
from splitkit.brief import brief
from splitkit.costs import Costs, default
from splitkit.engine.pair import Pair, divide
from splitkit.errors import CaptureError, SplitError
from splitkit.frontends import aot
from splitkit.frontends.capture import IN_EVAL_MODE, by_export, distinct, put_back, silence, works
from splitkit.frontends.capture import undisturbed as undisturbed
from splitkit.frontends.capture_errors import came_from_torch, capture_error, require_module
from splitkit.frontends.firstcall import after_a_call, in_eval_mode
from splitkit.frontends.jointchecks import check_graph, check_inputs, check_model, no_scalar, without_loss
from splitkit.frontends.jointsignature import JointSignature, like_example, signature_of
from splitkit.frontends.modulestate import owned_dicts
from splitkit.frontends.regionbudgets import refuse_region_budgets
from splitkit.frontends.trainstep import NO_LOSS, NO_TENSOR, Loss, TrainingStep, name_modules
from splitkit.graph.storages import mark_repeated
from splitkit.plans.policy import PolicyLike
from splitkit.training.flow import JointFlow


@dataclass(frozen=True)
class StepResult:
    """What a training step gives; parameters and buffers go by their qualified names, inputs as ``input 0`` ...

    Attributes:
        loss: the loss.
        gradients: the gradients of parameters and inputs.
        updates: the new values of buffers and inputs that the model writes.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor]
    updates: Mapping[str, Tensor]

    __repr__ = brief

    def __str__(self) -> str:
        return f"loss {self.loss.item():.6g}, {len(self.gradients)} gradients, {len(self.updates)} updates"


@dataclass(frozen=True)
class Joint:
    """Forward and backward of a training step as one graph.

    Attributes:
        graph_module: takes parameters, buffers, inputs and the gradient of the loss; gives the loss, the new values of
            inputs and buffers that the model writes, and the gradients. Functional: it writes to nothing.
        signature: which is which.
        model: the model, whose parameters `primals` takes; the graph that was captured of it, where that has constants
            which the model does not hold as buffers.
    """

    graph_module: fx.GraphModule
    signature: JointSignature
    model: nn.Module

    __repr__ = brief

    def __str__(self) -> str:
        known = self.signature
        return (
            f"Joint graph of {type(self.model).__name__}: {len(self.graph_module.graph.nodes)} nodes, "
            f"{len(known.parameters)} parameters, {len(known.buffers)} buffers, {len(known.inputs)} inputs, "
            f"{len(known.gradients)} gradients"
        )

    def primals(self, *args: Any, **kwargs: Any) -> list[Any]:
        """What forward takes, in order: parameters and buffers of the model as they are now, and the inputs.

        Raises:
            GraphError: SK109 for inputs that differ from the example in structure, shape, dtype or a Python value.
        """
        signature = self.signature
        leaves = signature.leaves(args, kwargs)
        found: list[Any] = []
        for node in self.graph_module.graph.find_nodes(op="placeholder"):
            if node.name in signature.parameters:
                found.append(self.model.get_parameter(signature.parameters[node.name]))
            elif node.name in signature.buffers:
                found.append(self.model.get_buffer(signature.buffers[node.name]))
            elif node.name in signature.inputs:
                found.append(like_example(node, leaves[signature.inputs[node.name]]))
        return found

    def tangents(self) -> list[Tensor]:
        """What backward starts from: one for the loss, zero for other outputs that have a gradient."""
        signature, found = self.signature, list[Tensor]()
        for node in self.graph_module.graph.find_nodes(op="placeholder"):
            if node.name in signature.tangents:
                value = node.meta["val"]
                make = torch.ones if signature.tangents[node.name] == signature.loss else torch.zeros
                found.append(make(value.shape, dtype=value.dtype, device=value.device))
        return found

    def run(self, *args: Any, **kwargs: Any) -> StepResult:
        """Run the graph on real inputs. Nothing is written: not the model, its gradients, nor the inputs."""
        with torch.no_grad():
            outputs = fx.Interpreter(self.graph_module).boxed_run([*self.primals(*args, **kwargs), *self.tangents()])
        return self.read(outputs)

    def read(self, outputs: Sequence[Any]) -> StepResult:
        """Name what the graph, or forward and backward one after the other, gave."""
        signature = self.signature
        names = {**signature.parameters, **signature.buffers, **{n: f"input {i}" for n, i in signature.inputs.items()}}
        gradients = {names[name]: outputs[i] for i, name in signature.gradients.items()}
        updates = {names[name]: outputs[i] for i, name in signature.updates.items()}
        return StepResult(outputs[signature.loss], gradients, updates)

    def partition(self, partition_fn: aot.PartitionFn) -> Pair:
        """The halves that one of torch's partition functions makes of a copy of the graph, less what nobody reads."""
        count = self.signature.forward_outputs
        example = [n.meta["val"] for n in self.graph_module.graph.find_nodes(op="placeholder")]
        forward, backward = partition_fn(_copied(self.graph_module), example, num_fwd_outputs=count)
        for half in (forward, backward):  # torch leaves views of saved values that nobody reads, and that hold memory
            half.graph.eliminate_dead_code()
            half.recompile()
        return Pair.of(forward, backward, count)

    @cached_property
    def flow(self) -> JointFlow:
        """The facts about the graph that policies read; SK305 for one that asks for a memory budget itself."""
        refuse_region_budgets(self.graph_module)
        return aot.joint_flow(self.graph_module, self.signature.forward_outputs)

    def split(self, policy: PolicyLike, costs: Costs | None = None) -> Pair:
        """The halves that a policy makes of the graph."""
        return divide(self.flow, policy, costs or default(self.graph_module))


def capture_joint(model: nn.Module, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Joint:
    """The joint graph of ``loss(model(*args, **kwargs))`` and its gradients, for analysis and planning.

    Dynamo captures the model whole, or else `splitkit.capture` does (then checkpoint tags are lost); AOTAutograd traces
    forward and backward of that. Nodes have ``meta["val"]``, and the path of the module that they belong to:
    ``meta["nn_module_stack"]`` in forward, ``meta["fwd_nn_module_stack"]`` in backward, where a sum of gradients is
    that of the module of its first term. Checkpoint tags are kept. The loss is the only output that has a gradient;
    other outputs of the model are computed only as far as the loss needs them. What forward would compute twice it
    computes once, and so does backward (`splitkit.engine.dedupe`).

    Sizes and Python values (``use_cache=False``) are fixed as in the example. What logs, prints or warns is left out.
    Checks (``linalg.solve`` of a singular matrix, ``one_hot`` of a class too high) stay, in forward. Buffers and random
    generators are not touched. To train by a policy take `splitkit.apply` or `splitkit.backend`, which also take models
    that fall into several graphs, or change the metadata of their inputs.

    Args:
        model: a module, in the mode (train or eval) that is meant.
        args: example inputs; those that require grad get a gradient.
        loss: from the model's output to a scalar; by default what is called ``loss`` in the output (an attribute, key
            or field), else the only number in it that requires grad (`splitkit.losses`).
        kwargs: example keyword inputs.

    Raises:
        CaptureError: SK401, with the line of the model that could not be captured and what to try; also when the loss
            is no scalar, depends on nothing that requires grad, or cannot be told (the outputs are listed), for tensor
            subclasses, and for dropout within an
            ``LSTM`` and its like, which torch loses. SK410 for a custom op with an effect that its schema hides.
    """
    require_module(model)
    check_model(model, loss)
    step, inputs = TrainingStep(model, loss), distinct((args, kwargs))
    try:
        gm, signature = after_a_call(model, inputs[0], inputs[1], lambda: _traced(step, *inputs))
    except CaptureError as error:
        if isinstance(model, fx.GraphModule) or not came_from_torch(error):
            raise
        step, gm, signature = _of_export(error, model, loss, *inputs)
    if signature.tangents and signature.loss not in signature.tangents.values():
        step.copies = True
        gm, signature = _traced(step, *inputs)
    check_graph(model, gm.graph, signature)
    given = pytree.tree_leaves((args, kwargs))
    check_inputs(model, signature, given)
    inputs = (n for n in gm.graph.find_nodes(op="placeholder") if n.name in signature.inputs)
    mark_repeated((n, given[signature.inputs[n.name]]) for n in inputs)
    name_modules(gm.graph)
    has_all = {name for name, _ in model.named_buffers(remove_duplicate=False)}.issuperset(signature.buffers.values())
    return Joint(gm, signature, model if has_all else step.model)


def _traced(
    step: TrainingStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[fx.GraphModule, JointSignature]:
    # AOTAutograd swaps parameters for stand-ins, and does not put all back of a module that goes by two names
    with undisturbed(), put_back(owned_dicts(step)):
        try:
            gm = aot.trace_joint(step, args, kwargs)
        except Exception as error:
            if NO_TENSOR in str(error):
                raise no_scalar(step.model, "is no tensor") from None
            if NO_LOSS in str(error):
                raise without_loss(step.model, args, kwargs) from None
            raise _located(capture_error(step.model, "dynamo", error), error) from error
    gm = aot.without_duplicates(gm, aot.count_forward_outputs(gm.graph))
    return gm, signature_of(gm.graph, step, args, kwargs)


def _of_export(
    error: CaptureError, model: nn.Module, loss: Loss | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TrainingStep, fx.GraphModule, JointSignature]:
    """The same of the graph that torch.export makes of a model that Dynamo does not take whole, or ``error``."""
    try:
        with silence():
            step = TrainingStep(by_export(model, args, kwargs), loss)
            return (step, *_traced(step, args, kwargs))
    except Exception:
        cause = error.__cause__
        if model.training and works(lambda: _traced(TrainingStep(model, loss), args, kwargs), in_eval_mode(model)):
            error = CaptureError(error.code, error.reason, IN_EVAL_MODE, error.nodes)
        raise error from cause


def _located(error: SplitError, cause: Exception) -> SplitError:
    """The error with the line of the model that Dynamo was at, which no traceback shows."""
    line = aot.line_of(cause)
    if not line or line in error.reason:
        return error
    return type(error)(error.code, f"{error.reason}\n  at {line}", error.remedy, error.nodes)


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own over the same attributes and values: torch's partitioners edit what they are given."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    return fx.GraphModule(gm, graph)
