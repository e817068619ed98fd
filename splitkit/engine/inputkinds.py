"""Inputs that are no tensors, where the parts of a split rely on it that they are: looked for at each call."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx
from torch.fx import Node

from splitkit.engine.cut import Subgraph
from splitkit.graph.assumed import Assumed, assumed_tensors
from splitkit.graph.dataflow import Dataflow
from splitkit.inputkinds import refuse_objects
from splitkit.plans.record import Plan


@dataclass(frozen=True)
class InputKinds:
    """What a check of a split's inputs has to know.

    Attributes:
        wanted: name of an input -> what is taken for a tensor in it.
    """

    wanted: dict[str, tuple[Assumed, ...]]

    def write(self, module: fx.GraphModule) -> None:
        """Put the check behind the inputs of ``module``."""
        graph = module.graph
        inputs = [n for n in graph.find_nodes(op="placeholder") if str(n.target) in self.wanted]
        table = [
            (str(n.target), [(_keys(a), a.by[0].name, a.no_array) for a in self.wanted[str(n.target)]]) for n in inputs
        ]
        with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
            graph.call_function(refuse_objects, (inputs, json.dumps(table)))
        module.recompile()


def _keys(assumed: Assumed) -> list[tuple[bool, int | str]]:
    """The path of a value as far as JSON can say it: what it is read from is then looked at whole."""
    keys: list[tuple[bool, int | str]] = []
    for is_attribute, key in assumed.path:
        if isinstance(key, bool) or not isinstance(key, int | str):
            break
        keys.append((is_attribute, key))
    return keys


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
    return InputKinds({str(n.target): found for n, found in assumed.items()})


def _runs_as_the_graph(flow: Dataflow, units: Sequence[Subgraph | Node]) -> bool:
    computed = (n for unit in units for n in (unit.nodes if isinstance(unit, Subgraph) else (unit,)))
    places = [flow.index[n] for n in computed if flow.is_placeable(n)]
    return all(a < b for a, b in pairwise(places))


def _runs_once(plan: Plan, assumed: Iterable[tuple[Assumed, ...]]) -> bool:
    """Whether each node that relies on a tensor is in one part: a copy, or none, of an object's method tells."""
    return all(len(plan.places[node]) == 1 for all_ in assumed for a in all_ for node in a.by)
