"""What the last stage must have, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from splitkit._torch import pytree
from splitkit.errors import PipelineError
from splitkit.runtime.chain import Chain

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Ends:
    """What the last stage makes of the outputs.

    Attributes:
        wanted: nodes of the parent that the last stage must have.
        loss: gives the loss of ``(output, target)``; ``None`` to keep outputs only.
        own: the node that is the loss, where nothing else is wanted.
    """

    wanted: tuple[Node, ...]
    loss: Loss | None
    own: Node | None = None


def ends_of(chain: Chain, loss: Loss | None, train: bool, outputs: bool) -> Ends:
    """What the last stage has: every output; in training, with the model's own loss, nothing else if nobody asks.

    Args:
        chain: the stages.
        loss: of outputs; ``None`` for the model's own.
        train: whether a loss is wanted.
        outputs: whether somebody asks for the outputs.
    """
    every = tuple(chain.split.module.graph.output_node().all_input_nodes)
    if not train:
        return Ends(every, None)
    own = [node for node in every if loss is None and not outputs and _may_be_loss(chain, node)]
    if len(own) == 1 and _joined(chain, own[0]):
        return Ends((own[0],), own_loss, own[0])
    return Ends(every, loss or own_loss)


def own_loss(result: Any, target: object) -> torch.Tensor:
    """The loss that the model returns: the one number among the outputs that requires grad.

    Raises:
        PipelineError: SK802 where there is none, or several.
    """
    leaves = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
    found = [t for t in leaves if t.requires_grad and t.numel() == 1]
    if len(found) != 1:
        raise _no_loss(len(found))
    return found[0]


def require_loss(chain: Chain, ends: Ends) -> None:
    """Refuse a model that has no loss of its own where none is given, on all ranks before anything runs.

    Raises:
        PipelineError: SK802.
    """
    if ends.loss is own_loss and not any(_may_be_loss(chain, node) or _is_odd(chain, node) for node in ends.wanted):
        raise _no_loss(0)


def _no_loss(count: int) -> PipelineError:
    return PipelineError(
        "SK802",
        f"the model returns {count} numbers that require grad, and a loss is one",
        "Give one: pipeline(split, loss=lambda output, target: ...). `splitkit train` needs a model that returns it.",
    )


def _is_odd(chain: Chain, node: Node) -> bool:
    """Whether it may hold anything."""
    return node.op != "placeholder" and bool(chain.value(node).odd)


def _joined(chain: Chain, loss: Node) -> bool:
    """Whether a gradient of the loss goes over each border: torch's stages wait for one."""
    borders = [chain.border(stage, (loss,)) for stage in range(chain.stages - 1)]
    return all(any(chain.value(node).like.requires_grad for node in border) for border in borders)


def _may_be_loss(chain: Chain, node: Node) -> bool:
    """Whether it may be what `own_loss` finds: a size that is not known may be 1."""
    if node.op == "placeholder":
        return False  # it goes nowhere
    how = chain.value(node)
    one = not how.odd and how.scalar is None and all(not isinstance(n, int) or n == 1 for n in how.like.shape)
    return one and how.like.requires_grad
