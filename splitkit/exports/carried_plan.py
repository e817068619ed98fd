"""What a format can carry of a plan: modules and layers of each stage, placement, schedule, and what is recomputed."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from torch.fx import Node

from splitkit.costs import Costs
from splitkit.errors import PlanError
from splitkit.graph.dataflow import Dataflow, module_path, readers_of, waits_for
from splitkit.graph.storages import storage_key
from splitkit.pipeline.inseparable_nodes import together
from splitkit.pipeline.order import PipelineOrder
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.search.model_blocks import Block, model_blocks
from splitkit.search.placement_model import PlacementModel


@dataclass(frozen=True, eq=False)
class CarriedPlan:
    """A plan whose cuts a format can name, with all that formats write.

    Attributes:
        sequence: the layers of the model, as the format sees them.
        cuts: the number of layers before each cut, increasing.
        plan: the plan with these cuts.
        keys: its parts in the order in which they run, which are the stages.
        order: the schedule; ``None`` for none.
        recompute: layer -> whether backward computes it again.
        by_stage: whether a stage that is recomputed saves only its inputs, not the inputs of each layer.
        devices: the device of each stage, as the plan names it; empty where it names none.
        microbatch: the samples in a microbatch, if the graph says so.
    """

    sequence: LayerSequence
    cuts: tuple[int, ...]
    plan: Plan
    keys: tuple[PartKey, ...]
    order: PipelineOrder | None = None
    recompute: tuple[bool, ...] = ()
    by_stage: bool = False
    devices: tuple[str, ...] = ()
    microbatch: int = 1

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.keys)

    @property
    def names(self) -> list[list[str]]:
        """The modules of each stage."""
        layers = self.sequence.layers
        return [list(dict.fromkeys(name for i in range(*span) for name in layers[i].names)) for span in self.spans]

    @property
    def blocks(self) -> list[int]:
        """How many blocks each stage has."""
        return self.sequence.blocks_of(self.cuts)

    @property
    def starts(self) -> list[str]:
        """The module with which each stage but the first begins."""
        return [self.sequence.layers[cut].names[0] for cut in self.cuts]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first layer of each stage, and the one behind its last."""
        return list(pairwise([0, *self.cuts, len(self.sequence.layers)]))

    def stage_of(self, layer: int) -> int:
        """Return the stage of a layer."""
        return sum(cut <= layer for cut in self.cuts)

    @property
    def recomputed_blocks(self) -> list[list[bool]]:
        """Of the blocks of each stage, which backward computes again."""
        layers = self.sequence.layers
        flags = self.recompute or (False,) * len(layers)
        return [[flags[i] for i in range(*span) if layers[i].block is not None] for span in self.spans]

    @property
    def rank_of(self) -> tuple[int, ...]:
        """The rank of each stage; without a schedule each stage has its own."""
        return tuple(range(self.stages)) if self.order is None else self.order.rank_of

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return max(self.rank_of) + 1


@dataclass(frozen=True)
class StagesInText:
    """The stages that a text of another tool describes: one of the fields says where the cuts are.

    Attributes:
        modules: the modules of each stage.
        layers: how many layers each stage has, as the format counts them.
        starts: the modules before which a cut falls; with ``True`` it falls after the module.
        nodes: node -> stage.
        devices: module -> its device; a stage ends where the device changes.
        recompute: block -> whether it is computed again.
    """

    modules: tuple[tuple[str, ...], ...] | None = None
    layers: tuple[int, ...] | None = None
    starts: tuple[tuple[str, bool], ...] | None = None
    nodes: Mapping[str, int] | None = None
    devices: Mapping[str, str] | None = None
    recompute: tuple[bool, ...] = ()


def cannot_carry(tool: str, reason: str, remedy: str, nodes: Sequence[object] = ()) -> PlanError:
    """Return the refusal of a plan that a format cannot carry (SK523)."""
    return PlanError("SK523", f"{tool} cannot carry the plan: {reason}", remedy, nodes)


def parameters_in_stages(flow: Dataflow, plan: Plan, keys: Sequence[PartKey]) -> dict[str, tuple[int, ...]]:
    """Return parameter -> the stages that hold it, of the parameters that several stages hold."""
    parameters = flow.root.named_parameters(remove_duplicate=False)
    name_of = {storage_key(held): name for name, held in reversed([*parameters])}
    stages: dict[Hashable, set[int]] = {}
    number = {key: i for i, key in enumerate(keys)}
    for node in flow.nodes:
        for held in flow.owned(node):
            key = storage_key(held)
            if key in name_of:
                stages.setdefault(key, set()).update(number[k] for k in plan.places[node] if k in number)
    return {name_of[key]: tuple(sorted(found)) for key, found in stages.items() if len(found) > 1}


