"""Makes sure that all ranks run the same: plans on one rank, and compares graphs, plans and settings before a step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.fx import Node

from splitkit._torch import rename, target_name
from splitkit.errors import PipelineError, SplitError
from splitkit.graph.canonical import canonical_form, settings_text, value_text
from splitkit.graph.scope import is_state_op
from splitkit.graph.shards import collective_group
from splitkit.graph.storages import attribute
from splitkit.plans.plan_file import fingerprint
from splitkit.plans.record import Plan
from splitkit.runtime.ranks.planned_chain import captured_graph
from splitkit.runtime.ranks.planned_stage import graphs_of
from splitkit.runtime.ranks.stage_chain import Chain

_REMEDY = "Start every rank with the same files, packages and arguments; plan once: splitkit.runtime.planned_once."


def require_process_group() -> None:
    """Raise SK804 if this process is not one of several that were started together."""
    if not dist.is_initialized():
        raise PipelineError(
            "SK804", "there is no process group", "Start with torchrun and torch.distributed.init_process_group."
        )


def planned_once(gm: fx.GraphModule, make: Callable[[], Plan], group: dist.ProcessGroup | None = None) -> Plan:
    """Make or load a plan on rank 0 and return it on every rank.

    Ranks may have captured independent nodes in different orders and under different names. Such a graph is first
    reordered, in place, to match rank 0's; its nodes stay the same objects.

    Args:
        gm: the graph, captured on each rank.
        make: makes or loads the plan; called on rank 0 only.
        group: the ranks.

    Raises:
        SplitError: the error that ``make`` raises, on every rank.
        PipelineError: SK804 on every rank if one captured a different graph than rank 0; names the first difference.
    """
    sent = from_first(lambda: make().to_dict(), group)
    sizes = zlib.crc32("\n".join(map(value_text, gm.graph.nodes)).encode())
    graphs = from_every((fingerprint(gm.graph), sizes), group)
    if any(graph != graphs[0] for graph in graphs):
        first = from_first(lambda: listing(gm), group)
        _refuse_other_graphs(from_every(difference(gm, first), group))
        if dist.get_rank(group):
            put_in_order(gm, first)
    return Plan.from_dict(gm.graph, sent)


def from_first(make: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Return what rank 0 makes on every rank, or raise its error on every rank. All ranks must call it."""
    sent: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            sent = [make()]
        except SplitError as error:
            sent = [error]
    dist.broadcast_object_list(sent, group=group, group_src=0)
    if isinstance(sent[0], SplitError):
        raise sent[0]
    return sent[0]


