"""Match the nodes that a plan file names to the nodes of a graph: by name if the graph is the same, else by form.

A plan file describes each node of its graph by one string, in canonical order (`splitkit.graph.canonical`)::

    "add_3 1f2e3d4c float32[2, 16]"          name, digest of the computation, type of the value

When the same model is captured in another process, its nodes may have other names and another order.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import fx
from torch.fx import Node

from splitkit.errors import FileError, SplitError
from splitkit.graph.canonical import CanonicalForm, canonical_form, value_text


class DescribedNode(NamedTuple):
    """A node as a plan file describes it: its name, a digest of its computation, and its value (``float32[2, 16]``)."""

    name: str
    digest: str
    value: str


def describe_nodes(graph: fx.Graph) -> list[str]:
    """Return the description of each node of a graph; an empty list if the graph has no canonical form."""
    form = _form_of(graph)
    if form is None:
        return []
    pairs = zip(form.nodes, form.digests, strict=True)
    return [f"{node.name} {digest} {value_text(node)}".rstrip() for node, digest in pairs]


def parse_nodes(data: object) -> list[DescribedNode]:
    """Parse the node descriptions of a plan file; early versions of the file have none.

    Raises:
        FileError: SK501 if a description is damaged.
    """
    fields = [text.split(" ", 2) if isinstance(text, str) else [] for text in data] if isinstance(data, list) else [[]]
    names = {some[0] for some in fields if some}
    if not all(len(some) > 1 for some in fields) or len(names) < len(fields):
        raise FileError(
            "SK501", "the plan is damaged: its nodes are not a list of distinct names with digests", "Plan again."
        )
    return [DescribedNode(name, digest, rest[0] if rest else "") for name, digest, *rest in fields]


def match_nodes(
    graph: fx.Graph, known: Sequence[DescribedNode], placed: Collection[str], same: bool
) -> dict[str, Node]:
    """Return a mapping from the node names of a file to the nodes of a graph, for every name that the file places.

    Args:
        graph: the graph that the plan is loaded for.
        known: the descriptions in the file.
        placed: the names that the file places.
        same: whether the graph has the same fingerprint as the one in the file.

    Raises:
        FileError: SK502 if the graph is a different one; the message says where the two differ first.
    """
    by_name = {node.name: node for node in graph.nodes}
    missing = [name for name in placed if name not in by_name]
    if same and not missing:
        return by_name
    form = _form_of(graph) if known else None
    if form is None:
        raise _another(
            f": {missing[0]!r} and {len(missing) - 1} more of its nodes are not in this graph" if missing else "",
            missing,
        )
    if (number := form.first_difference([node.digest for node in known])) is not None:
        raise _another(_where(form, known, number), [known[number].name] if number < len(known) else missing)
    by_form = {other.name: node for other, node in zip(known, form.nodes, strict=True)}
    if lost := [name for name in placed if name not in by_form]:
        raise _another(f": {lost[0]!r} and {len(lost) - 1} more of its nodes have no description", lost)
    return by_form


def size_differences(known: Sequence[DescribedNode], nodes: Mapping[str, Node]) -> str:
    """Describe a value, an input if possible, whose shape or dtype differs from the file; "" if none differs."""
    pairs = [(node, d.value) for d in known if (node := nodes.get(d.name)) is not None]
    found = [(node, was, now) for node, was in pairs if was and (now := value_text(node)) and now != was]
    if not found:
        return ""
    node, was, now = min(found, key=lambda some: _FIRST.get(some[0].op, len(_FIRST)))
    name = node.target if node.op in _FIRST else node.name
    return f"{name} was {was} and is {now}" + (f", and so for {len(found) - 1} more" if len(found) > 1 else "")


_FIRST = {"placeholder": 0, "get_attr": 1}  # the sizes of other nodes follow from these


def _form_of(graph: fx.Graph) -> CanonicalForm | None:
    root = graph.owning_module
    if not isinstance(root, fx.GraphModule):
        return None
    try:
        return canonical_form(root)
    except SplitError:  # such a graph cannot be split either
        return None


def _where(form: CanonicalForm, known: Sequence[DescribedNode], number: int) -> str:
    theirs = f"{known[number].name!r} of the plan" if number < len(known) else "the end of the plan's"
    if number == len(form.nodes):
        return f": they first differ at {theirs}, and this graph has no more nodes"
    return f": they first differ at {theirs} and {form.nodes[number].name!r} of this graph"


def _another(what: str, nodes: Collection[str]) -> FileError:
    return FileError(
        "SK502",
        f"the plan was made for another graph{what}",
        "Capture the model in the same way (same mode and torch version), or plan again.",
        nodes,
    )
