"""Capture forward and backward of a model and its loss as one joint graph, through AOTAutograd."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from splitkit._torch import pytree
from splitkit.costs import Costs, default
from splitkit.engine.codegen.part_modules import pickle_by_nodes
from splitkit.engine.divide_stages import divide_by_policy
from splitkit.engine.pair import Pair
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import CaptureError, GraphError
from splitkit.frontends import aot
from splitkit.frontends.capture.ambient_autocast import refuse_autocast
from splitkit.frontends.capture.capture import (
    IN_EVAL_MODE,
    buffers_on_meta,
    capture_by_export,
    capture_conditions,
    capture_forward,
    copy_repeated,
    inputs_on_meta,
    silenced,
    succeeds,
)
from splitkit.frontends.capture.capture_errors import came_from_torch, capture_error, failed_run_error, require_module
from splitkit.frontends.capture.first_call import (
    are_real,
    in_eval_mode,
    outputs_of_call,
    retry_after_call,
    tables_restored,
)
from splitkit.frontends.sharded_step import (
    NO_LOSS,
    NO_TENSOR,
    ShardedStep,
    has_shards,
    loss_in,
    refuse_fsdp,
    refuse_sharded_inputs,
)
from splitkit.graph.joint_marks import mark_of
from splitkit.graph.losses import GIVE, no_loss
from splitkit.graph.shards import local_tensor, sharded_as
from splitkit.graph.storages import mark_repeated_inputs, parameters_and_buffers, storage_key
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
                found.append(local_tensor(self.model.get_parameter(signature.parameters[node.name])))
            elif node.name in signature.buffers:
                found.append(local_tensor(self.model.get_buffer(signature.buffers[node.name])))
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
        held = dict(self.model.named_parameters(remove_duplicate=False))
        made = {names[name]: outputs[i] for i, name in signature.gradients.items()}
        gradients = {name: sharded_as(gradient, held.get(name)) for name, gradient in made.items()}
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
        aot.refuse_region_budgets(self.graph_module)
        return aot.joint_flow(self.graph_module, self.signature.forward_outputs)

    def split(self, policy: PolicyLike, costs: Costs | None = None) -> Pair | StagedStep:
        """Divide the graph by a policy: into forward and backward or, if the plan has stages, into those of each.

        Raises:
            PlanError: the plan breaks a rule (SK2xx).
            PolicyError: the policy refuses (SK3xx).
        """
        made = divide_by_policy(self.flow, policy, costs or default(self.graph_module))
        return replace(made, source=self) if isinstance(made, StagedStep) else made


@overload
def capture(model: nn.Module, *args: Any, training: Literal[True], **kwargs: Any) -> Joint: ...
@overload
def capture(
    model: nn.Module | ExportedProgram, *args: Any, how: str = "export", dynamic: bool = False, **kwargs: Any
) -> fx.GraphModule: ...
def capture(
    model: nn.Module | ExportedProgram,
    *args: Any,
    how: str = "export",
    dynamic: bool = False,
    training: bool = False,
    **kwargs: Any,
) -> fx.GraphModule | Joint:
    """Return the graph that ``model(*args, **kwargs)`` runs, with ``meta["val"]`` on every node that has a value.

    Pass a graph that was captured elsewhere without inputs. torch.export hides the nodes of a ``no_grad`` or
    ``autocast`` block behind a single node; ``capture`` unfolds them, so that they can be split::

        gm = torch.export.export(model, inputs).module()     wrap_with_autocast(..., body, x)      1 node
        gm = splitkit.capture(gm)                            enter; 200 nodes of body; exit        200 nodes

    Call the graph module like the model. It holds the *same* parameters and buffers, not copies: an optimizer step on
    one also changes the other. Training mode, dropout, tied weights and module paths (``meta["nn_module_stack"]``) are
    kept; ``no_grad`` and ``autocast`` blocks become enter and exit nodes. An ``autocast`` around ``capture`` becomes a
    block around the whole model. Neither the model's buffers nor the random number generators are touched.

    A ``torch.autograd.Function`` becomes one node that calls it, so that its backward is kept. An output may be of any
    class that ``copy.copy`` can copy (such as ``DynamicCache``); the class is registered with ``torch.utils._pytree``
    for the whole process. The inputs may include a transformers cache: the graph takes its tensors, and returns a new
    cache instead of changing it. If capture fails because the model hooks submodules or creates buffers in its first
    call, the model is called once and captured again.

    A graph does not call the model's modules. Their forward hooks run once, during the capture: the graph keeps the ops
    that they run, and what they store in lists, dicts, objects and variables is removed again. A warning names modules
    with hooks; `splitkit.engine.split.Split.register_forward_hook` sets them on a split.

    If all parameters are on ``meta``, inputs and buffers are captured on ``meta`` as well, on whatever device they are.
    Non-persistent buffers keep their values for `splitkit.load` if they are real, or if it is a transformers model.

    Python values among the inputs, and sizes unless ``dynamic``, are fixed at capture: the graph raises
    ``RuntimeError`` when it is called with different ones. Global state that the model's Python code reads
    (``torch.is_grad_enabled()``, ``torch.is_autocast_enabled()``, ``self.training``) is also fixed, without a check:
    capture runs with grad mode on. ``inference_mode`` blocks become ``no_grad`` blocks.

    Args:
        model: a module; or, without inputs, an ``ExportedProgram`` or a ``GraphModule``, which is left as it is.
        args: example inputs.
        how: ``"export"``, which accepts most models, or ``"symbolic_trace"``, which keeps calls of torch's modules as
            single nodes, loses ``no_grad`` and ``autocast`` blocks, and refuses models that write their own buffers
            outside of those modules, or have forward hooks themselves, such as the one of ``weight_norm``.
        dynamic: lets every size of the inputs vary where the model allows it (``how="export"`` only).
        training: captures a training step: returns what `capture_joint` does, which takes a ``loss``, too. A model
            whose forward has an argument of this name gets it.
        kwargs: example keyword inputs.

    Raises:
        CaptureError: SK401, with the line of the model that could not be captured, what to try, and the graph up to
            that point in ``reached``, and for ``training`` with ``how`` or ``dynamic``; SK404 for a Function that no
            node can call, SK405 for hooks on gradients, which a graph cannot have.
    """
    if training and isinstance(model, nn.Module) and "training" in inspect.signature(model.forward).parameters:
        training, kwargs = False, {**kwargs, "training": training}
    if not training:
        return capture_forward(model, args, kwargs, how, dynamic)
    if how != "export" or dynamic:
        raise CaptureError(
            "SK401",
            "a training step has no other way of capture, and keeps its sizes",
            "Leave out how= and dynamic=, or training=.",
        )
    return capture_joint(cast(nn.Module, model), *args, **kwargs)


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
    refuse_sharded_inputs((args, kwargs))
    with buffers_on_meta(model):
        step, gm, signature = _traced_step(model, loss, *inputs_on_meta(model, copy_repeated((args, kwargs))))
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


def _traced_step(
    model: nn.Module, loss: Loss | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[TrainingStep | ShardedStep, fx.GraphModule, JointSignature]:
    """Return the step of a model, with its joint graph."""
    step = (ShardedStep if has_shards(model) else TrainingStep)(model, loss)
    try:
        gm, signature = retry_after_call(model, args, kwargs, lambda: _traced(step, args, kwargs))
    except CaptureError as error:
        if isinstance(model, fx.GraphModule) or isinstance(step, ShardedStep) or not came_from_torch(error):
            raise
        step, gm, signature = _traced_of_export(error, model, loss, args, kwargs)
    # The loss is a view, and AOTAutograd differentiates its base: trace again with a copy of the loss.
    if signature.tangents and signature.loss not in signature.tangents.values():
        step.copies = True
        gm, signature = _traced(step, args, kwargs)
    return step, gm, signature


def _traced(
    step: TrainingStep | ShardedStep,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    original: nn.Module | None = None,
) -> tuple[fx.GraphModule, JointSignature]:
    """Return the joint graph of a step; errors name ``original`` if the model of the step is a capture of it."""
    model = original or step.model
    # AOTAutograd replaces parameters while it traces, and does not restore all of a module with two names
    with capture_conditions(), tables_restored(step):
        try:
            trace = aot.trace_sharded if isinstance(step, ShardedStep) else aot.trace_joint
            gm = trace(step, args, kwargs)
        except Exception as error:
            if NO_TENSOR in str(error):
                raise no_scalar_error(model, "is not a tensor") from None
            if NO_LOSS in str(error):
                raise no_loss_error(model, args, kwargs) from None
            how = "AOTAutograd" if isinstance(step, ShardedStep) else "dynamo"
            raise aot.with_model_line(capture_error(model, how, error), error) from error
    if isinstance(step, ShardedStep):
        step.clean(gm.graph)
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


# Refuse models that cannot be captured as a joint graph, where the graph would compute something else.


def check_model(model: nn.Module, loss: object) -> None:
    """Refuse models whose joint graph would differ from the model."""
    if isinstance(loss, nn.Module) and {*loss.parameters()} - {*model.parameters()}:
        raise CaptureError("SK401", "the loss has parameters of its own", "Make the loss a submodule of the model.")
    refuse_fsdp(model)
    # torch decomposes an RNN without the dropout between its layers (`_rnn_helper`: 2.11, 2.13, 2.15)
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.training and module.dropout and module.num_layers > 1:
            raise CaptureError(
                "SK401",
                f"torch loses the dropout between the layers of {name or 'the model'}, an {type(module).__name__}",
                "Set its dropout to 0, or write one module per layer with torch.nn.Dropout between them.",
                [name],
            )


def check_graph(model: nn.Module, graph: fx.Graph, signature: JointSignature) -> None:
    """Refuse a joint graph whose loss is not a real scalar, or whose inputs are not all plain tensors."""
    outputs: Any = graph.output_node().args[0]
    value = outputs[signature.loss].meta["val"]
    if tuple(value.shape) and value.numel() != 1:
        raise no_scalar_error(model, f"has the shape {tuple(value.shape)}")
    if value.is_complex():
        raise no_scalar_error(model, "is complex")
    if pieces := [n.name for n in graph.find_nodes(op="placeholder") if aot.is_piece(n)]:
        raise CaptureError(
            "SK401",
            f"{type(model).__name__} has tensor subclasses, which a joint graph takes apart",
            "Train it with splitkit.apply or splitkit.backend, which put them back together.",
            pieces,
        )
    known = {*signature.parameters, *signature.buffers, *signature.inputs, *signature.tangents}
    if others := [n.name for n in graph.find_nodes(op="placeholder") if n.name not in known]:
        raise _shared_memory_error(model, others)
    if not signature.tangents:
        raise CaptureError(
            "SK401",
            f"the loss of {type(model).__name__} does not depend on any parameter or input that requires grad",
            "Call requires_grad_(), or give a loss that depends on the parameters.",
        )


def check_inputs(model: nn.Module, signature: JointSignature, leaves: list[Any]) -> None:
    """Refuse writes to an input that is given twice: a write to one would not reach the other in the graph."""
    memory = Counter(storage_key(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    inputs = [name for name in signature.updates.values() if name in signature.inputs]
    if twice := [name for name in inputs if memory[storage_key(leaves[signature.inputs[name]])] > 1]:
        raise _shared_memory_error(model, twice)


def no_loss_error(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CaptureError:
    """Return the error for a model that returns no loss, with a list of its outputs if it runs."""
    try:
        reason = no_loss(outputs_of_call(model, args, kwargs))
    except Exception:  # the model itself may fail
        reason = "the model returns no loss"
    reason = f"{type(model).__name__} cannot be captured with its gradients: {reason}"
    remedy = f"Give one: capture_joint(model, ..., {GIVE}) or --loss cross_entropy; or return it as `loss`."
    return CaptureError("SK401", reason, remedy)


def no_scalar_error(model: nn.Module, what: str) -> CaptureError:
    """Return the error for a loss that is not a real scalar tensor."""
    return CaptureError(
        "SK401",
        f"the loss of {type(model).__name__} {what}",
        "Use capture_joint(..., loss=lambda output: ...) with a function that returns a real scalar tensor.",
    )


def _shared_memory_error(model: nn.Module, inputs: list[str]) -> CaptureError:
    return CaptureError(
        "SK401",
        f"{type(model).__name__} writes to inputs that share memory",
        "Give inputs that do not share memory, or train it with splitkit.apply or splitkit.backend.",
        inputs,
    )


# Describe the inputs and outputs of a joint graph, and check new inputs against the example.


_FIXED = (bool, int, float, str, Enum)
"""Types of inputs whose values are fixed at capture, besides ``None``."""


@dataclass(frozen=True)
class JointSignature:
    """The meaning of the inputs and outputs of a joint graph. Inputs go by the name of their placeholder.

    Attributes:
        parameters: input -> qualified name of the parameter.
        buffers: input -> qualified name of the buffer.
        inputs: input -> which leaf of ``(args, kwargs)`` it is.
        tangents: input -> position of the output whose gradient it is.
        loss: position of the loss among the outputs.
        updates: position of an output -> the input that it is the new value of.
        gradients: position of an output -> the input that it is the gradient of. Inputs on which the loss does not
            depend have no entry.
        forward_outputs: how many outputs belong to forward; those of backward follow.
        structure: pytree specification of ``(args, kwargs)``.
        constants: leaf of ``(args, kwargs)`` -> the number, string or ``None`` that was fixed at capture.
    """

    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    inputs: Mapping[str, int]
    tangents: Mapping[str, int]
    loss: int
    updates: Mapping[int, str]
    gradients: Mapping[int, str]
    forward_outputs: int
    structure: Any
    constants: Mapping[int, Any]

    __repr__ = brief

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of inputs in the order of the example; keywords and dict keys may come in any order.

        Raises:
            GraphError: SK109 for inputs of another structure, or with another number or string.
        """
        try:
            leaves = list(self.structure.flatten_up_to((args, dict(kwargs))))  # 2.11, 2.13, 2.15
        except ValueError as error:
            raise _other_inputs(f"the inputs have another structure than the example: {error}") from error
        for i, constant in self.constants.items():
            if not _same(leaves[i], constant):
                raise _other_inputs(f"an input is {leaves[i]!r}, but the graph was captured for {constant!r}")
        return leaves


