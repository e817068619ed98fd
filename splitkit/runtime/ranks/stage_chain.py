"""Views a split as a chain of stages, each of which exchanges values with its neighbours only.

A value crosses every border between the stage that computes it and the last stage that reads it::

    stage 0 ──x, mask──▶ stage 1 ──y, mask──▶ stage 2        stage 1 forwards the mask

Inputs of the graph are not sent: each stage takes those that it reads from the batch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.graph.caches import given_caches
from splitkit.graph.input_overlap import check_nodes
from splitkit.graph.losses import loss_of, named_loss, no_loss, outputs_of, tensors_in
from splitkit.graph.node_values import Gradients
from splitkit.graph.shared_memory import memory_classes
from splitkit.graph.size_expressions import Expression
from splitkit.graph.storages import attribute, value_of
from splitkit.plans.parts import PARENT, PartKey
from splitkit.plans.plan_file import fingerprint
from splitkit.plans.record import Plan
from splitkit.runtime.devices.device_map import captured_types, with_numbered_devices
from splitkit.runtime.devices.writes_across_devices import written_memory
from splitkit.runtime.generation.prompt_pieces import costly_positions
from splitkit.runtime.parent import calls_of, steps_of, values_of
from splitkit.runtime.ranks.border_values import BorderValue, GraphSizes, border_value, graph_sizes, meta_like
from splitkit.short_repr import brief

_CONSTANTS = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class StageParts:
    """The stages of a training step, or of a folder. It has these attributes of a `Split`.

    Attributes:
        module: the parent module, which calls the parts.
        plan: the plan, with a record of each part.
        parts: part -> its module; in a folder only the loaded parts.
        names: part -> the name of its module in the parent, in the order of execution.
        qualified_names: name of every parameter and buffer in ``module`` -> its name in the original.
        shared: groups of names in ``module``, each group naming one Parameter that several parts have.
    """

    module: fx.GraphModule
    plan: Plan
    parts: Mapping[PartKey, nn.Module]
    names: Mapping[PartKey, str]
    qualified_names: Mapping[str, str]
    shared: tuple[tuple[str, ...], ...]


StageSource = Split | StageParts


@dataclass(frozen=True)
class ChainFacts:
    """Facts about the graph that was split, besides its parts.

    Attributes:
        values: name of a node of the parent -> how its value crosses a border.
        inputs: input of the graph -> a tensor on ``meta`` of the shape and dtype of one microbatch; ``None`` for an
            input that is not a tensor.
        draws: stage -> whether it draws random numbers.
        writes: buffers that forward writes, by their names in the original.
        identity: name of a fact -> digest that must be the same on all ranks.
        sizes: the sizes that may vary.
        captured: the device types on which the graph was captured.
        costly: of a decoder, the positions after which attention costs as much as all else; ``None`` if not known.
        constants: input that is not a tensor -> its value at capture, which the graph computes with.
    """

    values: Mapping[str, BorderValue]
    inputs: Mapping[str, torch.Tensor | None]
    draws: tuple[bool, ...]
    writes: tuple[str, ...]
    identity: Mapping[str, str]
    sizes: GraphSizes = field(default_factory=GraphSizes)
    captured: frozenset[str] = frozenset({"cpu"})
    costly: int | None = None
    constants: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """Which nodes of the parent each stage runs, and which values cross each border.

    Attributes:
        split: the source of the stages.
        stage_of: call node of the parent's graph -> the stage that runs it.
        facts: facts about the graph that was split.
    """

    split: StageSource
    stage_of: Mapping[Node, int]
    facts: ChainFacts

    __repr__ = brief

    @property
    def stages(self) -> int:
        """The number of stages: one per part."""
        return len(self.split.names)

    @cached_property
    def keys(self) -> tuple[PartKey, ...]:
        """Stage -> its part."""
        return tuple(self.split.names)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Stage -> the number of ranks that run it."""
        return tuple(self.split.plan.parts[key].replicas for key in self.keys)

    def nodes(self, stage: int) -> tuple[Node, ...]:
        """Return the nodes that a stage runs, in order."""
        return tuple(n for n, s in self.stage_of.items() if s == stage)

    def inputs(self, stage: int) -> tuple[Node, ...]:
        """Return the inputs of the graph that a stage reads."""
        nodes = set(self.nodes(stage))
        return tuple(p for p in self.split.module.graph.find_nodes(op="placeholder") if not nodes.isdisjoint(p.users))

    def own(self, stage: int) -> dict[str, Any]:
        """Return the parent's tensors that a stage reads: hoisted parameters, and buffers that the stage writes."""
        module = self.split.module
        read = [str(n.target) for n in self.nodes(stage) if n.op == "get_attr"]
        return {name: attribute(module, name) for name in read if name not in self.split.names.values()}

    def border(self, stage: int, wanted: Iterable[Node]) -> tuple[Node, ...]:
        """Return the values that go from a stage to the next one, in the order of the graph.

        Numbers that follow from the sizes of the inputs are not sent: see `computed`.

        Args:
            stage: the stage before the border.
            wanted: the values that the last stage needs.
        """
        return tuple(n for n in self._live(stage, wanted) if n.name not in self.facts.sizes.computed)

    def computed(self, stage: int, wanted: Iterable[Node]) -> dict[Node, Expression]:
        """Return the numbers of earlier stages that a stage computes from the sizes of the inputs, with their values.

        Args:
            stage: the stage that reads them.
            wanted: the values that the last stage needs.
        """
        found, before = self.facts.sizes.computed, self._live(stage - 1, wanted)
        return {node: found[node.name] for node in before if node.name in found}

    def _live(self, stage: int, wanted: Iterable[Node]) -> Iterator[Node]:
        """Yield the values of a stage and those before it that later stages need."""
        out = set(wanted)
        for node, home in self.stage_of.items():
            if home <= stage and (node in out or any(self.stage_of.get(user, 0) > stage for user in node.users)):
                yield node

    def passed_on(self, stage: int, wanted: Iterable[Node]) -> tuple[Node, ...]:
        """Return the values that a stage only forwards: received and sent on, but not read.

        Args:
            stage: neither the first nor the last stage.
            wanted: the values that the last stage needs.
        """
        out = tuple(wanted)
        read = {node for own in self.nodes(stage) for node in own.all_input_nodes}
        come = set(self.border(stage - 1, out)) - read
        return tuple(node for node in self.border(stage, out) if node in come)

    def value(self, node: Node) -> BorderValue:
        """Return how the value of a node of the parent crosses a border."""
        return self.facts.values[node.name]