# The modules between which a format can cut, in the order in which they run, with the nodes of each.
#
# ::
#
#     wte  wpe   h.0   h.1   h.2   ln_f  head
#     [0]  [1]   [2]   [3]   [4]   [5]   [6]       "layers": each module with parameters
#     [  0   ]   [1]   [2]   [3]   [4]   [5]       "chain": what runs before a block is one
#     [  0   ]   [1]   [2]   [3]   [    4  ]       "ends": what runs after the blocks is one as well
#     [     0      ]   [1]   [     2       ]       "blocks": both belong to the next block


Level = Literal["nodes", "modules", "layers", "chain", "ends", "blocks"]
"""Where a format can cut: anywhere, before any module, or between whole layers."""

_SECOND_CALL = re.compile(r"@\d+")  # export marks the second call of a module `h.0@1`


@dataclass(frozen=True)
class Layer:
    """One of the things between which a format can cut.

    Attributes:
        names: the modules that it consists of, in the order in which they run.
        nodes: their nodes in graph order, and the nodes of no module that go with them.
        block: the list that it is a member of and its number there; None for modules around the blocks.
    """

    names: tuple[str, ...]
    nodes: tuple[Node, ...]
    block: tuple[str, int] | None = None


@dataclass(frozen=True, eq=False)
class LayerSequence:
    """The layers of a graph in the order in which they run.

    Attributes:
        flow: facts about the graph.
        layers: every placeable node is in one of them, or is shared.
        shared: nodes that every stage computes for itself (masks, rotary tables), in graph order.
        level: where cuts may fall.
    """

    flow: Dataflow
    layers: tuple[Layer, ...]
    shared: tuple[Node, ...]
    level: Level

    @cached_property
    def number(self) -> Mapping[Node, int]:
        """Node -> the number of its layer; shared nodes have none."""
        return {node: i for i, layer in enumerate(self.layers) for node in layer.nodes}

    @cached_property
    def readers(self) -> Mapping[Node, frozenset[int]]:
        """Shared node -> the layers that need it, directly or through other shared nodes."""
        needed: dict[Node, set[int]] = {node: set() for node in self.shared}
        for node in reversed(self.flow.nodes):
            own = {self.number[node]} if node in self.number else needed[node]
            for read in waits_for(self.flow, node):
                if read in needed:
                    needed[read] |= own
        return {node: frozenset(layers) for node, layers in needed.items()}

    @cached_property
    def borders(self) -> tuple[int, ...]:
        """The numbers of layers before each possible cut, increasing: no layer before one waits for a later layer."""
        count, number = len(self.layers), self.number
        crossed = [0] * (count + 1)  # at each border against the one before it
        for first, last in self._unbroken(number):
            crossed[first + 1] += 1
            crossed[last + 1] -= 1
        found, open_now = [], 0
        for border in range(1, count):
            open_now += crossed[border]
            if not open_now:
                found.append(border)
        return tuple(found)

    def _unbroken(self, number: Mapping[Node, int]) -> list[tuple[int, int]]:
        """Return pairs of layers between which no cut may fall: a wait backwards, or nodes that must stay together."""
        pairs = [
            (number[node], number[read])
            for node in number
            for read in waits_for(self.flow, node)
            if read in number and number[read] > number[node]
        ]
        sets = ([number[node] for node in nodes if node in number] for nodes in self.flow.fact(together))
        return pairs + [(min(own), max(own)) for own in sets if own and min(own) < max(own)]

    @property
    def embeds_tokens(self) -> bool:
        """Whether what runs before the blocks looks up embeddings; of a joint graph, whether anything does."""
        first = self.layers[0].nodes or self.flow.nodes
        return any("embedding" in str(node.target) for node in first)

    @cached_property
    def lists(self) -> tuple[str, ...]:
        """The lists of modules that hold the blocks."""
        return tuple(dict.fromkeys(layer.block[0] for layer in self.layers if layer.block is not None))

    def blocks_of(self, cuts: Sequence[int]) -> list[int]:
        """Return how many blocks each stage has; ``cuts`` are the numbers of layers before each cut."""
        ends = [0, *cuts, len(self.layers)]
        return [sum(layer.block is not None for layer in self.layers[start:end]) for start, end in pairwise(ends)]

    @cached_property
    def shared_modules(self) -> Mapping[str, frozenset[int]]:
        """Module with tensors that only shared nodes run (rotary tables) -> the layers that need its result."""
        around = {name for layer in self.layers for name in layer.names}
        found: dict[str, frozenset[int]] = {}
        for node, layers in self.readers.items():
            path = module_path(node)
            inside = any(path == name or path.startswith(f"{name}.") for name in around)
            if path and not inside and self.flow.owned(node):
                found[path] = found.get(path, frozenset()) | layers
        return {path: found[path] for path in found if not any(path.startswith(f"{other}.") for other in found)}

    def plan(self, cuts: Sequence[int], note: str) -> Plan:
        """Return the plan with these cuts and the stages ``0 .. n - 1``; shared nodes are in each stage that reads."""
        ends = [*cuts, len(self.layers)]
        stage_of = [next(s for s, end in enumerate(ends) if i < end) for i in range(len(self.layers))]
        labels: dict[Node, int | list[int]] = {}
        for node in self.flow.nodes:
            if node in self.number:
                labels[node] = stage_of[self.number[node]]
            else:
                labels[node] = sorted({stage_of[i] for i in self.readers[node]}) or [0]
        return Plan.of(labels, note)  # type: ignore[arg-type]

    def cuts_of(self, plan: Plan, keys: Sequence[object]) -> tuple[int, ...] | None:
        """Return the cuts of a plan whose parts ``keys`` run in this order; None if a cut falls inside a layer."""
        rank = {key: i for i, key in enumerate(keys)}
        stages = []
        for layer in self.layers:
            found = {rank.get(plan.home(node), -1) for node in layer.nodes}
            if len(found) > 1:
                return None
            stages.append(found.pop())
        if stages != sorted(stages) or {*stages} != {*range(len(keys))}:
            return None
        return tuple(i for i in range(1, len(stages)) if stages[i] != stages[i - 1])


