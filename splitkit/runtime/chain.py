"""A split as a chain of stages that talk to their neighbours only.

A value that is live over a border goes over it, whoever reads it behind::

    stage 0 ──x, mask──▶ stage 1 ──y, mask──▶ stage 2        stage 1 passes the mask on

Inputs of the graph go nowhere: each stage takes those that it reads from the batch itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import fx
from torch.fx import Node

from splitkit import _torch
from splitkit.brief import brief
from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.graph.checks import check_nodes
from splitkit.graph.dataflow import Dataflow
from splitkit.graph.effects import memory_of
from splitkit.graph.gradients import Gradients
from splitkit.graph.storages import attribute
from splitkit.graph.symbols import value_of
from splitkit.plans.file import fingerprint
from splitkit.plans.parts import HOST, PartKey
from splitkit.plans.record import Plan
from splitkit.runtime.parent import calls_of, values_of
from splitkit.runtime.values import Carried, carried
from splitkit.runtime.written import steps_of, written_memory


class Staged(Protocol):
    """What stages are taken from: a `Split`, or a folder of stages; the names are those of `Split`."""

    @property
    def module(self) -> fx.GraphModule:
        """The parent."""

    @property
    def plan(self) -> Plan:
        """What is known of the parts."""

    @property
    def parts(self) -> Mapping[PartKey, fx.GraphModule]:
        """Part -> its module; of a folder those that were loaded."""

    @property
    def names(self) -> Mapping[PartKey, str]:
        """Part -> what its module is called in the parent, in the order of execution."""

    @property
    def qualified_names(self) -> Mapping[str, str]:
        """Name of every parameter and buffer in ``module`` -> its name in the original."""

    @property
    def shared(self) -> tuple[tuple[str, ...], ...]:
        """Groups of names in ``module`` that are one Parameter in several parts."""


@dataclass(frozen=True)
class ChainFacts:
    """What must be known of the graph that was split, besides its parts.

    Attributes:
        values: node of the parent, by name -> how its value goes over a border.
        inputs: input of the graph -> a tensor on ``meta`` of the shape and dtype of one microbatch; ``None`` for what
            is no tensor.
        draws: whether each stage draws random numbers.
        writes: buffers that forward writes, by their names in the original.
        identity: what must be the same on all ranks, by what it is.
    """

    values: Mapping[str, Carried]
    inputs: Mapping[str, torch.Tensor | None]
    draws: tuple[bool, ...]
    writes: tuple[str, ...]
    identity: Mapping[str, str]


@dataclass(frozen=True)
class Chain:
    """Which nodes of the parent each stage runs, and what goes over each border.

    Attributes:
        split: what is run.
        stage_of: call nodes of the parent's graph -> the stage that runs them.
        facts: about the graph that was split.
    """

    split: Staged
    stage_of: Mapping[Node, int]
    facts: ChainFacts

    __repr__ = brief

    @property
    def stages(self) -> int:
        """How many there are: one a part."""
        return len(self.split.names)

    @cached_property
    def keys(self) -> tuple[PartKey, ...]:
        """Stage -> its part."""
        return tuple(self.split.names)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Stage -> on how many ranks it runs."""
        return tuple(self.split.plan.parts[key].replicas for key in self.keys)

    def nodes(self, stage: int) -> tuple[Node, ...]:
        """What a stage runs, in order."""
        return tuple(n for n, s in self.stage_of.items() if s == stage)

    def inputs(self, stage: int) -> tuple[Node, ...]:
        """The inputs of the graph that a stage reads."""
        nodes = set(self.nodes(stage))
        return tuple(p for p in self.split.module.graph.find_nodes(op="placeholder") if not nodes.isdisjoint(p.users))

    def own(self, stage: int) -> dict[str, Any]:
        """What the parent holds and a stage reads: parameters that were hoisted, buffers that the stage writes."""
        module = self.split.module
        read = [str(n.target) for n in self.nodes(stage) if n.op == "get_attr"]
        return {name: attribute(module, name) for name in read if name not in self.split.names.values()}

    def border(self, stage: int, wanted: Iterable[Node]) -> tuple[Node, ...]:
        """The values that go from a stage to the next one, in the order of the graph.

        Args:
            stage: the stage before the border.
            wanted: what the last stage hands out.
        """
        out = set(wanted)
        return tuple(
            node
            for node, home in self.stage_of.items()
            if home <= stage and (node in out or any(self.stage_of.get(user, 0) > stage for user in node.users))
        )

    def passed_on(self, stage: int, wanted: Iterable[Node]) -> tuple[Node, ...]:
        """The values that come over a stage's border and go over the next one, and that it does not read.

        Args:
            stage: neither the first nor the last.
            wanted: what the last stage hands out.
        """
        out = tuple(wanted)
        read = {node for own in self.nodes(stage) for node in own.all_input_nodes}
        come = set(self.border(stage - 1, out)) - read
        return tuple(node for node in self.border(stage, out) if node in come)

    def value(self, node: Node) -> Carried:
        """What is known of a value of the parent."""
        return self.facts.values[node.name]


def chain_of(split: Split) -> Chain:
    """The chain of a split's parts.

    Raises:
        PipelineError: SK801 where parts share memory that one of them writes, or the parent holds what several read.
    """
    stage_of = stages_of(split)
    return Chain(split, stage_of, _facts(split, stage_of))


