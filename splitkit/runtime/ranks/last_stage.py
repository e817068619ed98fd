"""Decides which values the last stage needs, and how it computes the loss from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from splitkit.errors import PipelineError
from splitkit.graph.losses import loss_of, named_loss, no_loss, outputs_of, tensors_in
from splitkit.runtime.ranks.stage_chain import Chain

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class LastStage:
    """What the last stage does with the outputs.

    Attributes:
        wanted: nodes of the parent whose values the last stage must have.
        loss: computes the loss from ``(output, target)``; ``None`` to keep outputs only.
        own: the node that is the loss, if no other output is wanted.
    """

    wanted: tuple[Node, ...]
    loss: Loss | None
    own: Node | None = None


def last_stage_of(chain: Chain, loss: Loss | None, train: bool, outputs: bool) -> LastStage:
    """Decide what the last stage needs: every output, or only the model's own loss if nobody asks for outputs.

    Args:
        chain: the stages.
        loss: computes a loss from the outputs; ``None`` for the model's own.
        train: whether a loss is wanted.
        outputs: whether a caller asks for the outputs.
    """
    every = tuple(chain.split.module.graph.output_node().all_input_nodes)
    if not train:
        return LastStage(every, None)
    own = None if loss is not None or outputs else _loss_node(chain, every)
    if own is not None and _joined(chain, own):
        return LastStage((own,), own_loss, own)
    return LastStage(every, loss or own_loss)


def _loss_node(chain: Chain, every: tuple[Node, ...]) -> Node | None:
    """Return the output that `own_loss` will find, if that is certain before the model runs."""
    output = outputs_of(chain.split.module.graph, lambda node: node)
    named = named_loss(output, Node)
    found = [node for node in every if _may_be_loss(chain, node)]
    if named is not None:
        return named if named in found else None
    return (
        found[0]
        if len(found) == 1 and output is not None and not any(_is_unsendable(chain, n) for n in every)
        else None
    )


def own_loss(result: Any, target: object) -> torch.Tensor:
    """Return the loss among the model's outputs, by the rule of `splitkit.graph.losses`.

    Raises:
        PipelineError: SK802 if there is none; lists the outputs.
    """
    found = loss_of(result)
    if found is None:
        raise _no_loss(result)
    return found


def loss_without_grad(result: Any) -> torch.Tensor:
    """Return the loss among outputs that were made without gradients: the one called ``loss``, or the only number.

    Raises:
        PipelineError: SK802 if there is none.
    """
    named: torch.Tensor | None = named_loss(result)
    numbers = [t for _, t in tensors_in(result) if t.numel() == 1 and t.is_floating_point()]
    if named is None and len(numbers) != 1:
        raise _no_loss(result)
    return numbers[0] if named is None else named


def require_loss(chain: Chain, last: LastStage) -> None:
    """Refuse a model without a loss of its own if none is given, on all ranks before anything runs.

    Raises:
        PipelineError: SK802 if no output can be a loss.
    """
    if last.loss is own_loss and not any(
        _may_be_loss(chain, node) or _is_unsendable(chain, node) for node in last.wanted
    ):
        output = outputs_of(chain.split.module.graph, lambda node: _likeness(chain, node))
        raise _no_loss(tuple(_likeness(chain, node) for node in last.wanted) if output is None else output)


def _likeness(chain: Chain, node: Node) -> torch.Tensor | None:
    return chain.facts.inputs.get(str(node.target)) if node.op == "placeholder" else chain.value(node).like


def _no_loss(output: Any) -> PipelineError:
    return PipelineError(
        "SK802",
        no_loss(output),
        "Give one: pipeline(split, loss=lambda output, target: ...); on the command line, --loss cross_entropy.",
    )


def _is_unsendable(chain: Chain, node: Node) -> bool:
    """Whether a value may be any object, as it is neither a tensor nor a number."""
    return node.op != "placeholder" and bool(chain.value(node).unsendable)


def _joined(chain: Chain, loss: Node) -> bool:
    """Whether some gradient of the loss crosses each border. Torch's stages wait for one in backward."""
    borders = [chain.border(stage, (loss,)) for stage in range(chain.stages - 1)]
    return all(any(chain.value(node).like.requires_grad for node in border) for border in borders)


def _may_be_loss(chain: Chain, node: Node) -> bool:
    """Whether a value may be the loss that `own_loss` finds. An unknown size may be 1."""
    if node.op == "placeholder":
        return False  # an input is not a result of a stage
    how = chain.value(node)
    one = not how.unsendable and how.scalar is None and all(not isinstance(n, int) or n == 1 for n in how.like.shape)
    return one and how.like.requires_grad