def layer_sequence(flow: Dataflow, costs: Costs, level: Level) -> LayerSequence:
    """Return the layers of a graph at a level.

    A node of no layer (a reshape between two blocks) goes with the first layer that reads it, or else with the last
    that it reads.

    Raises:
        PlanError: SK522 if the graph has no module paths, or no list of blocks where the level needs one.
    """
    if level == "nodes":
        return LayerSequence(flow, tuple(Layer((node.name,), (node,)) for node in flow.nodes), (), level)
    if level == "modules":
        return LayerSequence(flow, _module_starts(flow), (), level)
    blocks = model_blocks(flow, costs)
    if not blocks:
        reason = "the model has no list of blocks (layers.0, layers.1 ...) between which the format could cut"
        raise PlanError("SK522", reason, "Export to torch, which cuts before any module, or to onnx.")
    if level != "layers":
        _require_single_runs(flow, blocks)
    shared = PlacementModel(flow, costs, [dict.fromkeys(flow.nodes, 0.0)], repeat=True).shared
    layers = _layers(flow, {node: block for block, nodes in blocks.items() for node in nodes}, set(shared))
    return LayerSequence(flow, _joined(layers, level), shared, level)


def _require_single_runs(flow: Dataflow, blocks: Collection[Block]) -> None:
    """Refuse blocks that run more than once or not at all: formats that count layers would count others."""
    again = _called_again([_called(node) for node in flow.nodes])
    lists: dict[str, set[int]] = {}
    for name, number in blocks:
        lists.setdefault(name, set()).add(number)
    for name, numbers in lists.items():
        path = f"{name}." if name else ""
        twice = next((f"{path}{number}" for number in sorted(numbers) if f"{path}{number}" in again), "")
        gap = next((f"{path}{number}" for number in range(max(numbers)) if number not in numbers), "")
        if twice or gap:
            reason = f"{twice} runs more than once" if twice else f"{gap} does not run"
            raise PlanError("SK522", f"{reason}, and the format counts layers", "Export to torch, accelerate or onnx.")


