"""Take the gradient of a tied parameter apart, so that each stage returns the term that it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import Node

from splitkit.plans.parts import PartKey
from splitkit.training.flow import JointFlow
from splitkit.training.stage_parts import StagePart, stage_part

Places = dict[Node, tuple[PartKey, ...]]


@dataclass(frozen=True)
class GradientTerm:
    """A term of a gradient: the sum of these nodes, in this order, computed in one stage.

    Attributes:
        position: which output of backward it belongs to.
        nodes: what is added up.
        stage: where.
    """

    position: int
    nodes: tuple[Node, ...]
    stage: int


def gradient_terms(flow: JointFlow, places: Places) -> list[GradientTerm]:
    """Return the terms of all gradients, and place nowhere the sums over several stages, which the caller adds up.

    Only sums of nothing but parameter gradients are taken apart: ``add(a, b)`` that is an output of backward and that
    nobody else reads. All other gradients have one term.

    Args:
        flow: facts about the joint graph.
        places: node, or member of a tuple -> its parts; sums that are taken apart get the place ``()``.
    """
    found: list[GradientTerm] = []
    returned = [value for value in flow.gradients if isinstance(value, Node)]
    for position, value in enumerate(flow.gradients):
        if not isinstance(value, Node):
            continue
        nodes, sums = terms_and_sums(value, returned)
        stages = {node: _stage_of(places.get(node, ())) for node in nodes}
        if len(set(stages.values())) < 2:
            found.append(GradientTerm(position, (value,), _stage_of(places.get(value, ()))))
            continue
        places |= dict.fromkeys(sums, ())
        found += [
            GradientTerm(position, tuple(n for n in nodes if stages[n] == stage), stage)
            for stage in sorted(set(stages.values()), reverse=True)
        ]
    return found


def terms_and_sums(value: Node, returned: list[Node]) -> tuple[list[Node], list[Node]]:
    """Return the terms of a gradient, in the order in which they are added, and the sums that add them up.

    Args:
        value: the gradient.
        returned: all gradients that backward returns.
    """
    sums: list[Node] = []
    return _apart(value, returned, sums), sums


def _apart(value: Node, returned: list[Node], sums: list[Node]) -> list[Node]:
    """Return the terms of a sum, in its order, and collect the sums."""
    readers = [*(u for u in value.users if u.op != "output"), *(v for v in returned if v is value)]
    if value.target is not torch.ops.aten.add.Tensor or len(readers) > 1 or not _is_plain(value):
        return [value]
    sums.append(value)
    first, second = value.all_input_nodes
    return [*_apart(first, returned, sums), *_apart(second, returned, sums)]


def _is_plain(value: Node) -> bool:
    """Whether it adds two tensors of its own shape and type, without a factor."""
    like = value.meta["val"]
    terms = [n.meta.get("val") for n in value.all_input_nodes]
    same = all(isinstance(t, torch.Tensor) and (t.shape, t.dtype) == (like.shape, like.dtype) for t in terms)
    return len(value.args) == 2 and len(terms) == 2 and not value.kwargs and same


def _stage_of(keys: tuple[PartKey, ...]) -> int:
    """Return the stage of the last part in which a value is computed."""
    parts: list[StagePart] = [part for key in keys if (part := stage_part(key)) is not None]
    return parts[-1].stage if parts else 0


def tied_parameters(terms: list[GradientTerm]) -> Mapping[int, tuple[int, ...]]:
    """Return position of a gradient with terms of several stages -> these stages, the last one first."""
    stages: dict[int, list[int]] = {}
    for term in terms:
        stages.setdefault(term.position, []).append(term.stage)
    return {position: tuple(found) for position, found in stages.items() if len(found) > 1}