def chain_of(split: Split) -> Chain:
    """Return the chain of a split's parts.

    Raises:
        PipelineError: SK801 if parts share memory that one of them writes, or several read a tensor of the parent.
    """
    stage_of = stage_of_calls(split)
    return Chain(split, stage_of, _facts(split, stage_of))


def stage_of_calls(split: StageSource) -> Mapping[Node, int]:
    """Map the parent's call nodes, and the attributes that it reads, to the stage that runs them.

    Raises:
        PipelineError: SK801 if several stages read a tensor of the parent.
    """
    graph = split.module.graph
    stages = {key: stage for stage, key in enumerate(split.names)}
    calls = calls_of(graph, split.names)
    bodies = {split.names[key]: stage for key, stage in stages.items()}
    stage_of: dict[Node, int] = {}
    checks = check_nodes(graph)  # they check a call of the whole parent, which ranks do not make
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
        if str(node.target) in bodies:  # the module of a checkpointed part
            stage_of[node] = bodies[str(node.target)]
        elif len(readers) != 1 or any(user.op == "output" for user in node.users):
            raise PipelineError(
                "SK801",
                f"{node.target} is in the parent, for {len(readers)} stages"
                + (" and the output" if len(readers) < 2 else " read it"),
                'Split with parameters="own", and put all nodes that read a buffer that is written into one stage.',
                [node],
            )
        else:
            stage_of[node] = readers.pop()
    order = {node: i for i, node in enumerate(graph.nodes)}
    return dict(sorted(stage_of.items(), key=lambda item: order[item[0]]))


def _facts(split: Split, stage_of: Mapping[Node, int]) -> ChainFacts:
    flow = split.flow
    written = _require_own_memory(split, stage_of)
    needed, random = flow.fact(Gradients).carriers, {n for n, effect in flow.effects.items() if effect.random}
    originals = {copied: node for node, copied in split.copies[PARENT].items()} | dict(
        values_of(split.module.graph, split)
    )
    values = {n.name: border_value(originals[n], needed, written) for n in stage_of if n in originals}
    placeholders = (graph.find_nodes(op="placeholder") for graph in (split.module.graph, flow.graph))
    given = list(zip(*placeholders, strict=True))
    identity = {
        **identity_of(flow.graph, split.plan),
        "code of the parts": _digest(with_numbered_devices("".join(part.code for part in split.parts.values()))),
    }
    return ChainFacts(
        values,
        {str(node.target): meta_like(value_of(original)) for node, original in given},
        tuple(not random.isdisjoint(sub.nodes) for sub in split.subgraphs.values()),
        tuple(sorted(str(node.target) for node in flow.written if node.op == "get_attr")),
        identity,
        graph_sizes(flow.graph, {n.name: value_of(originals[n]) for n in stage_of if n in originals}),
        captured=captured_types(flow.graph, flow.root),
        costly=costly_positions(flow) if given_caches(flow.root) else None,
        constants={
            str(n.target): original.meta["val"]
            for n, original in given
            if isinstance(original.meta.get("val", ...), _CONSTANTS)
        },
    )


def identity_of(graph: fx.Graph, plan: Plan) -> dict[str, str]:
    """Return digests of a graph and its plan, which must be the same on all ranks."""
    told = {name: value for name, value in plan.to_dict().items() if name != "prices"}  # each rank may measure
    return {"graph": fingerprint(graph), "plan": _digest(json.dumps(told, sort_keys=True))}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _require_own_memory(split: Split, stage_of: Mapping[Node, int]) -> frozenset[Node]:
    """Refuse writes that other stages would miss, as across devices (`splitkit.runtime.devices.writes_across_devices`).

    Inputs and buffers are not sent: each stage has its own copy. So all nodes that touch one that is written must be in
    one stage.

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
    memory = memory_classes(flow.effects, flow.root)
    given = {memory.members[node] for node in found.homes if node in memory.members}
    first: dict[object, Node] = {}
    for node, effect in flow.effects.items():
        if node in homes and node.op not in ("placeholder", "get_attr"):
            for item in memory.use(node, effect)[1]:
                if item in given and homes[first.setdefault(item, node)] != homes[node]:
                    raise PipelineError(
                        "SK801",
                        f"{first[item].name} and {node.name} share memory that is written, but are in different stages",
                        "Put all nodes that read or write it into one stage: splitkit.plan(gm, {..., "
                        f"{first[item].name!r}: 0, {node.name!r}: 0}}), or Stages with other borders.",
                        [first[item], node],
                    )
    return found.values


def _homes(split: Split, stage_of: Mapping[Node, int]) -> dict[Node, int]:
    stages = {key: i for i, key in enumerate(split.parts)}
    homes = {node: stages[key] for key, sub in split.subgraphs.items() for node in sub.nodes}
    for node, copied in split.copies[PARENT].items():
        if copied in stage_of:
            homes.setdefault(node, stage_of[copied])
    return homes


# Decides which values the last stage needs, and how it computes the loss from them.


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