def _layers(flow: Dataflow, block_of: Mapping[Node, tuple[str, int]], shared: set[Node]) -> tuple[Layer, ...]:
    """Return the blocks, and the outermost modules with parameters around them, in the order in which they run."""
    around = {outer for name, _ in block_of.values() for outer in outer_modules(name)}
    own: dict[Node, tuple[str, tuple[str, int] | None]] = {}
    for node in flow.nodes:
        if node in shared:
            continue
        if node in block_of:
            name, number = block_of[node]
            own[node] = (f"{name}.{number}" if name else str(number), (name, number))
        elif module := next((outer for outer in outer_modules(module_path(node)) if outer not in around), ""):
            own[node] = (module, None)
    stateful = {key for node, key in own.items() if key[1] is not None or flow.owned(node)}
    named = {node: key for node, key in own.items() if key in stateful}
    numbers = {key: i for i, key in enumerate(dict.fromkeys(named.values()))}
    home = _loose(flow, {node: numbers[key] for node, key in named.items()}, shared)
    members: list[list[Node]] = [[] for _ in numbers]
    for node in flow.nodes:
        if node in home:
            members[home[node]].append(node)
    return tuple(Layer((name,), tuple(nodes), block) for (name, block), nodes in zip(numbers, members, strict=True))


def outer_modules(path: str) -> list[str]:
    """Return the modules on the way to a module, the outermost first, and the module itself; none for the model."""
    atoms = path.split(".") if path else []
    return [".".join(atoms[:end]) for end in range(1, len(atoms) + 1)]


def _loose(flow: Dataflow, known: Mapping[Node, int], shared: set[Node]) -> dict[Node, int]:
    """Return node -> layer for all nodes that are not shared: with the first reader, or else after the last input."""
    home, readers = dict(known), readers_of(flow)
    for node in reversed(flow.nodes):
        if node not in home and node not in shared:
            later = [home[reader] for reader in readers[node] if reader in home]
            if later:
                home[node] = min(later)
    for node in flow.nodes:
        if node not in home and node not in shared:
            home[node] = max((home[read] for read in waits_for(flow, node) if read in home), default=0)
    return home


def _joined(layers: Sequence[Layer], level: Level) -> tuple[Layer, ...]:
    """Join what runs around the blocks, as far as the level asks for it."""
    last = max(i for i, layer in enumerate(layers) if layer.block is not None)
    found: list[list[Layer]] = []
    for i, layer in enumerate(layers):
        after_plain = bool(found) and found[-1][-1].block is None
        if level == "layers" or (level == "chain" and i > last):
            joins = False
        elif level == "blocks":
            joins = after_plain or i > last
        else:
            joins = after_plain and layer.block is None
        if joins:
            found[-1].append(layer)
        else:
            found.append([layer])
    return tuple(map(_merged, found))


def _merged(parts: Sequence[Layer]) -> Layer:
    names = tuple(name for layer in parts for name in layer.names)
    block = next((layer.block for layer in parts if layer.block is not None), None)
    return Layer(names, tuple(node for layer in parts for node in layer.nodes), block)


def _module_starts(flow: Dataflow) -> tuple[Layer, ...]:
    """Cut the graph's own order before the first node of every module that is called once."""
    paths = [_called(node) for node in flow.nodes]
    again = _called_again(paths)
    begins: list[tuple[str, int]] = []
    seen: set[str] = set()
    for position, names in enumerate(paths):
        fresh = [name for name in names if name not in seen]
        seen.update(fresh)
        start = next((name for name in fresh if _plain(name) and _plain(name) not in again), "")
        if start:
            begins.append((start, position))
    if not begins:
        raise PlanError("SK522", "the graph has no module paths", "Capture the model with splitkit.capture.")
    starts = [0, *(position for _, position in begins[1:])]
    ends = [*starts[1:], len(flow.nodes)]
    return tuple(
        Layer((name,), flow.nodes[start:end]) for (name, _), start, end in zip(begins, starts, ends, strict=True)
    )


def _called(node: Node) -> list[str]:
    """Return the modules in whose calls a node was captured, outermost first; ``h.0@1`` is the second call of one."""
    stack = node.meta.get("nn_module_stack") or {}
    if not module_path(node):
        return []
    return [name for value in stack.values() if (name := str(value[0]).removeprefix("L__self__").lstrip("."))]


def _plain(name: str) -> str:
    return _SECOND_CALL.sub("", name)


def _called_again(paths: Sequence[Sequence[str]]) -> set[str]:
    """Return the modules that run more than once: a cut before one would fall before each of its calls."""
    found: set[str] = set()
    left: set[str] = set()
    before: set[str] = set()
    for names in paths:
        now = set(names)
        left |= before - now
        found |= {_plain(name) for name in names if name in left or _plain(name) != name}
        before = now
    return found
