"""The lower convex hull of points, by hand."""

from __future__ import annotations


def lower_hull(points):
    """The corners from the least first cost to the least second (Andrew's monotone chain)"""
    hull = []
    for x, y in sorted(points):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) > 1 and (hull[-1][0] - hull[-2][0]) * (y - hull[-2][1]) <= (hull[-1][1] - hull[-2][1]) * (
            x - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull
