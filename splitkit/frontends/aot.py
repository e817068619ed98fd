"""Call AOTAutograd and read its descriptors; nearly all of its private API that splitkit uses is in this file."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx, nn
from torch._dynamo.functional_export import dynamo_graph_capture_for_export  # 2.11, 2.13, 2.15
from torch._functorch._aot_autograd import descriptors  # 2.11, 2.13, 2.15
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # 2.11, 2.13, 2.15
from torch._guards import tracing  # 2.11, 2.13, 2.15
from torch.fx import Node
from torch.fx.experimental._backward_state import BackwardState  # 2.11, 2.13, 2.15

from splitkit._torch import pytree, without_modes, without_onednn
from splitkit.costs import Costs, default
from splitkit.engine.common_subexpressions import deduplicate
from splitkit.engine.pair import Pair, divide
from splitkit.errors import CaptureError, PolicyError, SplitError
from splitkit.frontends.capture.ambient_autocast import refuse_kept_casts
from splitkit.frontends.trace_settings import as_in_export, with_gradients_on_meta, without_globals, without_logging
from splitkit.graph.dataflow import analyze
from splitkit.graph.fake_runs import rebinds
from splitkit.graph.ops import effects_of
from splitkit.memory.kernels.target_kernels import TargetKernels, own_kernels
from splitkit.plans.policy import PolicyLike
from splitkit.training.flow import JointFlow, output_nodes

_HERE = Path(__file__).parent

# Fix every size and number as in the example, however often the code was captured before, and trace into RNNs as into
# any module (2.11, 2.13, 2.15).
_FIXED: dict[str, Any] = {
    "specialize_int": True,
    "specialize_float": True,
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "allow_rnn": True,
}
# A joint graph has the outputs of forward, then those of backward, which have these classes (2.11, 2.13, 2.15).
_BACKWARD_OUTPUTS = (
    descriptors.GradAOTOutput,
    descriptors.BackwardTokenAOTOutput,
    descriptors.PhiloxUpdatedBackwardOffsetAOTOutput,
)
_PIECES = (descriptors.SubclassGetAttrAOTOutput, descriptors.SubclassGetAttrAOTInput)


def trace_joint(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    """Return the joint graph of ``module``: Dynamo captures the module, AOTAutograd traces its forward and backward.

    Placeholders and outputs carry descriptors (``meta["desc"]``); nodes carry their values (``meta["val"]``) and their
    module paths.
    """
    with (
        without_onednn(),
        without_globals(type(module).forward),
        torch._dynamo.config.patch(_FIXED),
        torch.fx.traceback.preserve_node_meta(),
        without_logging(),
        _no_lost_state(module, args, kwargs),
    ):
        captured = dynamo_graph_capture_for_export(module)(*args, **kwargs)
    refuse_kept_casts(captured)
    # AOTAutograd must see the fake mode and the symbols of the capture, which are in its tracing context.
    with tracing(captured.meta["tracing_context"]):
        return _joint_graph(module, captured, args, kwargs)


def trace_sharded(step: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    """Return the joint graph of a step with ``DTensor``, which Dynamo would take apart; see `trace_joint`."""
    # models ask torch whether they may look at values
    with torch.fx.traceback.preserve_node_meta(), as_in_export():
        return _joint_graph(step, step, args, kwargs)


def _joint_graph(
    module: nn.Module, captured: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> fx.GraphModule:
    """Return the joint graph of what was captured of a module, without tokens; all inputs have values."""
    held = (*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, dict(kwargs))))
    kernels = own_kernels(t for t in held if isinstance(t, torch.Tensor))
    with without_onednn(), with_gradients_on_meta(), TargetKernels(kernels), ExitStack() as stack:
        gm = aot_export_joint_with_descriptors(stack, captured, args, dict(kwargs)).graph_module
    without_tokens(gm)
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    for node in gm.graph.find_nodes(op="placeholder"):
        if (position := input_position(node)) is not None:
            _record_constant(node, leaves[position])
    return gm


def _record_constant(node: Node, given: Any) -> None:
    """Set ``meta["val"]`` of a number, string or ``None`` among the inputs, where AOTAutograd writes no value."""
    if "val" not in node.meta and not isinstance(given, torch.Tensor):
        node.meta["val"] = given


@contextmanager
def _no_lost_state(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Refuse a model that rebinds a buffer or parameter, of which Dynamo only warns; pass other warnings on.

    Dynamo also warns of transformers' output collector, which transformers itself puts back: that warning is dropped.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if "side effects" in text and re.search(r"\b_(buffers|parameters)\b", text):  # 2.11, 2.13, 2.15
            if rebinds(module, args, kwargs):
                raise CaptureError(
                    "SK401",
                    "the model rebinds a buffer or parameter, which a graph cannot do",
                    "Write to it in place: self.mean.copy_(...). splitkit.apply and splitkit.backend accept the model.",
                )
        elif not re.search(r"""\["G\['__import_transformers_\w+'\]\._active_collector"\]$""", text):  # 2.11, 2.13, 2.15
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def line_of_model(error: BaseException) -> str:
    """Return ``file:line: source`` of what Dynamo was tracing when it raised ``error``; empty if that is not known."""
    stack = getattr(error, "real_stack", None) or ()  # of TorchDynamoException: 2.11, 2.13, 2.15
    frames = [f for f in stack if not Path(f.filename).is_relative_to(_HERE)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {(frames[-1].line or '').strip()}" if frames else ""


def with_model_line(error: SplitError, cause: Exception) -> SplitError:
    """Return the error with the line of the model that Dynamo was tracing, which no traceback shows."""
    line = line_of_model(cause)
    if line in error.reason:
        return error
    return type(error)(error.code, f"{error.reason}\n  at {line}", error.remedy, error.nodes)


def count_forward_outputs(graph: fx.Graph) -> int:
    """Return how many outputs of a joint graph belong to forward; those of backward follow them."""
    described = graph.output_node().meta["desc"]
    return next((i for i, d in enumerate(described) if isinstance(_unwrapped(d), _BACKWARD_OUTPUTS)), len(described))


def _unwrapped(descriptor: Any) -> Any:
    """Return the descriptor itself or, for a piece of a tensor subclass, the descriptor of the subclass."""
    while isinstance(descriptor, _PIECES):
        descriptor = descriptor.base
    return descriptor


def is_piece(node: Node) -> bool:
    """Return whether an input of a joint graph is a piece of a tensor subclass."""
    return bool(_pieces(node.meta["desc"]))


def parameter_name(node: Node) -> str | None:
    """Return the qualified name of the parameter that an input of a joint graph stands for, if it is one."""
    descriptor = _unwrapped(node.meta["desc"])
    return descriptor.target if isinstance(descriptor, descriptors.ParamAOTInput) else None


def buffer_name(node: Node) -> str | None:
    """Return the qualified name of the buffer that an input of a joint graph stands for, if it is one."""
    descriptor = _unwrapped(node.meta["desc"])
    return descriptor.target if isinstance(descriptor, descriptors.BufferAOTInput) else None


def input_position(node: Node) -> int | None:
    """Return the index of the leaf of ``(args, kwargs)`` that an input of a joint graph stands for, if it is one."""
    descriptor = _unwrapped(node.meta["desc"])
    return descriptor.idx if isinstance(descriptor, descriptors.PlainAOTInput) else None


def position_of_output(graph: fx.Graph, number: int) -> int | None:
    """Return the position in a joint graph of output ``number`` of the traced function; ``None`` if it is missing."""
    described = graph.output_node().meta["desc"]
    return next((i for i, d in enumerate(described) if d == descriptors.PlainAOTOutput(number)), None)


def is_tangent(node: Node) -> bool:
    """Return whether an input of a joint graph is the gradient of an output."""
    return isinstance(_unwrapped(node.meta.get("desc")), descriptors.TangentAOTInput)


def inputs_of_gradients(graph: fx.Graph) -> Iterator[tuple[int, Node]]:
    """Yield (position of an output, the input whose gradient it is); the gradient may be ``None``."""
    return _matched(graph, lambda d: d.grad_of if isinstance(d, descriptors.GradAOTOutput) else None)


def inputs_of_updates(graph: fx.Graph) -> Iterator[tuple[int, Node]]:
    """Yield (position of an output, the input that AOTAutograd copies it into after forward)."""
    return _matched(graph, _mutated)


def _mutated(descriptor: Any) -> Any:
    return descriptor.mutated_input if isinstance(descriptor, descriptors.InputMutationAOTOutput) else None


def _matched(graph: fx.Graph, input_of: Callable[[Any], Any]) -> Iterator[tuple[int, Node]]:
    """Yield (position of an output, the input its descriptor names); pieces of subclasses are matched one by one."""
    # A piece of an output names the whole input; it belongs to the same piece of that input.
    inputs = {(_unwrapped(d), _pieces(d)): n for n in graph.find_nodes(op="placeholder") if (d := n.meta.get("desc"))}
    for i, descriptor in enumerate(graph.output_node().meta.get("desc", ())):
        key = (input_of(_unwrapped(descriptor)), _pieces(descriptor))
        if key in inputs:
            yield i, inputs[key]


def _pieces(descriptor: Any) -> tuple[str, ...]:
    """Return the attribute path of a piece of a tensor subclass, outermost last; empty for a plain tensor."""
    if not isinstance(descriptor, _PIECES):
        return ()
    return (*_pieces(descriptor.base), str(descriptor.attr))


def updated_inputs(graph: fx.Graph) -> list[Node]:
    """Return the inputs that AOTAutograd writes after forward; all inputs, if a descriptor names one that is not there.

    That happens where inputs share memory: AOTAutograd replaces them by their base (a synthetic base).
    """
    inputs = graph.find_nodes(op="placeholder")
    mutated = [m for d in graph.output_node().meta.get("desc", ()) if (m := _mutated(_unwrapped(d))) is not None]
    known = {_unwrapped(n.meta.get("desc")) for n in inputs}
    found = [n for n in inputs if _unwrapped(n.meta.get("desc")) in mutated]
    return found if all(m in known for m in mutated) else inputs


def outputs_of_tangents(graph: fx.Graph) -> Iterator[tuple[Node, int]]:
    """Yield (tangent, position of the output whose gradient it is)."""
    described = list(enumerate(graph.output_node().meta["desc"]))
    outputs = {(_unwrapped(d), _pieces(d)): i for i, d in reversed(described)}
    for node in filter(is_tangent, graph.find_nodes(op="placeholder")):
        descriptor = node.meta["desc"]
        key = (_unwrapped(descriptor).output, _pieces(descriptor))
        if key in outputs:
            yield node, outputs[key]


PartitionFn = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""A partition function, as AOTAutograd calls it: ``fn(joint, inputs, *, num_fwd_outputs, **others)``."""


