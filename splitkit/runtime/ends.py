"""What the last stage must have, and what it makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from splitkit.errors import PipelineError
from splitkit.losses import loss_of, named_loss, no_loss, outputs_of
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
    own = None if loss is not None or outputs else _loss_node(chain, every)
    if own is not None and _joined(chain, own):
        return Ends((own,), own_loss, own)
    return Ends(every, loss or own_loss)


def _loss_node(chain: Chain, every: tuple[Node, ...]) -> Node | None:
    """The output that `own_loss` finds, as far as that can be told before the model runs."""
    output = outputs_of(chain.split.module.graph, lambda node: node)
    named = named_loss(output, Node)
    found = [node for node in every if _may_be_loss(chain, node)]
    if named is not None:
        return named if named in found else None
    return found[0] if len(found) == 1 and output is not None and not any(_is_odd(chain, n) for n in every) else None


def own_loss(result: Any, target: object) -> torch.Tensor:
    """The loss that the model returns, by the rule of `splitkit.losses`.

    Raises:
        PipelineError: SK802 where there is none; the outputs are listed.
    """
    found = loss_of(result)
    if found is None:
        raise _no_loss(result)
    return found


def require_loss(chain: Chain, ends: Ends) -> None:
    """Refuse a model that has no loss of its own where none is given, on all ranks before anything runs.

    Raises:
        PipelineError: SK802.
    """
    if ends.loss is own_loss and not any(_may_be_loss(chain, node) or _is_odd(chain, node) for node in ends.wanted):
        output = outputs_of(chain.split.module.graph, lambda node: _likeness(chain, node))
        raise _no_loss(tuple(_likeness(chain, node) for node in ends.wanted) if output is None else output)


def _likeness(chain: Chain, node: Node) -> torch.Tensor | None:
    return chain.facts.inputs.get(str(node.target)) if node.op == "placeholder" else chain.value(node).like


def _no_loss(output: Any) -> PipelineError:
    return PipelineError(
        "SK802",
        no_loss(output),
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
