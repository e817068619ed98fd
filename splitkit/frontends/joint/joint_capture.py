"""Capture forward and backward of a model and its loss as one joint graph, through AOTAutograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from splitkit._torch import pytree
from splitkit.costs import Costs, default
from splitkit.engine.codegen.part_modules import pickle_by_nodes
from splitkit.engine.joint_stages.divide_stages import divide_by_policy
from splitkit.engine.joint_stages.staged_step import StagedStep
from splitkit.engine.pair import Pair
from splitkit.errors import CaptureError
from splitkit.frontends import aot
from splitkit.frontends.capture.ambient_autocast import refuse_autocast
from splitkit.frontends.capture.capture import (
    IN_EVAL_MODE,
    capture_by_export,
    copy_repeated,
    dicts_restored,
    silenced,
    succeeds,
)
from splitkit.frontends.capture.capture import capture_conditions as capture_conditions
from splitkit.frontends.capture.capture_errors import came_from_torch, capture_error, require_module
from splitkit.frontends.capture.first_call import are_real, in_eval_mode, retry_after_call
from splitkit.frontends.compile.region_budgets import refuse_region_budgets
from splitkit.frontends.example_run import failed_run_error
from splitkit.frontends.joint.joint_checks import check_graph, check_inputs, check_model, no_loss_error, no_scalar_error
from splitkit.frontends.joint.joint_signature import JointSignature, like_example, read_signature
from splitkit.frontends.joint.train_step import NO_LOSS, NO_TENSOR, Loss, TrainingStep, name_modules
from splitkit.frontends.module_state import owned_dicts
from splitkit.graph.storages import mark_repeated_inputs
from splitkit.plans.policy import PolicyLike
from splitkit.short_repr import brief
from splitkit.training.flow import JointFlow


@dataclass(frozen=True)
class StepResult:
    """Results of a training step, by qualified names of parameters and buffers; inputs are named ``input 0`` ...

    Attributes:
        loss: the loss.
        gradients: the gradients of parameters and inputs.
        updates: the new values of buffers and inputs that the model writes to.
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
        graph_module: the graph. Its inputs are parameters, buffers, inputs and the gradient of the loss; its outputs
            are the loss, the new values of inputs and buffers that the model writes to, and the gradients. It is
            functional: it writes to nothing.
        signature: the meaning of each input and output.
        model: the model, whose parameters `primals` reads; or its captured graph, if that has constants which the model
            does not hold as buffers.
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
        """Return the inputs of forward, in order: parameters and buffers of the model as they are now, and the inputs.

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
        """Return the gradients that backward starts from: one for the loss, zero for other outputs with a gradient."""
        signature, found = self.signature, list[Tensor]()
        for node in self.graph_module.graph.find_nodes(op="placeholder"):
            if node.name in signature.tangents:
                value = node.meta["val"]
                make = torch.ones if signature.tangents[node.name] == signature.loss else torch.zeros
                found.append(make(value.shape, dtype=value.dtype, device=value.device))
        return found

    def run(self, *args: Any, **kwargs: Any) -> StepResult:
        """Run the graph on real inputs. Nothing is written to: not the model, not its gradients, not the inputs."""
        with torch.no_grad():
            outputs = fx.Interpreter(self.graph_module).boxed_run([*self.primals(*args, **kwargs), *self.tangents()])
        return self.read(outputs)

    def read(self, outputs: Sequence[Any]) -> StepResult:
        """Name the outputs of the graph, or of forward followed by backward."""
        signature = self.signature
        names = {**signature.parameters, **signature.buffers, **{n: f"input {i}" for n, i in signature.inputs.items()}}
        gradients = {names[name]: outputs[i] for i, name in signature.gradients.items()}
        updates = {names[name]: outputs[i] for i, name in signature.updates.items()}
        return StepResult(outputs[signature.loss], gradients, updates)

    def partition(self, partition_fn: aot.PartitionFn) -> Pair:
        """Divide a copy of the graph by one of torch's partition functions, and remove nodes without readers."""
        count = self.signature.forward_outputs
        example = [n.meta["val"] for n in self.graph_module.graph.find_nodes(op="placeholder")]
        forward, backward = partition_fn(_copied(self.graph_module), example, num_fwd_outputs=count)
        for half in (forward, backward):  # torch leaves unread views of saved values, which hold memory
            half.graph.eliminate_dead_code()
            half.recompile()
        return Pair.of(forward, backward, count)

    @cached_property
    def flow(self) -> JointFlow:
        """The facts about the graph that policies read; raises SK305 if the model sets a memory budget itself."""
        refuse_region_budgets(self.graph_module)
        return aot.joint_flow(self.graph_module, self.signature.forward_outputs)

    def split(self, policy: PolicyLike, costs: Costs | None = None) -> Pair | StagedStep:
        """Divide the graph by a policy: into forward and backward or, if the plan has stages, into those of each.

        Raises:
            PlanError: the plan breaks a rule (SK2xx).
            PolicyError: the policy refuses (SK3xx).
        """
        return divide_by_policy(self.flow, policy, costs or default(self.graph_module))