def joint_flow(gm: fx.GraphModule, forward_outputs: int, written: Iterable[Node] = ()) -> JointFlow:
    """Return the facts about a joint graph that AOTAutograd made.

    This works without descriptors too, which the graphs inside higher-order ops lack.

    Args:
        gm: the joint graph.
        forward_outputs: how many outputs belong to forward.
        written: nodes whose memory other code writes to between forward and backward.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    late = sorted(filter(_kind_of_backward_input, inputs), key=_kind_of_backward_input)
    updated = [*updated_inputs(gm.graph), *written]
    outputs: Any = gm.graph.output_node().args[0]
    # the gradients of the model's inputs; none in graphs without descriptors
    given = [outputs[i] for i, node in inputs_of_gradients(gm.graph) if input_position(node) is not None]
    return JointFlow.of(analyze(gm), late, forward_outputs, updated, output_nodes(given))


def without_duplicates(gm: fx.GraphModule, forward_outputs: int) -> fx.GraphModule:
    """Return a copy of a joint graph that AOTAutograd made, without common subexpressions."""
    return deduplicate(joint_flow(gm, forward_outputs))


def _kind_of_backward_input(node: Node) -> int:
    """Return 0 for an input of forward, else the place of its group in backward's signature.

    AOTAutograd passes tangents first, then RNG seeds and offsets, then backward state. The names are its contract with
    its partitioners (2.11, 2.13, 2.15).
    """
    name = str(node.target)
    if "tangents" in name:
        return 1
    if "bwd_seed" in name or "bwd_base_offset" in name:
        return 2
    return 3 if isinstance(node.meta.get("val"), BackwardState) else 0


def partition_fn(policy: PolicyLike, costs: Callable[[fx.GraphModule], Costs] = default) -> PartitionFn:
    """Return a policy as AOTAutograd's ``partition_fn``.

    Use it as ``functorch.compile.aot_function(f, fw_compiler, partition_fn=splitkit.extend.partition_fn(SaveAll()))``.
    For ``torch.compile``, use `splitkit.backend`.

    Args:
        policy: a policy that places nodes in ``"forward"`` and ``"backward"``.
        costs: returns the costs of a joint graph.

    Raises:
        SplitError: when the function is called; see `splitkit.engine.pair.divide`.
    """

    def partition(
        joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        pair = divide_joint(joint, inputs, num_fwd_outputs, policy, costs)
        return pair.forward, pair.backward

    return partition


def divide_joint(
    joint: fx.GraphModule,
    inputs: Any,
    forward_outputs: int,
    policy: PolicyLike,
    costs: Callable[[fx.GraphModule], Costs],
    written: Callable[[fx.Graph], Iterable[Node]] = lambda graph: (),
) -> Pair:
    """Divide a joint graph of AOTAutograd by a policy, with the metadata that AOTAutograd's compilers expect.

    ``written`` returns the nodes whose memory other code writes to between forward and backward.
    """
    for node, given in zip(joint.graph.find_nodes(op="placeholder"), pytree.tree_leaves(inputs), strict=False):
        _record_constant(node, given)
    joint = without_duplicates(joint, forward_outputs)
    refuse_region_budgets(joint)
    flow = joint_flow(joint, forward_outputs, written(joint.graph))
    with on_real_tensors(joint):
        prices = costs(joint)
    pair = divide(flow, policy, prices)
    _describe(pair, joint)
    return pair


@contextmanager
def on_real_tensors(joint: fx.GraphModule) -> Iterator[None]:
    """Run the block outside of torch's tracing modes, with guards off.

    Cost models of users run while torch traces. Measuring needs real tensors, and the sizes that a cost model looks at
    must not become guards of the compiled code.
    """
    values = (n.meta.get("val") for n in joint.graph.find_nodes(op="placeholder"))
    symbol = next((s for v in values for s in (getattr(v, "shape", ()) or [v]) if isinstance(s, torch.SymInt)), None)
    with ExitStack() as stack:
        stack.enter_context(without_modes())
        if symbol is not None:
            stack.enter_context(symbol.node.shape_env.suppress_guards())  # 2.11, 2.13, 2.15
        yield


def refuse_region_budgets(joint: fx.GraphModule) -> None:
    """Raise SK305 for a graph in which the model itself sets an activation memory budget for torch's partitioner.

    ``torch.autograd.graph.region_activation_memory_budget`` (2.13, 2.15) and the older ``memory_budget`` set it in the
    meta of nodes; 1.0 means no limit.
    """
    graphs = (module.graph for module in joint.modules() if isinstance(module, fx.GraphModule))
    for node in (node for graph in graphs for node in graph.nodes):
        custom = node.meta.get("custom")
        asked = custom.get("_region_activation_memory_budget") if isinstance(custom, dict) else None  # 2.13, 2.15
        asked = node.meta.get("memory_budget") if asked is None else asked  # 2.11, 2.13, 2.15
        if isinstance(asked, float) and asked < 1:
            raise PolicyError(
                "SK305",
                f"the model itself sets an activation memory budget of {asked} "
                f"(torch.autograd.graph.region_activation_memory_budget, at {node.name}), and a policy was given",
                "Set it in one place: remove it from the model and plan with splitkit.policies."
                f"Budget({asked}, of='saved'), or let torch obey it: joint.partition(...), torch.compile(model).",
                [node],
            )


def _describe(pair: Pair, joint: fx.GraphModule) -> None:
    """Set the output descriptors and the node marks that the compilers of the halves read."""
    described = joint.graph.output_node().meta.get("desc")
    forward, backward = pair.forward.graph.output_node(), pair.backward.graph.output_node()
    if described is not None:
        handed = cast(Any, forward.args[0])[pair.outputs :]
        forward.meta["desc"] = [*described[: pair.outputs], *(_saved(i, n) for i, n in enumerate(handed))]
        backward.meta["desc"] = list(described[pair.outputs :])
    for node in pair.backward.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            node.meta["autograd_backward"] = True


def _saved(position: int, node: Node) -> Any:
    if node.meta.get("saved_tensor_with_no_vc_check"):
        return descriptors.SavedForBackwardsNoVcCheckAOTOutput(position)
    return descriptors.SavedForBackwardsAOTOutput(position)


# Turn the ops with effects in a joint graph, which AOTAutograd orders by tokens, back into plain calls.


# Tokens among the inputs and outputs of a joint graph, which order effects (2.11, 2.13, 2.15).
_TOKENS = (
    descriptors.ForwardTokenAOTInput,
    descriptors.BackwardTokenAOTInput,
    descriptors.ForwardTokenAOTOutput,
    descriptors.BackwardTokenAOTOutput,
)


def without_tokens(gm: fx.GraphModule) -> None:
    """Turn ``token, y = with_effects(token, op, x)`` into ``y = op(x)``, in place, and drop tokens from the signature.

    ``linalg.cholesky``, ``solve`` and ``inv`` check their results with such ops. Tokens are inputs and outputs that the
    model does not have, and order edges already keep calls with effects in order.

    Raises:
        CaptureError: SK410 for an op that is registered with an effect that its schema does not show: without the
            token, the effect would be invisible.
    """
    for node in list(gm.graph.nodes):
        if node.target is torch.ops.higher_order.with_effects:
            _call_plainly(gm, node)
    inputs = [n for n in gm.graph.find_nodes(op="placeholder") if isinstance(n.meta.get("desc"), _TOKENS)]
    output = gm.graph.output_node()
    described = output.meta.get("desc", ())
    if inputs or any(isinstance(d, _TOKENS) for d in described):
        values: Any = output.args[0]
        kept = [i for i, d in enumerate(described) if not isinstance(d, _TOKENS)]
        output.args = (type(values)(values[i] for i in kept),)
        output.meta["desc"] = type(described)(described[i] for i in kept)
        for node in inputs:
            gm.graph.erase_node(node)
    gm.recompile()


def _call_plainly(gm: fx.GraphModule, node: Node) -> None:
    token, op, *args = node.args
    with gm.graph.inserting_before(node):
        plain = gm.graph.call_function(op, tuple(args), dict(node.kwargs))  # type: ignore[arg-type]
    results = len(getattr(getattr(op, "_schema", None), "returns", ())) or 1
    plain.meta = {key: value for key, value in node.meta.items() if key != "val"}
    values = tuple(node.meta["val"])[1:] if "val" in node.meta else ()
    if values:
        plain.meta["val"] = values[0] if results == 1 else values
    found = effects_of(plain, gm)
    if not (found.check or found.impure):
        raise CaptureError(
            "SK410",
            f"{op} is registered with an effect that its schema does not show",
            "Train the model with splitkit.apply or splitkit.backend, or tell splitkit: "
            f"splitkit.extend.declare(torch.ops.{op}, impure=True).",
            [node.name],
        )
    for user in list(node.users):
        position: Any = user.args[1]
        if position == 0:
            user.replace_all_uses_with(token)  # type: ignore[arg-type]
        elif results == 1:
            user.replace_all_uses_with(plain)
        else:
            user.target, user.args = operator.getitem, (plain, position - 1)
            continue
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
