"""Stages whose backward torch cannot divide, as zero-bubble schedules do; it runs whole there.

Torch divides it by the steps of backward that a gradient on its way to the stage's inputs passes, and that also hand
one to a parameter::

    output ──▶ linear ──▶ relu ──▶ linear ──▶ input        first: this line, keeping what comes to each linear
                 ╰──▶ W1             ╰──▶ W2               later: from each linear to its parameter

A parameter that several of them hand a gradient to (a table of positions that each layer reads, a layer used twice)
is reached over steps that lie between, which torch runs and frees once more (2.13, 2.15: "backward through the graph a
second time").
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.autograd.graph import Node
from torch.distributed.pipelining import PipelineStage


def run_whole_if_needed(stage: PipelineStage, outputs: Iterable[object], inputs: Iterable[torch.Tensor]) -> None:
    """Have a stage run its backward at once, where it cannot be divided.

    Args:
        stage: of torch.
        outputs: what it gave for a microbatch.
        inputs: what it received for it.
    """
    if any(len(steps) > 1 for steps in _handed_by(outputs, inputs).values()):
        stage.dw_builder = _nothing_left


def _nothing_left() -> Callable[[], None]:
    """What torch runs as the second half: the first was all of it."""
    return lambda: None


def _handed_by(outputs: Iterable[object], inputs: Iterable[torch.Tensor]) -> dict[Node, set[Node]]:
    """Parameter (its step) -> the steps on the way to the inputs that a gradient leaves on a way to it."""
    order = list(_steps([t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]))
    leaves = {id(t) for t in inputs}
    to_inputs: set[Node] = set()
    reached: dict[Node, frozenset[Node]] = {}
    found: dict[Node, set[Node]] = {}
    for step in order:  # those behind it in backward come first
        following = [n for n, _ in step.next_functions if n is not None]
        variable = getattr(step, "variable", None)
        if variable is not None and not following:
            if id(variable) in leaves:
                to_inputs.add(step)
            reached[step] = frozenset([step])
            continue
        if not to_inputs.isdisjoint(following):
            to_inputs.add(step)
            for other in following:
                if other not in to_inputs:
                    for parameter in reached[other]:
                        found.setdefault(parameter, set()).add(step)
        reached[step] = frozenset().union(*(reached[n] for n in following if n not in to_inputs))
    return found


def _steps(roots: Iterable[Node]) -> Iterator[Node]:
    """All steps of backward, each behind those that it leads to."""
    waiting, seen = deque((root, False) for root in roots), set[Node]()
    while waiting:
        step, done = waiting.pop()
        if done:
            yield step
        elif step not in seen:
            seen.add(step)
            waiting.append((step, True))
            waiting.extend((n, False) for n, _ in step.next_functions if n is not None and n not in seen)
