"""Digests tensors and other values, so that ranks can compare them without sending them.

The bits of a tensor, as 32-bit words ``x``, are hashed in a tree of blocks, each with the multilinear hash
``sum(w[i] * x[i]) mod 2^64`` of fixed pseudo-random 64-bit weights ``w`` (Lemire and Kaser, "Strongly universal string
hashing is fast", 2014): two different blocks collide with a probability of about 2^-33 at most. Integer sums do not
depend on the order of their terms, so the digest is the same on every device and with every number of threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from splitkit._torch import pytree

BLOCK = 1 << 14
"""Words in a block: 64 KiB, whose products fit the second-level cache of a core."""

AT_ONCE = {"cpu": 4 * BLOCK}
"""Type of device -> words that are multiplied at once. The fastest of 1, 4 and 16 blocks on a CPU: 3.3 GB/s a core."""

MANY = 1 << 24
"""Words that are multiplied at once on other devices, for which few and large kernels are faster."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a digest of the elements of a tensor in their order, as an ``int64`` without dimensions on its device.

    Shape, dtype and strides do not count. A tensor on ``meta`` has no elements.
    """
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)
    words = _words(tensor.detach())
    weights = _weights(words.device)
    while words.numel() > BLOCK:
        words = _block_sums(words, weights).view(torch.int32)
    return (words * weights[: words.numel()]).sum()


def form_of(value: Any) -> str:
    """Describe a value except for the elements of its tensors: ``"int64[8, 5]"``, or the value if it is plain."""
    leaves = pytree.tree_leaves(value)
    forms = ", ".join(map(_form, leaves))
    return forms if len(leaves) == 1 and leaves[0] is value else f"{type(value).__qualname__} of {forms}"


def leaf_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a value, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def digest_of_text(text: str) -> int:
    """Return a digest of a text as an ``int64`` other than 0."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), signed=True) | 1


def digest_of_tensors(tensors: Sequence[torch.Tensor]) -> int:
    """Return a digest of the elements of several tensors as an ``int64`` other than 0. It waits once for a device."""
    if not tensors:
        return 1
    found = [content_of(tensor) for tensor in tensors]
    if len(found) > 1:
        found = [content_of(torch.stack([each.to(found[0].device) for each in found]))]
    return int(found[0]) | 1


def _form(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf) if isinstance(leaf, _PLAIN) else f"a {type(leaf).__qualname__}"


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of a tensor as ``int32``, ``[words]``; the last word may be filled up with zeros."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if flat.numel() % 4:
        return torch.cat([flat, flat.new_zeros(-flat.numel() % 4)]).view(torch.int32)
    return (flat if flat.storage_offset() % 4 == 0 else flat.clone()).view(torch.int32)


def _block_sums(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each block, ``[blocks]``."""
    whole = words.numel() // BLOCK * BLOCK
    rows = AT_ONCE.get(words.device.type, MANY) // BLOCK
    sums = [(blocks * weights).sum(1) for blocks in torch.split(words[:whole].view(-1, BLOCK), rows)]
    rest = words[whole:]
    return torch.cat([*sums, (rest * weights[: rest.numel()]).sum().view(1)])


@cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return `BLOCK` fixed pseudo-random numbers of 64 bits: SplitMix64 (Steele, Lea and Flood 2014)."""
    mask = (1 << 64) - 1
    found = list[int]()
    for i in range(1, BLOCK + 1):
        z = i * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z ^= z >> 31
        found.append(z - (z >> 63 << 64))
    return torch.tensor(found, dtype=torch.int64, device=device)
