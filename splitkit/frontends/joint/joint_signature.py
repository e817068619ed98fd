"""Describe the inputs and outputs of a joint graph, and check new inputs against the example."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor, fx

from splitkit._torch import pytree
from splitkit.errors import GraphError
from splitkit.frontends import aot
from splitkit.frontends.joint.train_step import TrainingStep
from splitkit.short_repr import brief

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
    graph: fx.Graph, step: TrainingStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
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