def from_every(own: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Return rank -> the object that it gives. All ranks must call it."""
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    return every


def differs(values: Mapping[int, object], text: str) -> str:
    """Say how values of ranks differ; empty if they do not.

    Args:
        values: rank -> its value.
        text: a format for the first other value, the ranks that have it, the value of the first rank, and that rank.
    """
    first = next(iter(values))
    other = next((value for value in values.values() if value != values[first]), None)
    if other is None:
        return ""
    have = [rank for rank, value in values.items() if value == other]
    return text.format(other, ranks_text(have), values[first], ranks_text([first]))


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``"rank 1"``, ``"ranks 1, 3"``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _refuse_other_graphs(differences: Sequence[str]) -> None:
    """Raise SK804 if a rank's graph differs from rank 0's in more than order."""
    for rank, where in enumerate(differences):
        if where:
            reason = f"rank {rank} captured a different graph than rank 0: they first differ at {where}"
            raise PipelineError("SK804", reason, _REMEDY)


def require_same(chain: Chain, facts: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
    """Refuse to go on if the ranks are about to run different things.

    Args:
        chain: the stages of this rank's split.
        facts: name -> other facts that must be the same.
        group: the ranks.

    Raises:
        PipelineError: SK804 on every rank; names the first rank that differs from rank 0, and the fact.
    """
    own = {
        "version of torch": torch.__version__,
        **chain.facts.identity,
        **{name: str(value) for name, value in facts.items()},
    }
    every = from_every(own, group)
    if any(other.get("graph") != every[0].get("graph") for other in every):
        _refuse_other_order(chain, group)
    _require_equal(every)


def require_same_collectives(chain: Chain, facts: Mapping[str, object], group: dist.ProcessGroup) -> None:
    """Refuse ranks along a dimension of a mesh whose stages would not meet in the same collectives.

    Their graphs may differ in numbers: each looks up its own rows of an embedding that is divided by rows.

    Raises:
        PipelineError: SK804 on every rank of the group; names the first that differs, and the fact.
    """
    parts = [chain.split.parts[key] for key in chain.keys if key in chain.split.parts]
    nodes = [node for part in parts for graph in graphs_of(part) for node in graph.graph.nodes]
    calls = ((node, ranks) for node in nodes if (ranks := collective_group(node)) is not None)
    met = [f"{node.target} {ranks} {value_text(node)}" for node, ranks in calls]
    _require_equal(from_every({**{name: str(value) for name, value in facts.items()}, "collectives": met}, group))


def _require_equal(every: Sequence[Mapping[str, object]]) -> None:
    for rank, other in enumerate(every):
        for name, value in every[0].items():
            if other.get(name) != value:
                own, first = str(other.get(name)), str(value)
                reason = f"rank {rank} has a different {name} than rank 0: {own:.24}, not {first:.24}"
                raise PipelineError("SK804", reason, _REMEDY)


def _refuse_other_order(chain: Chain, group: dist.ProcessGroup | None) -> None:
    """Raise SK804 that names where the graphs differ, even if only in the order of their nodes."""
    root = captured_graph(chain.split)
    first = from_first(lambda: None if root is None else listing(root), group)
    if not all(from_every(root is not None and first is not None, group)):
        return  # stages of a folder know only the fingerprint of their graph
    assert root is not None
    _refuse_other_graphs(from_every(difference(root, first), group))
    raise PipelineError(
        "SK804",
        "the ranks captured the same nodes in different orders: a set of strings has another order in each process",
        "Plan with splitkit.runtime.planned_once, which puts the graphs into one order before they are split; or start "
        "all ranks with the same PYTHONHASHSEED.",
    )


# Reorders and renames the nodes of a graph so that they match the same graph on another rank.
#
# Ranks that capture the same model may get independent nodes in different orders: the order of a loop over a set of
# strings depends on the hash seed of the process. Stages agree on messages, and replicas on gradients, by the order of
# the graph. So rank 0 sends its order, and the others rearrange their graphs. That order is valid for them too, since
# all graphs have the same canonical form::
#
#     rank 0:  cos   = cos(slow)          rank 1:  cos   = cos(fast)   ==>   cos   = cos(slow)
#              cos_1 = cos(fast)                   cos_1 = cos(slow)         cos_1 = cos(fast)
#
# The nodes stay the same objects.


@dataclass(frozen=True)
class Entry:
    """A node of a graph, as data.

    Attributes:
        name: the name of the node.
        target: the name of its target.
        number: its number in the canonical form; ``None`` for a state op (enter, exit, set).
        value: dtype and shape of its value, as text.
        settings: what a state op opens, closes or sets; empty for other nodes.
        inputs: the positions in the graph of a state op's arguments; empty for other nodes.
    """

    name: str
    target: str
    number: int | None
    value: str
    settings: str = ""
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Listing:
    """A graph in its order, as data that can be sent.

    Attributes:
        digests: the digests of the canonical form.
        entries: the nodes in graph order.
    """

    digests: tuple[str, ...]
    entries: tuple[Entry, ...]


def listing(gm: fx.GraphModule) -> Listing:
    """Return what other ranks need to put their graph into the order of this one."""
    form = canonical_form(gm)
    numbers = {node: number for number, node in enumerate(form.nodes)}
    places = {node: place for place, node in enumerate(gm.graph.nodes)}
    return Listing(form.digests, tuple(_entry(node, numbers.get(node), places) for node in places))


def _entry(node: Node, number: int | None, places: Mapping[Node, int]) -> Entry:
    name, target, value = node.name, target_name(node), value_text(node)
    if number is not None:
        return Entry(name, target, number, value)
    return Entry(name, target, None, value, settings_text(node), tuple(places[n] for n in node.all_input_nodes))


def difference(gm: fx.GraphModule, other: Listing) -> str:
    """Say where two graphs differ in what they compute or in sizes; empty if only in order and names."""
    form, theirs = canonical_form(gm), {e.number: e for e in other.entries if e.number is not None}
    if (number := form.first_difference(other.digests)) is not None:
        own = _text(_entry(form.nodes[number], number, {})) if number < len(form.nodes) else "the end"
        return f"{own}, which is {_text(theirs[number]) if number in theirs else 'the end'} on rank 0"
    for number, node in enumerate(form.nodes):
        if (value := value_text(node)) != theirs[number].value:
            return f"{node.name}, which is {value or 'unknown'}, and {theirs[number].value or 'unknown'} on rank 0"
    mine, others = (
        sorted(map(settings_text, _state_ops(gm))),
        sorted(e.settings for e in other.entries if e.number is None),
    )
    return "" if mine == others else "its regions (autocast, grad mode), which begin or end elsewhere on rank 0"


def _text(entry: Entry) -> str:
    return f"{entry.name} ({entry.target})"


def put_in_order(gm: fx.GraphModule, other: Listing) -> None:
    """Give a graph, in place, the order and names of another one. `difference` must find none between them."""
    form = canonical_form(gm)
    free: dict[str, list[Node]] = {}
    for node in _state_ops(gm):
        free.setdefault(settings_text(node), []).append(node)
    nodes = [form.nodes[e.number] if e.number is not None else free[e.settings].pop(0) for e in other.entries]
    read = {e.target: n for e, n in zip(other.entries, nodes, strict=True) if n.op == "get_attr"}
    constants = {name: node for name, node in read.items() if node.target != name}
    values = {name: attribute(gm, str(node.target)) for name, node in constants.items()}
    root = gm.graph.find_nodes(op="output")[0]
    for node, entry in zip(nodes, other.entries, strict=True):
        if node is not root:
            root.prepend(node)
        if entry.number is None:
            given = dict(zip(node.all_input_nodes, (nodes[i] for i in entry.inputs), strict=True))
            node.args = fx.map_arg(node.args, given.__getitem__)
            node.kwargs = fx.map_arg(node.kwargs, given.__getitem__)
    rename({node: entry.name for node, entry in zip(nodes, other.entries, strict=True)})
    for name, value in values.items():
        path, _, last = name.rpartition(".")
        setattr(gm.get_submodule(path), last, value)
        constants[name].target = name
    gm.graph.lint()
    gm.recompile()


def _state_ops(gm: fx.GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if is_state_op(node)]
