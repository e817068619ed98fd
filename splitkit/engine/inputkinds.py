"""Inputs that are no tensors, where the parts of a split rely on it that they are: looked for at each call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.engine.cut import Subgraph
from splitkit.engine.overlaps import given_to
from splitkit.errors import PlanError
from splitkit.graph.assumed import Assumed, Path, assumed_tensors
from splitkit.graph.dataflow import Dataflow
from splitkit.plans.record import Plan

_PLAIN = (
    *(torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, complex, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, np.generic, slice, range),
)


class InputKinds:
    """A hook of the parent: refuses a call that gives an object where the parts stand on a tensor.

    Attributes:
        wanted: for each input that matters its position, its name, and what is taken for a tensor in it.
    """

    def __init__(self, wanted: Sequence[tuple[int, str, tuple[Assumed, ...]]]) -> None:
        # by names: a hook is copied and pickled with its module, and graphs are not
        self.wanted = [(i, name, [(a.path, a.by[0].name, a.no_array) for a in all_]) for i, name, all_ in wanted]

    def watch(self, module: fx.GraphModule) -> None:
        """Be called before each run of ``module``, and of its copies."""
        module.register_forward_pre_hook(self, with_kwargs=True)
        _torch.on_deepcopy(module, self.watch)

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise SK219 if an input is no tensor."""
        given = given_to(module.graph, args, kwargs)
        for position, name, assumed in self.wanted:
            for path, by, no_array in assumed:
                value = _read(given[position], path) if position < len(given) else None
                for leaf in pytree.tree_leaves(value):
                    if not isinstance(leaf, _PLAIN) and (no_array or not isinstance(leaf, np.ndarray)):
                        raise _refused(name, path, leaf, by)


def _read(value: Any, path: Path) -> Any:
    for is_attribute, key in path:
        value = getattr(value, str(key)) if is_attribute else value[key]
    return value


def _refused(name: str, path: Path, leaf: object, by: str) -> PlanError:
    where = name + "".join(f".{key}" if is_attribute else f"[{key!r}]" for is_attribute, key in path)
    return PlanError(
        "SK219",
        f"{where} is a {type(leaf).__name__} in this call, and {by}, which may then do anything, "
        "was taken for what it does to a tensor",
        f"Annotate the input in forward ({name}: {type(leaf).__name__}), so that the graph knows it, and split again.",
        [by],
    )


def input_kinds(flow: Dataflow, plan: Plan, units: Sequence[Subgraph | Node]) -> InputKinds | None:
    """The check that a split needs; ``None`` where it does not matter what the inputs are.

    Args:
        flow: facts about the graph.
        plan: the complete plan.
        units: the parts, and the host's own nodes, in the order of the parent.
    """
    assumed = assumed_tensors(flow)
    if not assumed or (_runs_as_the_graph(flow, units) and _runs_once(plan, assumed.values())):
        return None
    inputs = [n for n in flow.scope if n.op == "placeholder"]
    return InputKinds([(i, str(n.target), assumed[n]) for i, n in enumerate(inputs) if n in assumed])


def _runs_as_the_graph(flow: Dataflow, units: Sequence[Subgraph | Node]) -> bool:
    computed = (n for unit in units for n in (unit.nodes if isinstance(unit, Subgraph) else (unit,)))
    places = [flow.index[n] for n in computed if flow.is_placeable(n)]
    return all(a < b for a, b in pairwise(places))


def _runs_once(plan: Plan, assumed: Iterable[tuple[Assumed, ...]]) -> bool:
    """Whether each node that relies on a tensor is in one part: a copy, or none, of an object's method tells."""
    return all(len(plan.places[node]) == 1 for all_ in assumed for a in all_ for node in a.by)
