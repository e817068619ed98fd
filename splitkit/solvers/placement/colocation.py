"""Groups of units that must share a device, and the order between groups."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from splitkit.solvers.placement.problem import Ints, Problem


def colour_groups(problem: Problem) -> Ints:
    """Return (n,) the group of each unit: units of one colour form a group, numbered by their first unit."""
    key = np.where(problem.colours >= 0, problem.colours, -1 - np.arange(problem.units))
    _, first, group = np.unique(key, return_index=True, return_inverse=True)
    return _renumbered(first[group])


def colour_order(problem: Problem) -> tuple[Ints, Ints]:
    """Return (n,) the group of each unit by colour, and the (e, 2) order edges between different groups.

    The order holds for the forward units. A group without forward units gets an artificial one, and the edges of its
    backward units count reversed (Tarnawski et al., NeurIPS 2020).
    """
    group = colour_groups(problem)
    return group, group_edges(problem, group)


def group_edges(problem: Problem, group: Ints) -> Ints:
    """Return the order edges between groups; see `colour_order`."""
    forward = np.zeros(int(group.max(initial=-1)) + 1, np.bool_)
    forward[group[~problem.backward]] = True
    ends, back = group[problem.edges], problem.backward[problem.edges]
    straight = ~back.any(axis=1)
    mirrored = back.all(axis=1) & ~forward[ends].all(axis=1)
    edges = np.concatenate([ends[straight], ends[mirrored][:, ::-1]])
    return distinct_pairs(edges[edges[:, 0] != edges[:, 1]])


def acyclic_groups(problem: Problem) -> Ints:
    """Return (n,) the group of each unit after groups that depend on each other in a cycle are merged."""
    group, edges = colour_order(problem)
    size = int(group.max(initial=-1)) + 1
    return _renumbered(strong_components(edges, size)[group])


def strong_components(edges: Ints, size: int) -> Ints:
    """Return (size,) the strongly connected component of each node."""
    matrix = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(size, size))
    label: Ints = connected_components(matrix, connection="strong")[1].astype(np.int64)
    return label


def distinct_pairs(edges: Ints) -> Ints:
    """Return each pair once, sorted."""
    once: Ints = np.unique(edges, axis=0) if len(edges) else edges.reshape(-1, 2)
    return once


def _renumbered(labels: Ints) -> Ints:
    """Return the same groups, numbered in the order in which they first occur."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]
