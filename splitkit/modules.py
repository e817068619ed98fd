"""Parts as modules: GraphModules that cost little to call, with their code made at once or on the first call."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from splitkit import _torch

_MODULE_CALL = nn.Module.__call__
_FORWARD, _FORWARD_PRE, _BACKWARD, _BACKWARD_PRE = _torch.HOOKS_OF_ALL_MODULES


def call_part(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``nn.Module.__call__`` with its test for hooks in front, instead of behind five other calls.

    What a GraphModule adds to it, a print of the line of the graph where an error arose, its parent does as well.
    """
    if (
        self._forward_hooks
        or self._forward_pre_hooks
        or self._backward_hooks
        or self._backward_pre_hooks
        or _FORWARD
        or _FORWARD_PRE
        or _BACKWARD
        or _BACKWARD_PRE
        or self._compiled_call_impl is not None
        or nn.Module.__call__ is not _MODULE_CALL  # fx traces by replacing it
    ):
        return nn.Module.__call__(self, *args, **kwargs)
    return self.forward(*args, **kwargs)


class EagerPart(fx.GraphModule):
    """A part whose code is made when it is built."""

    def recompile(self) -> Any:
        """Make the code again after the graph was edited."""
        code = super().recompile()
        type(self).__call__ = call_part  # type: ignore[method-assign]  # where GraphModule has put its own
        return code


class LazyPart(_torch.LazyGraphModule):  # type: ignore[misc]
    """A part whose code is made when it is first called."""

    def _real_recompile(self) -> Any:  # 2.11, 2.13, 2.15
        code = super()._real_recompile()
        type(self).__call__ = call_part
        return code
