"""What the inputs and outputs of a joint graph are, and inputs that are like the example's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, fx

from splitkit._torch import pytree
from splitkit.brief import brief
from splitkit.errors import GraphError
from splitkit.frontends import aot
from splitkit.frontends.trainstep import TrainingStep

_FIXED = (bool, int, float, str, Enum)
"""What a graph is made for, besides ``None``."""


@dataclass(frozen=True)
class JointSignature:
    """What the inputs and outputs of a joint graph are. Inputs go by the name of their placeholder.

    Attributes:
        parameters: input -> qualified name of the parameter.
        buffers: input -> qualified name of the buffer.
        inputs: input -> which leaf of ``(args, kwargs)`` it is.
        tangents: input -> position of the output whose gradient it is.
        loss: position of the loss among the outputs.
        updates: position of an output -> the input that it is the new value of.
        gradients: position of an output -> the input that it is the gradient of. What the loss does not depend on has
            none.
        forward_outputs: how many outputs are of forward; those of backward follow.
        structure: of ``(args, kwargs)``, as a tree specification.
        constants: leaf of ``(args, kwargs)`` -> the number, text or ``None`` that the graph was captured for.
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
        """The leaves of inputs in the order of the example's: keywords, and keys of dicts, may come in any order.

        Raises:
            GraphError: SK109 for inputs of another structure, or with another number or text.
        """
        try:
            leaves = list(self.structure.flatten_up_to((args, dict(kwargs))))  # 2.11, 2.13, 2.15
        except ValueError as error:
            raise _other_inputs(f"the inputs are built otherwise than the example was: {error}") from error
        for i, constant in self.constants.items():
            if not _same(leaves[i], constant):
                raise _other_inputs(f"an input is {leaves[i]!r}, and the graph was captured for {constant!r}")
        return leaves


def _same(given: Any, constant: Any) -> bool:
    """Equal in type and value; by its text for a float, which tells -0.0 from 0.0, and nan equals nan."""
    if type(given) is not type(constant):
        return False
    return repr(given) == repr(constant) if isinstance(constant, float) else bool(given == constant)


def like_example(node: fx.Node, given: Any) -> Any:
    """What is given for an input of a joint graph; SK109 if its shape or dtype is not that of the example."""
    value = node.meta["val"]
    if isinstance(value, Tensor) and isinstance(given, Tensor):
        wanted, found = ((tuple(t.shape), t.dtype) for t in (value, given))
        if wanted != found:
            raise _other_inputs(
                f"an input is {found[1]} {list(found[0])}, and {node.name} was {wanted[1]} {list(wanted[0])}"
            )
    return given


def _other_inputs(reason: str) -> GraphError:
    return GraphError("SK109", reason, "Give inputs like those of capture_joint, or capture again.")


def signature_of(
    graph: fx.Graph, step: TrainingStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> JointSignature:
    """Read it off a joint graph of these inputs."""
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
