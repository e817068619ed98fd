"""The ``apply`` of every ``torch.autograd.Function`` replaced for a while, also where it was bound before.

``relu = Relu.apply``, as PyTorch's tutorials write it, goes past a patch of ``Function.apply``. Where that is Python
(2.11, 2.13) it goes on to the base class, which is patched too; where it is C (2.15) only its call of ``forward`` can
be seen, and such a call is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._ops import _get_dispatch_mode_pre_dispatch  # 2.11, 2.13, 2.15
from torch.autograd.function import Function

from splitkit._torch import pytree

_BASE: Any = Function.__mro__[1]  # _SingleLevelFunction: 2.11, 2.13, 2.15


@contextmanager
def in_place_of_apply(apply: Callable[..., Any], refuse: Callable[[type[Function]], None]) -> Iterator[None]:
    """Within, ``apply(function, run, ...)`` is called for each ``function.apply(...)``; ``run`` is what it was.

    Args:
        apply: what to call.
        refuse: raises for a Function that is traced without being asked for.
    """
    original = Function.__dict__["apply"]
    open_calls = [0]

    def of_function(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        open_calls[0] += 1
        try:
            return apply(function, original.__get__(None, function), *args, **kwargs)
        finally:
            open_calls[0] -= 1

    def of_base(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        return apply(function, super(_BASE, function).apply, *args, **kwargs)

    def of_forward(function: type[Function], forward: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            if not open_calls[0] and _is_traced((args, kwargs)):
                refuse(function)
            return forward(*args, **kwargs)

        return seen

    with ExitStack() as patches:
        patches.enter_context(patch.object(Function, "apply", classmethod(of_function)))
        if isinstance(original, classmethod):
            patches.enter_context(patch.object(_BASE, "apply", classmethod(of_base)))
        else:
            for function in _all_under(Function):
                if isinstance(forward := vars(function).get("forward"), staticmethod):
                    seen = staticmethod(of_forward(function, forward.__func__))
                    patches.enter_context(patch.object(function, "forward", seen))
        yield


def _all_under(cls: Any) -> Iterator[Any]:
    below: Any
    for below in cls.__subclasses__():
        yield below
        yield from _all_under(below)


def _is_traced(inputs: Any) -> bool:
    # a proxy, or torch.export at work: 2.11, 2.13, 2.15
    by_export = _get_dispatch_mode_pre_dispatch(torch._C._TorchDispatchModeKey.PROXY) is not None  # type: ignore[no-untyped-call]
    return by_export or any(isinstance(leaf, fx.Proxy) for leaf in pytree.tree_leaves(inputs))
