"""Estimate the seconds of collectives, in which the ranks along a dimension of a mesh exchange tensors.

::

    all_reduce("sum", "tp=4")     of n = 4 ranks, S bytes, over a link of so many bytes and seconds of latency
    ring                          2 (n - 1) steps, each of S / n bytes
    recursive halving, doubling   2 log2(n) steps, of 2 S (n - 1) / n bytes altogether

Every algorithm sends the same bytes, so the one with the fewest steps wins where n is a power of two. Source: Thakur,
Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005), sections 4.1 to 4.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, log2
from typing import Any

from torch.fx import Node

from splitkit.errors import CostError
from splitkit.graph.node_values import op_name, tensor_bytes
from splitkit.graph.shards import collective_group
from splitkit.graph.storages import tensors, value_of
from splitkit.hardware.link_specs import Link, find_link
from splitkit.prices import Costs, as_given

_ROUNDS = {"all_reduce": 2, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_to_all_single": 1}
"""Collective -> how often each rank sends its share of the whole: an all-reduce scatters, then gathers."""


def collective_seconds(node: Node, links: Mapping[str, Link]) -> float | None:
    """Return the seconds of a collective; ``None`` for any other node.

    Args:
        node: the node.
        links: dimension of the mesh -> the link between neighbouring ranks of it.

    Raises:
        CostError: SK322 if the dimension has no link.
    """
    group = collective_group(node)
    if group is None:
        return None
    if group.dimension not in links:
        raise CostError(
            "SK322",
            f"{node.name} is a collective over {group.dimension!r}, which has no link",
            f"Name the link of each dimension: roofline(graph, device, mesh={{{group.dimension!r}: 'nvlink4'}}).",
        )
    link, n, kind = links[group.dimension], group.ranks, op_name(node.target)
    rounds = next((count for name, count in _ROUNDS.items() if name in kind), 1)
    values = (value_of(node), *map(value_of, node.all_input_nodes))
    whole = max(sum(map(tensor_bytes, tensors(value))) for value in values)
    steps = n - 1 if "all_to_all" in kind or n & (n - 1) else ceil(log2(n))
    return rounds * (whole * (n - 1) / n / link.bandwidth + steps * link.latency) if n > 1 else 0.0


def mesh_of(costs: Costs) -> Mapping[str, Link]:
    """Return dimension of a mesh -> the link between its ranks, as far as prices know them."""
    given: Any = as_given(costs)
    while not hasattr(given, "mesh") and (inner := getattr(given, "costs", None)) is not None:
        given = as_given(inner)
    found: Mapping[str, Link] = getattr(given, "mesh", {})
    return found


def mesh_links(mesh: Mapping[str, str | Link] | None) -> dict[str, Link]:
    """Return dimension of a mesh -> its link, from names or links; raises SK322 for an unknown one."""
    return {name: find_link(link) for name, link in (mesh or {}).items()}
