"""Where torch divides the backward of a stage rightly into a part for its inputs and one for its weights.

For the first part torch runs backward on the way from the outputs to the inputs, and notes the gradients that come to
the nodes where the ways to the parameters leave it. From these nodes it runs the second part::

    output ──▶ add ──▶ mm ──▶ input           one node where both meet: mm
                        └───▶ weight

A parameter that no such node leads to, since an output does not depend on an input, is left out in silence; one that
several lead to may be counted twice, or ask for what was freed (torch 2.11 to 2.15).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.nn import Parameter

VIEWS = frozenset(f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias"))
PRODUCTS = frozenset(f"{name}Backward0" for name in ("Mm", "Bmm", "Embedding", "Convolution", "NativeLayerNorm"))
"""What computes the gradients that it gives, by the names of autograd's nodes."""


class DividedStage(PipelineStage):
    """Torch's stage, whose parameters have gradients of their own when backward is divided.

    The second part of backward keeps what autograd gives as the gradient of a parameter. Where an op passes its
    gradient on, that is another's tensor too, and both are added to in each microbatch after the first::

        x @ w + (a + b)       a and b get one tensor
    """

    passed_on: Sequence[Parameter] = ()
    """The parameters whose first gradient may be another's tensor."""

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """See torch; what is another's is copied."""
        new = [p for p in self.passed_on if p.grad is None]
        super().backward_weight_one_chunk(*args, **kwargs)
        for parameter in new:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


def divisible(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], parameters: Sequence[Any]) -> bool:
    """Whether each tensor that gets a gradient is one of these parameters, and one node leads to it.

    Args:
        inputs: of the stage.
        outputs: of a forward.
        parameters: those that torch knows of.
    """
    roots = [t.grad_fn for t in outputs if t.grad_fn is not None]
    above = _above(roots)
    leaves = {node: node.variable for node in above if hasattr(node, "variable")}
    given = {id(t) for t in inputs}
    known = {id(p) for p in parameters}
    ways = _upwards([node for node, leaf in leaves.items() if id(leaf) in given], above, set())
    for node, leaf in leaves.items():
        if id(leaf) in given:
            continue
        own = _upwards([node], above, ways)
        if id(leaf) not in known or len(own & ways) != 1 or any(root in own and root not in ways for root in roots):
            return False
    return True


def passed_on(outputs: Sequence[torch.Tensor]) -> list[Parameter]:
    """The parameters of a forward whose gradient is not surely computed for them alone."""
    above = _above([t.grad_fn for t in outputs if t.grad_fn is not None])
    leaves = [node for node in above if isinstance(getattr(node, "variable", None), Parameter)]
    return [node.variable for node in leaves if not _computed(node, above)]


def _computed(leaf: Any, above: Mapping[Any, Sequence[Any]]) -> bool:
    """Whether one op gives a leaf its gradient, through views at most, and computes it for that."""
    givers = above[leaf]
    while len(givers) == 1 and givers[0].name() in VIEWS:
        givers = above[givers[0]]
    return len(givers) == 1 and givers[0].name() in PRODUCTS


def _above(roots: Iterable[Any]) -> dict[Any, list[Any]]:
    """The nodes of an autograd graph -> those whose backward gives them a gradient."""
    above: dict[Any, list[Any]] = {root: [] for root in roots}
    waiting = list(above)
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is not None:
                if below not in above:
                    above[below] = []
                    waiting.append(below)
                above[below].append(node)
    return above


def _upwards(nodes: Sequence[Any], above: Mapping[Any, Sequence[Any]], ends: set[Any]) -> set[Any]:
    """These nodes and all that lead to them, no further than the first of ``ends``."""
    seen, waiting = set(nodes), list(nodes)
    while waiting:
        for node in above[waiting.pop()]:
            if node not in seen:
                seen.add(node)
                if node not in ends:
                    waiting.append(node)
    return seen