def stages_of(split: Staged) -> Mapping[Node, int]:
    """Call nodes of the parent, and attributes that it reads -> the stage that runs them.

    Raises:
        PipelineError: SK801 where the parent holds what several stages read.
    """
    graph = split.module.graph
    stages = {key: stage for stage, key in enumerate(split.names)}
    calls = calls_of(graph, split.names)
    bodies = {split.names[key]: stage for key, stage in stages.items()}
    stage_of: dict[Node, int] = {}
    checks = check_nodes(graph)  # of a call of the parent; stages are called one by one
    for node in graph.nodes:
        if node in checks:
            continue
        if node in calls:
            stage_of[node] = stages[calls[node]]
        elif node.op.startswith("call_"):
            stage_of[node] = max((stage_of[n] for n in node.all_input_nodes if n in stage_of), default=0)
    for node in graph.find_nodes(op="get_attr"):
        if node in checks:
            continue
        readers = {stage_of[user] for user in node.users if user in stage_of}
        if str(node.target) in bodies:  # of a part that is checkpointed
            stage_of[node] = bodies[str(node.target)]
        elif len(readers) != 1 or any(user.op == "output" for user in node.users):
            raise PipelineError(
                "SK801",
                f"{node.target} is in the parent, for {len(readers)} stages"
                + (" and the output" if len(readers) < 2 else " read it"),
                'Split with parameters="own", and put all that reads a buffer that is written into one stage.',
                [node],
            )
        else:
            stage_of[node] = readers.pop()
    order = {node: i for i, node in enumerate(graph.nodes)}
    return dict(sorted(stage_of.items(), key=lambda item: order[item[0]]))


def _facts(split: Split, stage_of: Mapping[Node, int]) -> ChainFacts:
    flow = split.flow
    written = _require_own_memory(split, stage_of)
    needed = flow.fact(Gradients).carriers
    originals = {copied: node for node, copied in split.copies[HOST].items()} | dict(
        values_of(split.module.graph, split)
    )
    values = {n.name: carried(originals[n], needed, written) for n in stage_of if n in originals}
    given = zip(split.module.graph.find_nodes(op="placeholder"), flow.graph.find_nodes(op="placeholder"), strict=True)
    identity = {
        "graph": fingerprint(flow.graph),
        "plan": _digest(json.dumps(split.plan.to_dict(), sort_keys=True)),
        "code of the parts": _digest("".join(part.code for part in split.parts.values())),
    }
    return ChainFacts(
        values,
        {str(node.target): _like(value_of(original)) for node, original in given},
        tuple(_draws(flow, sub.nodes) for sub in split.subgraphs.values()),
        tuple(sorted(str(node.target) for node in flow.written if node.op == "get_attr")),
        identity,
    )


def _like(value: object) -> torch.Tensor | None:
    if not isinstance(value, torch.Tensor):
        return None
    return torch.empty([_torch.size_hint(n) for n in value.shape], dtype=value.dtype, device="meta")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _require_own_memory(split: Split, stage_of: Mapping[Node, int]) -> frozenset[Node]:
    """Memory that is written lies in one stage, as on one device (`splitkit.runtime.written`).

    Inputs and buffers do not cross: each stage has its own, so that all that touches one that is written is in one.

    Returns:
        The nodes whose memory is written.
    """
    flow, homes = split.flow, _homes(split, stage_of)
    try:
        stages = {node: [torch.device("cpu", stage)] for node, stage in homes.items()}
        found = written_memory(flow, stages, steps_of(split))
    except PipelineError as error:
        reason = f"stages would share memory that is written: {error.reason}"
        raise PipelineError("SK801", reason, "Put the nodes that share it into one stage.", error.nodes) from error
    memory = memory_of(flow.effects, flow.root)
    given = {memory.members[node] for node in found.homes if node in memory.members}
    first: dict[object, Node] = {}
    for node, effect in flow.effects.items():
        if node in homes and node.op not in ("placeholder", "get_attr"):
            for item in memory.use(node, effect)[1]:
                if item in given and homes[first.setdefault(item, node)] != homes[node]:
                    raise _shared(first[item], node)
    return found.values


def _homes(split: Split, stage_of: Mapping[Node, int]) -> dict[Node, int]:
    stages = {key: i for i, key in enumerate(split.parts)}
    homes = {node: stages[key] for key, sub in split.subgraphs.items() for node in sub.nodes}
    for node, copied in split.copies[HOST].items():
        if copied in stage_of:
            homes.setdefault(node, stage_of[copied])
    return homes


def _shared(a: Node, b: Node) -> PipelineError:
    return PipelineError(
        "SK801",
        f"{a.name} and {b.name} share memory that is written, and lie in different stages",
        "Put all that reads or writes it into one stage: splitkit.plan(gm, {..., "
        f"{a.name!r}: 0, {b.name!r}: 0}}), or Stages with other borders.",
        [a, b],
    )


def _draws(flow: Dataflow, nodes: Iterable[Node]) -> bool:
    """Whether one of these nodes draws random numbers."""
    return any((effect := flow.effects.get(n)) is not None and effect.random for n in nodes)
