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
