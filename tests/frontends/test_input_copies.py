"""Copies of inputs lie in memory as the inputs do: those that overlap overlap, the others stand alone."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from splitkit.frontends.input_copies import copies_with_leaves, has_plain_memory
from splitkit.graph.storages import overlapping


def test_tensors_of_one_storage_come_in_groups_that_overlap():
    x = torch.arange(10.0)
    whole, head, inner, tail, last = x[:6], x[:2], x[1:3], x[4:8], x[8:]
    groups = overlapping([tail, last, inner, whole, head])  # what ends last decides, not what came last
    assert [sorted(map(len, group)) for group in groups] == [[2, 2, 4, 6], [2]]
    assert [len(group) for group in overlapping([x[:2], x[2:4]])] == [1, 1]


def test_copies_share_what_the_tensors_share():
    x = torch.arange(6.0, requires_grad=True).detach()
    first, second, alone = x[:4], x[2:], torch.ones(2)
    copies = {number: copy.given for number, copy in copies_with_leaves([first, second, alone]).items()}
    one, other, single = copies[id(first)], copies[id(second)], copies[id(alone)]
    one[3] = 9.0
    assert other[1] == 9.0 and first[3] == 3.0 and other[0] == 2.0
    assert single.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in (one, alone)}


def test_only_a_storage_with_sizes_and_strides_is_plain_memory():
    """Other tensors have no memory, another layout of it, or more than that."""
    x = torch.ones(4, 4)
    plain = [x, x.t(), nn.Parameter(x), x[1:]]
    others = [x.to("meta"), x.to_mkldnn(), x.to_sparse(), FakeTensorMode().from_tensor(x)]
    others.append(torch.nested.nested_tensor([x, x[:2]], layout=torch.strided))
    assert all(map(has_plain_memory, plain)) and not any(map(has_plain_memory, others))
