"""Every cut of a small network."""

from __future__ import annotations

from itertools import product

import numpy as np

from splitkit.solvers.min_cut import INFINITE


def finite_cuts(net):
    """(side, value) of every cut that is finite"""
    for bits in product((False, True), repeat=net.size - 2):
        side = np.array([True, False, *bits])
        crossing = side[net.tails] & ~side[net.heads]
        if not (net.capacities[crossing] == INFINITE).any():
            yield side, int(net.capacities[crossing].sum())
