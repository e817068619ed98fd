"""Runs a model on ``meta`` and records, for each block, the most bytes alive while it runs beside what is held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from splitkit._gc import paused_collector
from splitkit._torch import pytree
from splitkit.costs import Device
from splitkit.memory.kernels.target_kernels import attention
from splitkit.memory.storage_watch import StorageWatch
from splitkit.studies.fit.blocks import ModelBlock


class LikeOnGpu(TorchFunctionMode):
    """Lets a run on ``meta`` take what it takes on a GPU, with plain inputs.

    Attention runs the kernel of a GPU. Products of groups (of experts) are computed in any floating dtype. Questions
    that only values could answer, such as whether a mask is full or a value is infinite, have the usual answer: what
    is asked of all values holds, and what is asked of any does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[int, tuple[Tensor, bool]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return attention(Device.kernels, func, *args, **kwargs)
        if getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm"):
            return _GroupedProduct.apply(*args[:2])  # type: ignore[no-untyped-call]
        if func is Tensor.__bool__ and id(args[0]) in self._answers:
            return self._answers[id(args[0])][1]
        result = func(*args, **kwargs)
        if func in _QUESTIONS and isinstance(result, Tensor) and result.ndim == 0:
            self._answers[id(result)] = result, _QUESTIONS[func]
        return result


_QUESTIONS: dict[Any, bool] = {Tensor.all: True, torch.all: True, Tensor.any: False, torch.any: False}


class _GroupedProduct(torch.autograd.Function):
    """Makes and saves what a product of groups of rows with a matrix each does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        """Return the result, a row for each row."""
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients of rows and matrices."""
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors)


class BlockWatch:
    """A run on ``meta`` whose ops belong to blocks.

    Attributes:
        marks: index of the first op -> number of the block that runs from there on, in the order of time.
        order: the blocks that were called, by their first call.
    """

    def __init__(self, blocks: Sequence[ModelBlock]) -> None:
        self.blocks = blocks
        self.marks: list[tuple[int, int]] = []
        self.order: list[int] = []
        self._watch = StorageWatch()

    @property
    def current(self) -> int:
        """The block that runs; before the first one starts, that one."""
        return self.marks[-1][1] if self.marks else 0

    def enter(self, number: int) -> None:
        """Let the next ops belong to a block."""
        self.marks.append((len(self._watch.ops), number))
        if number not in self.order:
            self.order.append(number)

    def hold(self, name: str, tensors: Any) -> None:
        """Count memory that is alive before the run under a name; the tensors themselves are not kept."""
        for tensor in pytree.tree_leaves(tensors):
            self._watch.see(tensor, name)

    def run(self, work: Callable[[], Any]) -> Any:
        """Run a function under the watch, and return its result."""
        with ExitStack() as stack:
            for number, block in enumerate(self.blocks):
                stack.callback(block.module.register_forward_pre_hook(self._entered(number)).remove)
            stack.enter_context(paused_collector())
            stack.enter_context(self._watch.watching())
            return work()

    def _entered(self, number: int) -> Callable[[nn.Module, Any], None]:
        return lambda module, inputs: self.enter(number)

    def alive(self, *without: str) -> list[int]:
        """Return the bytes alive after each op, without what was held under these names."""
        steps = len(self._watch.ops)
        change = [0] * (steps + 1)
        for life in self._watch.lives:
            if life.made not in without:
                change[min(max(life.born, 0), steps)] += life.nbytes
                change[min(life.died, steps)] -= life.nbytes
        return list(accumulate(change))[:steps]

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield (block, first op, end) of each stretch of ops; what runs before the first block belongs to it."""
        starts = [0, *(start for start, _ in self.marks[1:])] if self.marks else [0]
        ends = [*starts[1:], len(self._watch.ops)]
        numbers = [number for _, number in self.marks] or [0]
        yield from zip(numbers, starts, ends, strict=True)


@contextmanager
def on_meta() -> Iterator[None]:
    """Make new tensors on ``meta``, and run as on a GPU with plain inputs."""
    with torch.device("meta"), LikeOnGpu():
        yield
