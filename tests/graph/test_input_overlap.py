"""Whether tensors share memory, and which uses of it run in another order than the graph's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from splitkit.graph.input_overlap import Use, _are_apart, blocks, out_of_order, overlap

ROW, NUMBERS = torch.arange(12.0), np.arange(6.0)
with FakeTensorMode():
    FAKE = torch.empty(6)
META = torch.empty(6, device="meta")


def share(a, b, whole=False):
    return any(overlap(x, y) for x in blocks(a, whole) for y in blocks(b, whole))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (ROW[::2], ROW[1::2], False),
        (*ROW.chunk(2), False),
        (ROW.view(3, 4)[:, :2], ROW.view(3, 4)[:, 2:], False),
        (ROW.view(3, 4)[:, :2], ROW.view(3, 4)[:, 1:], True),
        (ROW[::2], ROW[::3], True),
        (ROW[1::4], ROW[3::4], False),
        (ROW, ROW.view(3, 4), True),
        (ROW[::2], ROW[1:2].expand(3), False),
        (ROW.view(torch.uint8)[:3], ROW.view(torch.uint8)[3:], False),
        (ROW.view(torch.uint8)[:3], ROW[:1], True),
        (torch.from_numpy(NUMBERS[1:4]), torch.from_numpy(NUMBERS[3:]), True),
        (torch.from_numpy(NUMBERS[1:3]), torch.from_numpy(NUMBERS[3:]), False),
        (META[:3], META[3:], False),
        (META[:4], META[3:], True),
        (META, torch.empty(6, device="meta"), False),
        (FAKE[:4], FAKE[3:], True),
        (FAKE[:3], FAKE[3:], False),
        (ROW[:0], ROW, False),
        (TwoTensor(ROW, ROW.clone()), TwoTensor(ROW.clone(), ROW), True),
        (TwoTensor(ROW[:6], ROW[:6].clone()), TwoTensor(ROW.clone()[:6], ROW.clone()[:6]), False),
        ([ROW[:3], {"k": ROW[6:]}], (ROW[3:6], ROW[7]), True),
    ],
)
def test_tensors_share_memory_if_they_have_a_byte_in_common(a, b, expected):
    assert share(a, b) is share(b, a) is expected


def test_whole_storages_are_compared_where_an_op_may_leave_its_input():
    assert share(ROW[::2], ROW[1::2], whole=True)


def use(place, first, last=None, writes=False):
    return Use(place, first, first if last is None else last, writes, f"{'write' if writes else 'read'} {place}")


def test_uses_in_another_order_than_the_graphs_are_found_however_they_are_listed():
    early, write, late = use(0, 1), use(1, 2, writes=True), use(2, 3)
    assert out_of_order([late, write, early]) is None and out_of_order([]) is None
    assert out_of_order([late, use(1, 3, writes=True), early]) == (use(1, 3, writes=True), late)
    assert out_of_order([write, use(0, 1, 2)]) == (use(0, 1, 2), write)  # a copy of the read runs as late as the write
    assert out_of_order([use(0, 9), use(1, 1), late]) is None  # reads may run in any order
    both = use(1, 5), use(1, 5, writes=True)  # a node that reads and writes is a write
    assert out_of_order([*both, use(2, 4)]) == out_of_order([*reversed(both), use(2, 4)]) == (both[1], use(2, 4))


def test_of_three_tensors_two_share_memory():
    x = torch.arange(8.0)
    assert _are_apart([x[4:], None, x[:2], x[2:4]], False)
    assert not _are_apart([x[:3], x[2:4], x[6:]], False) and not _are_apart([x[6:], x[:3], x[2:4]], False)
    assert not _are_apart([x[:2], x[6:]], True) and _are_apart([x, x.clone(), x.clone()], True)
    assert _are_apart([x[:4:2], x[3:]], False) and not _are_apart([x[:5:2], x[4:]], False)
