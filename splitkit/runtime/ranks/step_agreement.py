"""Compares what the ranks are about to run, by one small collective at the start of every call.

Each rank gives a row of whole numbers, and all ranks get all rows::

              refuses  outputs  weights  batch  kind  number  form  content  target
    rank 0       0        0        1        0     1       3    81..    17..       0
    rank 1       0        1        1        1     1       3    81..    17..    95..

The first four are added up: whether any rank refuses the call, asks for outputs, wants the weights compared, or was
given a batch that can be divided. The others must be the same on all ranks; 0 stands for what a rank is not given,
and matches everything. Only if a rank refuses or a number differs do the ranks exchange texts, from which all of
them raise the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from splitkit._torch import pytree
from splitkit.errors import PipelineError, SplitError
from splitkit.runtime.ranks.faults import Progress, naming_lost_ranks
from splitkit.runtime.ranks.rank_agreement import differs, from_every

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
    """Return `BLOCK` fixed pseudo-random numbers of 64 bits, the same in all versions of numpy."""
    return torch.from_numpy(np.random.PCG64(0).random_raw(BLOCK).view(np.int64)).to(device)


# Digests tensors and other values, so that ranks can compare them without sending them.
#
# The bits of a tensor, as 32-bit words ``x``, are hashed in a tree of blocks, each with the multilinear hash
# ``sum(w[i] * x[i]) mod 2^64`` of fixed pseudo-random 64-bit weights ``w`` (Lemire and Kaser, "Strongly universal
# string hashing is fast", 2014): two different blocks collide with a probability of about 2^-33 at most. Integer sums
# do not depend on the order of their terms, so the digest is the same on every device and with every number of
# threads.


T = TypeVar("T")
Kind = Literal["step", "infer", "step(loss_everywhere=True)"]
_KINDS: tuple[Kind, ...] = ("step", "infer", "step(loss_everywhere=True)")
_FLAGS = 4  # columns of a row that may differ between ranks: refused, outputs, weights, divided
_REFUSAL = [1, *[0] * 9]
_REMEDY = "Make the same calls on every rank, with the same batch: seed the data loaders of all ranks in the same way."


@dataclass(frozen=True)
class PipelineCall:
    """A call of a rank, as it is compared with the calls of other ranks.

    Attributes:
        kind: the method of the pipeline.
        number: how many training steps have begun before it.
        inputs: input of the graph -> its value for the whole batch; empty if this rank is not given the batch.
        targets: the target of the loss, under a name for messages; empty if this rank is not given it.
        outputs: whether this rank asks for the outputs. Ranks may differ in it.
        weights: whether the weights are to be compared: they were loaded, or trained since. Ranks may differ in it.
        undivided: why this rank cannot tell that it was given a batch; ``None`` if it was. Ranks may differ in it.
    """

    kind: Kind
    number: int
    inputs: Mapping[str, Any]
    targets: Mapping[str, Any] = field(default_factory=dict)
    outputs: bool = False
    weights: bool = False
    undivided: PipelineError | None = None


class StepAgreement:
    """The agreement of the ranks of a group on their calls."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, progress: Progress) -> None:
        self._group, self._progress = group, progress
        self._device = torch.device("cpu") if "cpu:" in dist.get_backend_config(group) else device

    def begin(self, prepare: Callable[[], tuple[PipelineCall, T]]) -> tuple[T, bool, bool]:
        """Prepare a call on every rank, and compare the calls. All ranks must call it; nothing runs unless they agree.

        Args:
            prepare: returns the call, and what else it prepared.

        Returns:
            What else was prepared; whether any rank asks for the outputs, so that all ranks must send them; and whether
            any rank wants the weights compared.

        Raises:
            PipelineError: SK804 on every rank if the calls differ; names the ranks, and the input that differs. The
                call's ``undivided`` on every rank if no rank was given a batch.
            Exception: the error of ``prepare`` on the rank that raised it. The other ranks raise it as a
                `PipelineError` that names the rank, SK805 if it has no code.
        """
        made, failed = _attempt(lambda: _with_row(*prepare()))
        own, call, prepared = made or (_REFUSAL, None, None)
        with naming_lost_ranks(self._progress, "for all ranks to begin the call"):
            rows = self._rows(own)
            refused, outputs, weights, divided = (any(row[i] for row in rows) for i in range(_FLAGS))
            if not refused and _are_same(rows):
                if call is not None and call.undivided is not None and not divided:
                    raise call.undivided
                return cast(T, prepared), outputs, weights
            told = from_every((_told(failed), _described(call)), self._group)
        _raise_first([error for error, _ in told], failed, "refused the call")
        raise _difference([described for _, described in told])

    def together(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` makes on this rank, or raise its error on all ranks, as `begin` does."""
        made, failed = _attempt(make)
        with naming_lost_ranks(self._progress, "for all ranks to prepare their stages"):
            errors = from_every(_told(failed), self._group)
        _raise_first(errors, failed, "could not prepare its stages")
        return made

    def _rows(self, own: Sequence[int]) -> list[list[int]]:
        """Return the row of each rank: the sum of tables in which each rank fills its row only."""
        every = [[0] * len(own) for _ in range(dist.get_world_size(self._group))]
        every[self._progress.rank] = list(own)
        table = torch.tensor(every, dtype=torch.int64, device=self._device)
        dist.all_reduce(table, group=self._group)
        rows: list[list[int]] = table.tolist()
        return rows


def _attempt(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return make(), None
    except Exception as error:
        return None, error


def _with_row(call: PipelineCall, prepared: T) -> tuple[list[int], PipelineCall, T]:
    """Return the row of a call before it."""
    batch = (call.inputs, call.targets)
    forms = [digest_of_text(str(_forms(given))) if given else 0 for given in batch]
    contents = [digest_of_tensors(leaf_tensors(dict(given))) if given else 0 for given in batch]
    flags = [0, call.outputs, call.weights, call.undivided is None]
    row = [*flags, 1 + _KINDS.index(call.kind), 1 + call.number, *forms, *contents]
    return row, call, prepared


def _forms(given: Mapping[str, Any]) -> dict[str, str]:
    return {name: form_of(value) for name, value in given.items()}


def _are_same(rows: Sequence[Sequence[int]]) -> bool:
    """Whether the numbers that are compared are the same in all rows."""
    return all(len(set(column) - {0}) < 2 for column in list(zip(*rows, strict=True))[_FLAGS:])


def _described(call: PipelineCall | None) -> dict[str, object] | None:
    """Return what a call is, in texts and digests: the text for ranks that differ in it -> the value."""
    if call is None:
        return None
    given = {**call.inputs, **call.targets}
    return {
        "{} is called on {}, and {} on {}": call.kind,
        "the number of training steps so far is {} on {}, and {} on {}": call.number,
        **{f"{name} is {{}} on {{}}, and {{}} on {{}}": form for name, form in _forms(given).items()},
        **{
            f"{n} has other values on {{1}} than on {{3}}": digest_of_tensors(leaf_tensors(v)) for n, v in given.items()
        },
    }


def _told(failed: Exception | None) -> SplitError | None:
    """Return an error as other ranks get it."""
    if failed is None or isinstance(failed, SplitError):
        return failed
    return PipelineError("SK805", f"{type(failed).__name__}: {failed}", "Look at the messages of that rank.")


def _raise_first(errors: Sequence[SplitError | None], own: Exception | None, did: str) -> None:
    """Raise the error of this rank, else the first one of another rank, if there is one."""
    if own is not None:
        raise own
    for rank, error in enumerate(errors):
        if error is not None:
            raise PipelineError(error.code, f"rank {rank} {did}: {error.reason}", error.remedy, error.nodes)


def _difference(calls: Sequence[dict[str, object] | None]) -> PipelineError:
    """Return the error that says what differs first, and on which ranks."""
    every = {rank: call for rank, call in enumerate(calls) if call is not None}
    texts = dict.fromkeys(text for call in every.values() for text in call)
    found = (differs({rank: call[t] for rank, call in every.items() if t in call}, t) for t in texts)
    return PipelineError("SK804", next(filter(None, found), "the ranks make different calls"), _REMEDY)
