"""Finds backwards that torch's pipelining divides wrongly, and refuses what old versions of it cannot run.

Torch divides the backward of a stage in ``torch/distributed/pipelining/_backward.py``. ``stage_backward_input`` runs
backward along the paths from the outputs to the inputs, and records the gradients that arrive at the nodes where the
paths to parameters branch off. ``stage_backward_weight`` runs the rest from these nodes::

    output ──▶ add ──▶ mm ──▶ input           both paths meet at one node: mm
                        └───▶ weight

A parameter to which no such node leads, because an output does not depend on an input, silently gets no gradient. A
parameter to which several lead may be counted twice, or need what was freed (torch 2.11 to 2.15).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.nn import Parameter

from splitkit.errors import PipelineError
from splitkit.pipeline.order import PipelineOrder

VIEWS = frozenset(f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias"))
PRODUCTS = frozenset(f"{name}Backward0" for name in ("Mm", "Bmm", "Embedding", "Convolution", "NativeLayerNorm"))
"""Autograd nodes that compute a new tensor for each gradient, rather than pass one on."""


class DividedStage(PipelineStage):
    """Torch's stage, with gradients that do not alias when backward is divided.

    ``stage_backward_weight`` stores the tensor that autograd returns as the gradient of a parameter. If an op passes
    its gradient on unchanged, two parameters get the same tensor, and each later microbatch adds to both at once (torch
    2.11 to 2.15)::

        x @ w + (a + b)       a and b get the same tensor
    """

    passed_on: Sequence[Parameter] = ()
    """The parameters whose first gradient may be the tensor of another gradient."""

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        """Run torch's weight part, then copy gradients that may alias others."""
        new = [p for p in self.passed_on if p.grad is None]
        super().backward_weight_one_chunk(*args, **kwargs)
        for parameter in new:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


def divisible(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], parameters: Sequence[Any]) -> bool:
    """Whether torch divides the backward of a stage correctly.

    It does if every leaf that gets a gradient is an input or a known parameter, and exactly one node leads to each
    parameter from the paths between outputs and inputs.

    Args:
        inputs: the inputs of the stage.
        outputs: the outputs of a forward.
        parameters: the parameters of the module that torch runs.
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
    """Return the parameters whose gradient may alias another tensor."""
    above = _above([t.grad_fn for t in outputs if t.grad_fn is not None])
    leaves = [node for node in above if isinstance(getattr(node, "variable", None), Parameter)]
    return [node.variable for node in leaves if not _computed(node, above)]


def _computed(leaf: Any, above: Mapping[Any, Sequence[Any]]) -> bool:
    """Whether one op computes a new tensor as the gradient of a leaf, which reaches it through views at most."""
    givers = above[leaf]
    while len(givers) == 1 and givers[0].name() in VIEWS:
        givers = above[givers[0]]
    return len(givers) == 1 and givers[0].name() in PRODUCTS


def _above(roots: Iterable[Any]) -> dict[Any, list[Any]]:
    """Map each node of an autograd graph to the nodes whose backward gives it a gradient."""
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
    """Return these nodes and all above them, without going above nodes in ``ends``."""
    seen, waiting = set(nodes), list(nodes)
    while waiting:
        for node in above[waiting.pop()]:
            if node not in seen:
                seen.add(node)
                if node not in ends:
                    waiting.append(node)
    return seen


_SINCE = (2, 13)
"""The first version of torch without the limits that `require_support` refuses."""


def require_support(order: PipelineOrder, stages: Sequence[Any]) -> None:
    """Refuse what the installed torch cannot run in these stages (`splitkit.runtime.ranks.stage.ChainStage`).

    Before 2.13 every value that crosses a border must be a float with a gradient, consecutive stages cannot share a
    rank, and zero-bubble schedules cannot detach the outputs of a stage.

    Raises:
        PipelineError: SK806, naming the value or the schedule.
    """
    if _is_recent():
        return
    zero_bubble = any(action.kind == "I" for row in order.ranks for action in row)
    if zero_bubble or any(a == b for a, b in zip(order.rank_of, order.rank_of[1:], strict=False)):
        raise _needs(f"{order.name} on {len(order.ranks)} ranks", "Use 1f1b or interleaved-1f1b on 2 ranks or more, or")
    require_plain_values(stages)


def require_plain_values(stages: Sequence[Any]) -> None:
    """Refuse values that the installed torch cannot send: see `require_support`."""
    for stage in () if _is_recent() else stages:
        if stage.rng.receives or stage.rng.sends:
            raise _needs("dropout in several stages", "Capture in eval mode, or")
        for value in (*stage.received_values, *stage.sent_values):
            if not value.like.requires_grad and stage.trains:
                raise _needs(f"{value.name}, which goes over a border without a gradient,", "Split elsewhere, or")


def _is_recent() -> bool:
    return tuple(map(int, torch.__version__.split(".")[:2])) >= _SINCE


def _needs(what: str, else_: str) -> PipelineError:
    return PipelineError(
        "SK806", f"{what} needs torch 2.13; this is {torch.__version__}", f"{else_} install torch 2.13."
    )
