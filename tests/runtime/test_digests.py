"""Digests differ whenever bits do, and depend on nothing but bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from splitkit.runtime.ranks.step_agreement import AT_ONCE, BLOCK, content_of, digest_of_tensors, digest_of_text, form_of

LARGE = 5 * AT_ONCE["cpu"] + BLOCK + 3
"""Elements of 4 bytes that fill several rounds, a block and a bit."""


def by_hand(words: list[int]) -> int:
    """The same sums of Python's integers."""
    mask, weights = (1 << 64) - 1, np.random.PCG64(0).random_raw(BLOCK).tolist()
    while True:
        blocks = [words[i : i + BLOCK] for i in range(0, len(words), BLOCK)]
        sums = [sum(w * x for w, x in zip(weights, block)) & mask for block in blocks]  # noqa: B905
        if len(sums) == 1:
            return sums[0] - (sums[0] >> 63 << 64)
        halves = [half for total in sums for half in (total & 0xFFFFFFFF, total >> 32)]
        words = [half - (half >> 31 << 32) for half in halves]


@pytest.mark.parametrize("count", [1, 5, BLOCK, BLOCK + 1, 6 * BLOCK + 7])
def test_a_digest_is_the_multilinear_hash_of_its_words(count):
    words = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32)
    assert int(content_of(words)) == by_hand(words.tolist())


@pytest.mark.parametrize("count", [7, LARGE])
def test_any_bit_and_any_order_counts(count):
    x = torch.randn(count)
    seen = {digest_of_tensors([x])}
    for i in (0, 1, count // 2, count - 1):
        for change in (lambda v: -v, lambda v: v + 1, lambda v: torch.nextafter(v, v + 1)):
            other = x.clone()
            other[i] = change(other[i])
            seen.add(digest_of_tensors([other]))
    other = x.clone()
    other[[0, -1]] = other[[-1, 0]]
    seen |= {digest_of_tensors([other]), digest_of_tensors([-x]), digest_of_tensors([x.flip(0)])}
    both = x.clone()
    both[1:3] *= -1  # two signs, which a sum of 64-bit words modulo 2^64 may not see
    assert len(seen | {digest_of_tensors([both])}) == 1 + 12 + 3 + 1


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (3,), (5, 7)])
def test_every_dtype_and_layout_is_digested(dtype, shape):
    x = (torch.randn(shape) * 8).to(dtype)
    held = torch.stack([x, x], -1)[..., 1]  # strided, and at an offset that is not a whole word
    assert digest_of_tensors([x]) == digest_of_tensors([held]) == digest_of_tensors([x.clone().t().contiguous().t()])
    assert digest_of_tensors([x]) != digest_of_tensors([x.logical_not().to(dtype)])
    assert digest_of_tensors([torch.conj(x)]) == digest_of_tensors([torch.conj(x).resolve_conj()])


def test_bytes_at_any_offset_are_digested():
    many = torch.arange(64, dtype=torch.uint8)
    for start in range(4):
        part = many[start : start + 8]
        assert digest_of_tensors([part]) == digest_of_tensors([part.clone()])
    sparse = torch.eye(3).to_sparse()
    assert digest_of_tensors([sparse]) == digest_of_tensors([torch.eye(3)])


def test_several_tensors_have_one_digest_that_depends_on_their_order():
    a, b = torch.ones(3), torch.full((3,), 2)
    found = [digest_of_tensors(tensors) for tensors in ([], [a], [b], [a, a], [a, b], [b, a])]
    assert len(set(found)) == len(found) and 0 not in found
    assert content_of(torch.empty(3, device="meta")) == 0 == content_of(torch.empty(0))


def test_forms_tell_all_but_the_elements():
    x = torch.zeros(2, 3)
    values = [x, x.int(), x.t(), [x], (x,), {"a": x}, [x, x], 1, 1.0, True, "1", None, object(), float("nan")]
    assert form_of(x) == "float32[2, 3]" and form_of([x, 1]) == "list of float32[2, 3], 1"
    assert len({form_of(value) for value in values}) == len(values)
    assert form_of(object()) == form_of(object()) == "a object"
    assert digest_of_text("a") != digest_of_text("b") and digest_of_text("") != 0
