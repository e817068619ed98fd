"""Which node of a graph is which node of a plan file: by name in the graph that it was made for, else by form.

A file lists the nodes of its graph in canonical order (`splitkit.graph.canonical`), one text each::

    "add_3 1f2e3d4c float32[2, 16]"          name, what it does, what it yields

The same model, captured in another process, may have these nodes in another order and by other names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from torch import fx
from torch.fx import Node

from splitkit.errors import FileError, SplitError
from splitkit.graph.canonical import CanonicalForm, canonical_form, value_text


class DescribedNode(NamedTuple):
    """A node of a file: its name, a digest of what it does, what it yields (``float32[2, 16]``)."""

    name: str
    digest: str
    value: str


def described(graph: fx.Graph) -> list[str]:
    """The nodes of a graph for a file; none where nothing is known but names."""
    form = _form_of(graph)
    if form is None:
        return []
    pairs = zip(form.nodes, form.digests, strict=True)
    return [f"{node.name} {digest} {value_text(node)}".rstrip() for node, digest in pairs]


def read(data: object) -> list[DescribedNode]:
    """The nodes that a file describes; files from before there were descriptions have none.

    Raises:
        FileError: SK501 where they are damaged.
    """
    fields = [text.split(" ", 2) if isinstance(text, str) else [] for text in data] if isinstance(data, list) else [[]]
    names = {some[0] for some in fields if some}
    if not all(len(some) > 1 for some in fields) or len(names) < len(fields):
        raise FileError(
            "SK501", "the plan is damaged: its nodes are no list of different names and digests", "Plan again."
        )
    return [DescribedNode(name, digest, rest[0] if rest else "") for name, digest, *rest in fields]


def matched(graph: fx.Graph, known: Sequence[DescribedNode], placed: Collection[str], same: bool) -> dict[str, Node]:
    """Name in the file -> node of the graph, for all that the file places.

    Args:
        graph: any.
        known: the nodes of the file's graph.
        placed: the names that the file places.
        same: whether the graph has the names, order and edges of the file's.

    Raises:
        FileError: SK502 where it is another graph, naming where they differ.
    """
    by_name = {node.name: node for node in graph.nodes}
    missing = [name for name in placed if name not in by_name]
    if same and not missing:
        return by_name
    form = _form_of(graph) if known else None
    if form is None:
        raise _another(
            f": {missing[0]!r} and {len(missing) - 1} more of its nodes are not in this one" if missing else "", missing
        )
    if (number := form.first_difference([node.digest for node in known])) is not None:
        raise _another(_where(form, known, number), [known[number].name] if number < len(known) else missing)
    by_form = {other.name: node for other, node in zip(known, form.nodes, strict=True)}
    if lost := [name for name in placed if name not in by_form]:
        raise _another(f": {lost[0]!r} and {len(lost) - 1} more of its nodes are described nowhere", lost)
    return by_form


def other_sizes(known: Sequence[DescribedNode], nodes: Mapping[str, Node]) -> str:
    """Which values have another shape or dtype than the file says, inputs and parameters first; "" if none has."""
    pairs = [(node, d.value) for d in known if (node := nodes.get(d.name)) is not None]
    found = [(node, was, now) for node, was in pairs if was and (now := value_text(node)) and now != was]
    if not found:
        return ""
    node, was, now = min(found, key=lambda some: _FIRST.get(some[0].op, len(_FIRST)))
    name = node.target if node.op in _FIRST else node.name
    return f"{name} was {was} and is {now}" + (f", and so for {len(found) - 1} more" if len(found) > 1 else "")


_FIRST = {"placeholder": 0, "get_attr": 1}


def _form_of(graph: fx.Graph) -> CanonicalForm | None:
    root = graph.owning_module
    if not isinstance(root, fx.GraphModule):
        return None
    try:
        return canonical_form(root)
    except SplitError:  # no graph that can be split either
        return None


def _where(form: CanonicalForm, known: Sequence[DescribedNode], number: int) -> str:
    theirs = f"{known[number].name!r} of the plan" if number < len(known) else "the end of the plan's"
    if number == len(form.nodes):
        return f": they first differ at {theirs}, and this one has no more nodes"
    return f": they first differ at {theirs} and {form.nodes[number].name!r} of this one"


def _another(what: str, nodes: Collection[str]) -> FileError:
    return FileError(
        "SK502",
        f"the plan was made for another graph{what}",
        "Capture the model in the same way (same mode and torch version), or plan again.",
        nodes,
    )
