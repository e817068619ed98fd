"""Large objects print a few lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import nn

import splitkit as sk
from splitkit.short_repr import brief, few


def test_a_split_and_what_belongs_to_it_print_a_few_lines():
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(40))), torch.randn(2, 8)
    gm = sk.capture(model, x)
    joint = sk.capture_joint(model, x, loss=lambda y: y.sum())
    pair = joint.split(sk.policies.SaveAll())
    made = sk.split(gm, sk.policies.RoundRobin(30), on_cycle="refine")
    text = str(made)
    assert "submod_7_7: 1 ops, 288 B of parameters; takes linear_6 (64 B); gives linear_7 (64 B)" in text
    assert "and 32 more parts" in text and len(text.splitlines()) == 10
    frontier = sk.Frontier(joint)
    values = [made, made.plan, made.flow, made.subgraphs[0, 0], pair, joint, joint.signature, sk.simulate_memory(gm)]
    values += [sk.costs.flops(gm), sk.report(gm, made.plan), frontier, frontier.points[0]]
    for value in values:
        assert len(repr(value)) < 1000 and "\n" not in repr(value), type(value)
    for value in (v for v in values if not isinstance(v, type(sk.report(gm, made.plan)))):
        assert len(str(value).splitlines()) <= 10 and len(str(value)) < 2000, type(value)


def test_facts_and_results_of_joint_graphs_print_a_few_lines():
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)]), torch.randn(2, 8)
    joint = sk.capture_joint(model, x, loss=torch.sum)
    assert all(len(repr(o)) < 1000 and len(str(o).splitlines()) < 5 for o in (joint.flow, joint.run(x)))
    assert str(joint.run(x)).startswith("loss ") and "24 gradients" in str(joint.run(x))


@dataclass(repr=False)
class Long:
    inner: object
    hidden: int = field(default=3, repr=False)

    __repr__ = brief


def test_what_is_inside_is_cut_short():
    assert repr(Long(Long(Long(1)))) == "Long(inner=Long(inner=Long(...)))"
    assert repr(Long([1, 2, 3])) == "Long(inner=[1, 2, ...])" and repr(Long({1: 2})) == "Long(inner={1: 2})"
    assert repr(Long(nn.Linear(2, 2))) == "Long(inner=<Linear>)"
    assert repr(Long(MappingProxyType({1: "a" * 200}))).endswith("aaa'})") and len(repr(Long("a" * 200))) < 100
    assert list(few("abc", "letters")) == ["  a", "  b", "  c"]
    assert list(few("a" * 10, "letters"))[-2:] == ["  a", "  and 2 more letters"]
