"""Piper's problem on a chain, against all borders, replicas and variants; and without replicas or variants."""

import random
from itertools import combinations, product

import numpy as np
import pytest

from splitkit.solvers.line import piper
from splitkit.solvers.line.piper import PiperChain, Variant


def load_of(chain, first, end, degree, from_here, variants):
    """By the definition; infinite where it does not fit."""
    run = [chain.nodes[v][variants[v]] for v in range(first, end)]
    held = sum(v.fixed for v in run) + -(-from_here // degree) * sum(v.saved for v in run)
    if held > chain.capacity:
        return np.inf
    crossing = (chain.crossing[first] + chain.crossing[end]) if chain.crossing else 0.0
    ring = sum(chain.gradients[first:end]) if chain.gradients else 0.0
    return (sum(v.seconds for v in run) + crossing) / degree + 2 * (degree - 1) / degree * ring


def value_of(chain, ends, replicas, variants):
    starts, left, loads = [0, *ends[:-1]], sum(replicas), []
    for first, end, degree in zip(starts, ends, replicas, strict=True):
        loads.append(load_of(chain, first, end, degree, left, variants))
        left -= degree
    return max(loads)


def least(chain):
    """The least greatest load of all that there are."""
    size, best = len(chain.nodes), np.inf
    choices = list(product(*(range(len(variants)) for variants in chain.nodes)))
    for count in range(1, size + 1):
        for cuts in combinations(range(1, size), count - 1):
            for replicas in product(chain.degrees, repeat=count):
                if sum(replicas) <= chain.devices:
                    best = min([best, *(value_of(chain, [*cuts, size], replicas, one) for one in choices)])
    return best


def instance(seed):
    draw = random.Random(seed)
    size = draw.randint(1, 5)
    nodes = []
    for _ in range(size):
        seconds, saved, fixed = draw.randint(0, 9), draw.randint(0, 9), draw.randint(0, 5)
        kept = Variant(seconds, fixed, saved)
        again = Variant(seconds * 4 / 3, fixed, saved // 3)
        nodes.append([kept, again, Variant(seconds * 1.1, fixed + 2, saved // 2)][: draw.randint(1, 3)])
    crossing = [draw.randint(0, 2) for _ in range(size + 1)] if draw.random() < 0.5 else ()
    gradients = [draw.randint(0, 2) / 2 for _ in range(size)] if draw.random() < 0.5 else ()
    capacity = draw.choice([np.inf, draw.randint(5, 80), draw.randint(5, 40)])
    return PiperChain(
        nodes, draw.randint(1, 5), draw.choice([(1,), (1, 2), (1, 2, 4), (2, 3)]), capacity, crossing, gradients
    )


@pytest.mark.parametrize("seed", range(80))
def test_no_stages_replicas_and_variants_are_better(seed):
    chain = instance(seed)
    found, best = chain.solved(), least(chain)
    assert (found is None) == np.isinf(best)
    if found is not None:
        assert found.exact and sum(found.replicas) <= chain.devices
        assert found.value == pytest.approx(best)
        assert value_of(chain, found.ends, found.replicas, found.variants) == pytest.approx(best)


def test_a_stage_that_does_not_fit_computes_again_or_has_more_replicas():
    node = [Variant(3.0, 0, 4), Variant(4.0, 0, 1)]
    tight = PiperChain([node, node], 2, capacity=8).solved()
    assert (tight.value, tight.variants) == (3.0, (0, 0)), "two in flight in the first stage, one in the last"
    tighter = PiperChain([node, node], 2, capacity=7).solved()
    assert (tighter.value, tighter.variants) == (4.0, (1, 0))
    both = PiperChain([node, node], 2, (1, 2), capacity=8).solved()
    assert (both.value, both.replicas, both.variants) == (3.0, (1, 1), (0, 0))
    paired = PiperChain([node, node], 2, (2,), capacity=5).solved()
    assert (paired.value, paired.replicas) == (3.5, (2,)), "one of them computed again"


def test_choices_that_are_left_out_are_told(monkeypatch):
    nodes = [[Variant(1.0, 0, 2**i), Variant(1.0 + 2.0**i, 0, 0)] for i in range(8)]
    exact = PiperChain(nodes, 1, capacity=100).solved()
    assert exact.exact
    monkeypatch.setattr(piper, "_MOST", 4)
    thinned = PiperChain(nodes, 1, capacity=100).solved()
    assert not thinned.exact and thinned.value >= exact.value


def test_long_chains_of_blocks_are_exact():
    block = [Variant(3.0, 10, 8), Variant(4.0, 10, 2)]
    chain = PiperChain([block] * 48, 16, (1, 2, 4), capacity=900.0, crossing=[0.1] * 49, gradients=[0.01] * 48)
    found = chain.solved()
    assert found.exact and found.value == pytest.approx(value_of(chain, found.ends, found.replicas, found.variants))
    assert found.value >= 48 * 3.0 / 16


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"nodes": [[]]}, "nodes"),
        ({"nodes": [[Variant(-1.0, 0, 0)]]}, "nodes"),
        ({"nodes": [[Variant(1.0, 0, 2**60)]]}, "nodes"),
        ({"nodes": []}, "nodes"),
        ({"degrees": ()}, "degrees"),
        ({"crossing": [1.0]}, "crossing"),
        ({"gradients": [-1.0]}, "gradients"),
    ],
)
def test_what_makes_no_sense_is_refused(asked, field):
    with pytest.raises(ValueError, match=field):
        PiperChain(**{"nodes": [[Variant(1.0, 0, 0)]], "devices": 2, **asked})