def _same(given: Any, constant: Any) -> bool:
    """Return whether type and value are equal. Floats are compared as text: -0.0 is not 0.0, and nan equals nan."""
    if type(given) is not type(constant):
        return False
    return repr(given) == repr(constant) if isinstance(constant, float) else bool(given == constant)


def like_example(node: fx.Node, given: Any) -> Any:
    """Return ``given`` for an input of a joint graph; raise SK109 if its shape or dtype differs from the example."""
    value = node.meta["val"]
    if isinstance(value, Tensor) and isinstance(given, Tensor):
        wanted, found = ((tuple(t.shape), t.dtype) for t in (value, given))
        if wanted != found:
            raise _other_inputs(
                f"an input is {found[1]} {list(found[0])}, but {node.name} was {wanted[1]} {list(wanted[0])}"
            )
    return given


def _other_inputs(reason: str) -> GraphError:
    return GraphError("SK109", reason, "Give inputs like those of capture_joint, or capture again.")


def read_signature(
    graph: fx.Graph, step: TrainingStep | ShardedStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> JointSignature:
    """Return the signature of the joint graph of a step with these inputs."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    inputs = graph.find_nodes(op="placeholder")
    outputs: Any = graph.output_node().args[0]
    known = step.names()
    positions = {n.name: i for n in inputs if (i := aot.input_position(n)) is not None}
    return JointSignature(
        parameters={n.name: known[name] for n in inputs if (name := aot.parameter_name(n))},
        buffers={n.name: known[name] for n in inputs if (name := aot.buffer_name(n))},
        inputs=positions,
        tangents={n.name: i for n, i in aot.outputs_of_tangents(graph)},
        loss=aot.position_of_output(graph, 0) or 0,
        updates={i: n.name for i, n in aot.inputs_of_updates(graph)},
        gradients={i: n.name for i, n in aot.inputs_of_gradients(graph) if outputs[i] is not None},
        forward_outputs=aot.count_forward_outputs(graph),
        structure=structure,
        constants={i: leaf for i, leaf in enumerate(leaves) if leaf is None or isinstance(leaf, _FIXED)},
    )


# Join a model and its loss in one module, from which a joint graph is captured.


_WRAPPED = "model"
_ROOT = "L['self']"  # Dynamo's name of the module that it captures
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
Loss = Callable[[Any], Tensor]


class TrainingStep(nn.Module):
    """A model and its loss.

    Attributes:
        copies: whether to return a copy of the loss: AOTAutograd would differentiate the base of a loss that is a view.
    """

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.copies = False
        self.training = model.training

    def names(self) -> dict[str, str]:
        """Return each name of a parameter or buffer in the step -> its first name in the model."""
        first: dict[int, str] = {}
        held = parameters_and_buffers(self)
        return {name: first.setdefault(id(t), name.removeprefix(f"{_WRAPPED}.")) for name, t in held.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of the model on these inputs."""
        # The hooks of a captured graph only check inputs, in ways that Dynamo cannot trace.
        call = self.model.forward if isinstance(self.model, fx.GraphModule) else self.model
        output = call(*args, **kwargs)
        loss = loss_in(output, self.loss)
        return loss.clone() if self.copies else loss


def sum_of_outputs(output: Any) -> Tensor | None:
    """Return the sum of all tensors in an output that require grad, as a scalar float; ``None`` if there are none."""
    values = [v for v in pytree.tree_leaves(output) if isinstance(v, Tensor) and v.requires_grad]
    sums = [(torch.view_as_real(v) if v.is_complex() else v).float().sum() for v in values]
    return torch.stack(sums).sum() if sums else None


def name_modules(graph: fx.Graph) -> None:
    """Remove the step from module paths, and give a path to the nodes of backward that have none."""
    for node in graph.nodes:
        for key in _STACKS:
            if stack := node.meta.get(key):
                named = {n: (path.replace(f"{_ROOT}.{_WRAPPED}", _ROOT), kind) for n, (path, kind) in stack.items()}
                node.meta[key] = {name: named[name] for name, (path, _) in stack.items() if path != _ROOT}
        if node.op == "call_function" and mark_of(node) == "is_backward":
            stacks = (n.meta.get(key) for n in (node, *node.all_input_nodes) for key in reversed(_STACKS))
            node.meta[_STACKS[1]] = next(filter(None, stacks), {})


# Run a divided training step as a module: it returns the loss, and backward of the loss runs the backward half.


class DividedStep(nn.Module):
    """A module whose forward and backward are the halves of a pair, or those of stages, one after the other.

    Called like the model, it returns the loss and writes to buffers and inputs as the model does.

    Attributes:
        model: the model, which holds the parameters.
        joint: forward and backward as one graph.
        pair: the two halves of that graph, or its stages.
    """

    def __init__(self, joint: Joint, pair: Pair | StagedStep) -> None:
        super().__init__()
        self.model = joint.model
        self.joint, self.pair = joint, pair
        self.training = joint.model.training

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the forward half."""
        primals = self.joint.primals(*args, **kwargs)
        outputs: tuple[Any, ...] = _Halves.apply(self.joint, self.pair, *primals)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for position, index in _indices(self.joint, self.joint.signature.updates).items():
                primals[index].copy_(outputs[position])
        loss: Tensor = outputs[self.joint.signature.loss]
        return loss


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Joint, pair: Pair | StagedStep, *primals: Any) -> tuple[Any, ...]:
        outputs, ctx.held = pair.run_forward(primals)
        ctx.joint, ctx.pair, ctx.primals = joint, pair, len(primals)
        others = (v for i, v in enumerate(outputs) if i != joint.signature.loss and isinstance(v, Tensor))
        ctx.mark_non_differentiable(*others)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        signature = ctx.joint.signature
        of_outputs = zip(signature.tangents.values(), ctx.joint.tangents(), strict=True)
        # The loss has the gradient that autograd passes; other outputs are not differentiable, so theirs are zero.
        tangents = [gradients[position] if position == signature.loss else zero for position, zero in of_outputs]
        found = ctx.pair.run_backward(ctx.held, tangents)
        of_primals: list[Tensor | None] = [None] * ctx.primals
        for position, index in _indices(ctx.joint, signature.gradients).items():
            of_primals[index] = found[position - signature.forward_outputs]
        return None, None, *of_primals


def _indices(joint: Joint, named: Mapping[int, str]) -> dict[int, int]:
    """Return output position -> index of the primal of the same name in ``named``."""
    placeholders = joint.graph_module.graph.find_nodes(op="placeholder")
    primals = [n.name for n in placeholders if n.name not in joint.signature.tangents]
    index = {name: i for i, name in enumerate(primals)}
    return {position: index[name] for position, name in named.items()}
