"""Reorders and renames the nodes of a graph so that they match the same graph on another rank.

Ranks that capture the same model may get independent nodes in different orders: the order of a loop over a set of
strings depends on the hash seed of the process. Stages agree on messages, and replicas on gradients, by the order of
the graph. So rank 0 sends its order, and the others rearrange their graphs. That order is valid for them too, since
all graphs have the same canonical form::

    rank 0:  cos   = cos(slow)          rank 1:  cos   = cos(fast)   ==>   cos   = cos(slow)
             cos_1 = cos(fast)                   cos_1 = cos(slow)         cos_1 = cos(fast)

The nodes stay the same objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx
from torch.fx import Node

from splitkit._torch import rename, target_name
from splitkit.graph.canonical import canonical_form, settings_text, value_text
from splitkit.graph.scope import is_state_op
from splitkit.graph.storages import attribute


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

    @property
    def by_number(self) -> Mapping[int, Entry]:
        """Number in the canonical form -> node."""
        return {entry.number: entry for entry in self.entries if entry.number is not None}


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
    form, theirs = canonical_form(gm), other.by_number
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
    constants = {e.target: n for e, n in zip(other.entries, nodes, strict=True) if _is_renamed(n, e.target)}
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


def _is_renamed(node: Node, target: str) -> bool:
    """Whether a node reads a constant that has another name on the other rank."""
    return node.op == "get_attr" and node.target != target
