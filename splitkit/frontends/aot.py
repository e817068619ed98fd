"""The door to AOTAutograd: all of its private API that splitkit stands on, and what its descriptors say."""

from __future__ import annotations

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

from splitkit._torch import pytree
from splitkit.costs import Costs, default
from splitkit.engine.dedupe import deduplicated
from splitkit.engine.pair import Pair, divide
from splitkit.errors import CaptureError
from splitkit.frontends.quietlogs import without_logging
from splitkit.frontends.realtensors import on_real_tensors
from splitkit.frontends.regionbudgets import refuse_region_budgets
from splitkit.frontends.tokens import without_tokens
from splitkit.frontends.tracing import without_globals, without_onednn
from splitkit.graph.dataflow import analyze
from splitkit.graph.fakeruns import rebinds
from splitkit.plans.policy import PolicyLike
from splitkit.training.flow import JointFlow

_HERE = Path(__file__).parent

# Every size and number as in the example, however often the code was captured before; RNNs opened like any module
# (2.11, 2.13, 2.15).
_FIXED: dict[str, Any] = {
    "specialize_int": True,
    "specialize_float": True,
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": False,
    "allow_rnn": True,
}
# What ends the outputs of forward and begins those of backward in a joint graph (2.11, 2.13, 2.15).
_OF_BACKWARD = (
    descriptors.GradAOTOutput,
    descriptors.BackwardTokenAOTOutput,
    descriptors.PhiloxUpdatedBackwardOffsetAOTOutput,
)
_PIECES = (descriptors.SubclassGetAttrAOTOutput, descriptors.SubclassGetAttrAOTInput)


