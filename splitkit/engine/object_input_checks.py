"""Check at each call of a split that its inputs are tensors, where the order of its parts relies on that."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx
from torch.fx import Node

from splitkit.engine.subgraphs import Subgraph
from splitkit.graph.assumed_tensors import Assumed, assumed_tensors
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.object_inputs import refuse_objects
from splitkit.plans.record import Plan


@dataclass(frozen=True)
class ObjectInputCheck:
    """A check that certain inputs of a split are tensors.

    Attributes:
        wanted: name of an input -> the values in it that the analysis assumed to be tensors.
    """

    wanted: dict[str, tuple[Assumed, ...]]

    def write(self, module: fx.GraphModule) -> None:
        """Insert the check after the inputs of ``module``."""
        graph = module.graph
        inputs = [n for n in graph.find_nodes(op="placeholder") if str(n.target) in self.wanted]
        table = [
            (str(n.target), [(_keys(a), a.by[0].name, a.no_array) for a in self.wanted[str(n.target)]]) for n in inputs
        ]
        with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
            graph.call_function(refuse_objects, (inputs, json.dumps(table)))
        module.recompile()


def _keys(assumed: Assumed) -> list[tuple[bool, int | str]]:
    """Return the path of a value up to the first key that JSON cannot hold; the check searches from there."""
    keys: list[tuple[bool, int | str]] = []
    for is_attribute, key in assumed.path:
        if isinstance(key, bool) or not isinstance(key, int | str):
            break
        keys.append((is_attribute, key))
    return keys


def object_input_check(flow: Dataflow, plan: Plan, steps: Sequence[Subgraph | Node]) -> ObjectInputCheck | None:
    """Return the check that a split needs; ``None`` if it is right whatever the inputs are.

    Args:
        flow: facts about the graph.
        plan: the complete plan.
        steps: the parts and the parent's own nodes, in the order in which the parent runs them.
    """
    assumed = assumed_tensors(flow)
    if not assumed or (_runs_as_the_graph(flow, steps) and _runs_once(plan, assumed.values())):
        return None
    return ObjectInputCheck({str(n.target): found for n, found in assumed.items()})


def _runs_as_the_graph(flow: Dataflow, steps: Sequence[Subgraph | Node]) -> bool:
    """Whether the nodes run in the order of the graph, each at most once."""
    computed = (n for step in steps for n in (step.nodes if isinstance(step, Subgraph) else (step,)))
    places = [flow.index[n] for n in computed if flow.is_placeable(n)]
    return all(a < b for a, b in pairwise(places))


def _runs_once(plan: Plan, assumed: Iterable[tuple[Assumed, ...]]) -> bool:
    """Whether each node that assumes a tensor runs exactly once. If it is an object, its method may have effects."""
    return all(len(plan.places[node]) == 1 for all_ in assumed for a in all_ for node in a.by)