def capture_joint(model: nn.Module, *args: Any, loss: Loss | None = None, **kwargs: Any) -> Joint:
    """Return the joint graph of ``loss(model(*args, **kwargs))`` and its gradients, for analysis and planning.

    Dynamo captures the whole model or, if it cannot, `splitkit.capture` does; AOTAutograd then traces forward and
    backward. Nodes have ``meta["val"]`` and the path of their module: ``meta["nn_module_stack"]`` in forward and
    ``meta["fwd_nn_module_stack"]`` in backward, where a sum of gradients belongs to the module of its first term.
    Activation checkpointing tags are kept if Dynamo captured the model. Only the loss has a gradient; other outputs of
    the model are computed only as far as the loss needs them. Common subexpressions are computed once in forward and
    once in backward (`splitkit.engine.common_subexpressions`).

    Sizes and Python values (``use_cache=False``) are fixed as in the example. Calls that log, print or warn are left
    out. Checks (``linalg.solve`` of a singular matrix, ``one_hot`` of a class that is too large) stay in forward.
    Buffers and RNG states are not changed. To train under a policy use `splitkit.apply` or `splitkit.backend`, which
    also accept models with graph breaks and models that change the metadata of their inputs.

    Args:
        model: a module, in the mode (train or eval) in which it is to be captured.
        args: example inputs; those that require grad get a gradient.
        loss: a function of the model's output that returns a scalar. The default is the attribute, key or field
            ``loss`` of the output, else its only scalar that requires grad (`splitkit.graph.losses`).
        kwargs: example keyword inputs.

    Raises:
        CaptureError: SK401, with the line of the model that could not be captured and what to try; also if the loss is
            not a scalar, depends on nothing that requires grad, or cannot be found (the outputs are listed), for tensor
            subclasses, and for dropout within an ``LSTM`` and the like, which torch loses. SK410 for a custom op with a
            side effect that its schema does not show.
    """
    require_module(model)
    refuse_autocast("the joint graph would have full precision", "Enter it in the model's forward instead.")
    check_model(model, loss)
    step, inputs = TrainingStep(model, loss), copy_repeated((args, kwargs))
    try:
        gm, signature = retry_after_call(model, inputs[0], inputs[1], lambda: _traced(step, *inputs))
    except CaptureError as error:
        if isinstance(model, fx.GraphModule) or not came_from_torch(error):
            raise
        step, gm, signature = _traced_of_export(error, model, loss, *inputs)
    # The loss is a view, and AOTAutograd differentiates its base: trace again with a copy of the loss.
    if signature.tangents and signature.loss not in signature.tangents.values():
        step.copies = True
        gm, signature = _traced(step, *inputs)
    check_graph(model, gm.graph, signature)
    given = pytree.tree_leaves((args, kwargs))
    check_inputs(model, signature, given)
    inputs = (n for n in gm.graph.find_nodes(op="placeholder") if n.name in signature.inputs)
    mark_repeated_inputs((n, given[signature.inputs[n.name]]) for n in inputs)
    name_modules(gm.graph)
    pickle_by_nodes(gm)
    # Export lifts constants of the model to buffers that only the exported graph has.
    has_all = {name for name, _ in model.named_buffers(remove_duplicate=False)}.issuperset(signature.buffers.values())
    return Joint(gm, signature, model if has_all else step.model)


def _traced(
    step: TrainingStep, args: tuple[Any, ...], kwargs: Mapping[str, Any], original: nn.Module | None = None
) -> tuple[fx.GraphModule, JointSignature]:
    """Return the joint graph of a step; errors name ``original`` if the model of the step is a capture of it."""
    model = original or step.model
    # AOTAutograd replaces parameters while it traces, and does not restore all of a module with two names
    with capture_conditions(), dicts_restored(owned_dicts(step)):
        try:
            gm = aot.trace_joint(step, args, kwargs)
        except Exception as error:
            if NO_TENSOR in str(error):
                raise no_scalar_error(model, "is not a tensor") from None
            if NO_LOSS in str(error):
                raise no_loss_error(model, args, kwargs) from None
            raise aot.with_model_line(capture_error(model, "dynamo", error), error) from error
    gm = aot.without_duplicates(gm, aot.count_forward_outputs(gm.graph))
    return gm, read_signature(gm.graph, step, args, kwargs)


def _traced_of_export(
    error: CaptureError, model: nn.Module, loss: Loss | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TrainingStep, fx.GraphModule, JointSignature]:
    """Return the joint graph of the graph that torch.export makes of a model; raise ``error`` if that fails too.

    If export captures the model and its loss is refused, that refusal is raised instead.
    """
    exported: fx.GraphModule | None = None
    try:
        with silenced():
            exported = capture_by_export(model, args, kwargs)
            step = TrainingStep(exported, loss)
            return (step, *_traced(step, args, kwargs, model))
    except Exception as failed:
        if exported is not None and isinstance(failed, CaptureError) and not came_from_torch(failed):
            raise failed from None
        if are_real(model, (args, kwargs)) and (refusal := failed_run_error(model, args, kwargs)) is not None:
            raise refusal from refusal.__cause__
        cause = error.__cause__
        if model.training and succeeds(lambda: _traced(TrainingStep(model, loss), args, kwargs), in_eval_mode(model)):
            error = CaptureError(error.code, error.reason, IN_EVAL_MODE, error.nodes)
        raise error from cause


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph with the same attributes and values: torch's partitioners edit their argument."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    return fx.GraphModule(gm, graph)