def trace_joint(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.GraphModule:
    """The joint graph of ``module``: Dynamo captures it whole, AOTAutograd traces forward and backward of that.

    Placeholders and outputs carry descriptors (``meta["desc"]``), nodes their values (``meta["val"]``) and module
    paths.
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
    with without_onednn(), tracing(captured.meta["tracing_context"]), ExitStack() as stack:
        described = aot_export_joint_with_descriptors(stack, captured, args, dict(kwargs))
    gm = described.graph_module
    without_tokens(gm)
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    for node in gm.graph.find_nodes(op="placeholder"):
        if (position := input_position(node)) is not None:
            _keep_constant(node, leaves[position])
    return gm


def _keep_constant(node: Node, given: Any) -> None:
    """AOTAutograd writes no value on an input that is a plain number, text or ``None``: the graph is made for it."""
    if "val" not in node.meta and not isinstance(given, torch.Tensor):
        node.meta["val"] = given


@contextmanager
def _no_lost_state(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Refuse a model that binds a buffer or parameter anew: Dynamo only warns. transformers puts its collector back."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        text = str(warning.message)
        if "side effects" in text and re.search(r"\._(buffers|parameters)\b", text):  # 2.11, 2.13, 2.15
            if rebinds(module, args, kwargs):
                raise CaptureError(
                    "SK401",
                    "the model binds a buffer or parameter anew, which a graph cannot do",
                    "Write to it in place: self.mean.copy_(...). splitkit.apply and splitkit.backend take it as it is.",
                )
        elif not re.search(r"""\["G\['__import_transformers_\w+'\]\._active_collector"\]$""", text):  # 2.11, 2.13, 2.15
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def line_of(error: BaseException) -> str:
    """``file:line: source`` of what Dynamo was tracing when it raised ``error``; empty if it does not say."""
    stack = getattr(error, "real_stack", None) or ()  # of TorchDynamoException: 2.11, 2.13, 2.15
    frames = [f for f in stack if not Path(f.filename).is_relative_to(_HERE)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {(frames[-1].line or '').strip()}" if frames else ""


def count_forward_outputs(graph: fx.Graph) -> int:
    """How many outputs of a joint graph forward yields; those of backward follow them."""
    described = graph.output_node().meta["desc"]
    return next((i for i, d in enumerate(described) if isinstance(_plain(d), _OF_BACKWARD)), len(described))


def _plain(descriptor: Any) -> Any:
    """What a tensor is, or what the tensor subclass is that it is a piece of."""
    while isinstance(descriptor, _PIECES):
        descriptor = descriptor.base
    return descriptor


def is_piece(node: Node) -> bool:
    """Whether an input of a joint graph is a piece of a tensor subclass."""
    return bool(_pieces(node.meta["desc"]))


def parameter_name(node: Node) -> str | None:
    """The qualified name of the parameter that an input of a joint graph stands for."""
    descriptor = _plain(node.meta["desc"])
    return descriptor.target if isinstance(descriptor, descriptors.ParamAOTInput) else None


def buffer_name(node: Node) -> str | None:
    """The qualified name of the buffer that an input of a joint graph stands for."""
    descriptor = _plain(node.meta["desc"])
    return descriptor.target if isinstance(descriptor, descriptors.BufferAOTInput) else None


def input_position(node: Node) -> int | None:
    """Which leaf of the inputs an input of a joint graph stands for."""
    descriptor = _plain(node.meta["desc"])
    return descriptor.idx if isinstance(descriptor, descriptors.PlainAOTInput) else None


def position_of_output(graph: fx.Graph, number: int) -> int | None:
    """Where a joint graph gives the output with that number of the function that was traced; ``None`` if nowhere."""
    described = graph.output_node().meta["desc"]
    return next((i for i, d in enumerate(described) if d == descriptors.PlainAOTOutput(number)), None)


def is_tangent(node: Node) -> bool:
    """Whether an input of a joint graph is the gradient of an output."""
    return isinstance(_plain(node.meta.get("desc")), descriptors.TangentAOTInput)


def inputs_of_gradients(graph: fx.Graph) -> Iterator[tuple[int, Node]]:
    """(position of an output, the input that it is the gradient of); a gradient may be ``None``."""
    return _matched(graph, lambda d: d.grad_of if isinstance(d, descriptors.GradAOTOutput) else None)


def inputs_of_updates(graph: fx.Graph) -> Iterator[tuple[int, Node]]:
    """(position of an output, the input that AOTAutograd writes it into after forward)."""
    return _matched(graph, _mutated)


def _mutated(descriptor: Any) -> Any:
    return descriptor.mutated_input if isinstance(descriptor, descriptors.InputMutationAOTOutput) else None


def _matched(graph: fx.Graph, input_of: Callable[[Any], Any]) -> Iterator[tuple[int, Node]]:
    """Outputs with the inputs that their descriptors name; piece by piece, if these are tensor subclasses."""
    inputs = {(_plain(d), _pieces(d)): n for n in graph.find_nodes(op="placeholder") if (d := n.meta.get("desc"))}
    for i, descriptor in enumerate(graph.output_node().meta.get("desc", ())):
        key = (input_of(_plain(descriptor)), _pieces(descriptor))
        if key in inputs:
            yield i, inputs[key]


def _pieces(descriptor: Any) -> tuple[str, ...]:
    """Which piece of a tensor subclass it is, outermost last; empty for a plain tensor."""
    if not isinstance(descriptor, _PIECES):
        return ()
    return (*_pieces(descriptor.base), str(descriptor.attr))


def updated_inputs(graph: fx.Graph) -> list[Node]:
    """The inputs that AOTAutograd writes after forward; all of them, if a descriptor names none that there is.

    The base of inputs that share memory (a synthetic base) is one such input.
    """
    inputs = graph.find_nodes(op="placeholder")
    mutated = [m for d in graph.output_node().meta.get("desc", ()) if (m := _mutated(_plain(d))) is not None]
    known = {_plain(n.meta.get("desc")) for n in inputs}
    found = [n for n in inputs if _plain(n.meta.get("desc")) in mutated]
    return found if all(m in known for m in mutated) else inputs


def outputs_of_tangents(graph: fx.Graph) -> Iterator[tuple[Node, int]]:
    """(tangent, position of the output whose gradient it is)."""
    described = list(enumerate(graph.output_node().meta["desc"]))
    outputs = {(_plain(d), _pieces(d)): i for i, d in reversed(described)}
    for node in filter(is_tangent, graph.find_nodes(op="placeholder")):
        descriptor = node.meta["desc"]
        key = (_plain(descriptor).output, _pieces(descriptor))
        if key in outputs:
            yield node, outputs[key]


PartitionFn = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
"""What AOTAutograd calls with a joint graph and its inputs: ``fn(joint, inputs, *, num_fwd_outputs, **others)``."""


def joint_flow(gm: fx.GraphModule, forward_outputs: int, written: Iterable[Node] = ()) -> JointFlow:
    """The facts about a joint graph that AOTAutograd made.

    Works without descriptors too, which the graphs inside higher-order ops lack.

    Args:
        gm: the joint graph.
        forward_outputs: how many outputs are forward's.
        written: nodes whose memory others write to between forward and backward.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    late = sorted(filter(_kind_of_backward_input, inputs), key=_kind_of_backward_input)
    return JointFlow.of(analyze(gm), late, forward_outputs, [*updated_inputs(gm.graph), *written])


def without_duplicates(gm: fx.GraphModule, forward_outputs: int) -> fx.GraphModule:
    """A copy of a joint graph that AOTAutograd made, without common subexpressions."""
    return deduplicated(joint_flow(gm, forward_outputs))


def _kind_of_backward_input(node: Node) -> int:
    """0 for an input of forward; for one of backward, the group that it is in: they are handed over in this order.

    The names are AOTAutograd's contract with its partitioners (2.11, 2.13, 2.15).
    """
    name = str(node.target)
    if "tangents" in name:
        return 1
    if "bwd_seed" in name or "bwd_base_offset" in name:
        return 2
    return 3 if isinstance(node.meta.get("val"), BackwardState) else 0


def partition_fn(policy: PolicyLike, costs: Callable[[fx.GraphModule], Costs] = default) -> PartitionFn:
    """A policy as AOTAutograd's ``partition_fn``.

    ``functorch.compile.aot_function(f, fw_compiler, partition_fn=splitkit.partition_fn(SaveAll()))``. For
    ``torch.compile`` take `splitkit.backend`.

    Args:
        policy: a policy that places nodes in ``"forward"`` and ``"backward"``.
        costs: makes prices for a joint graph.

    Raises:
        SplitError: when it is called; see `splitkit.engine.pair.divide`.
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
    """The halves that a policy makes of a joint graph of AOTAutograd's, as its compilers expect them.

    ``written`` names the nodes whose memory others write to between forward and backward.
    """
    for node, given in zip(joint.graph.find_nodes(op="placeholder"), pytree.tree_leaves(inputs), strict=False):
        _keep_constant(node, given)
    joint = without_duplicates(joint, forward_outputs)
    refuse_region_budgets(joint)
    flow = joint_flow(joint, forward_outputs, written(joint.graph))
    with on_real_tensors(joint):
        prices = costs(joint)
    pair = divide(flow, policy, prices)
    _describe(pair, joint)
    return pair


def _describe(pair: Pair, joint: fx.GraphModule) -> None:
    """Write the descriptors on the outputs, and the marks on the nodes, that compilers of the halves look at."""
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
