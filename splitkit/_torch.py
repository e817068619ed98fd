"""The private torch names that the core cannot do without, in one place.

Checked on torch 2.11, 2.13 and 2.15; ``tests/test_torch_private.py`` fails when one of them goes away. Capture and
the joint-graph door hold their own.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx, nn
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.utils import _pytree as pytree  # the public torch.utils.pytree lacks paths (2.11)

__all__ = ["pytree"]

# Dynamo and pre-dispatch graphs write these targets for `with` blocks (2.11, 2.13, 2.15).
ENTER_AUTOCAST: Any = torch.amp._enter_autocast  # type: ignore[attr-defined]
EXIT_AUTOCAST: Any = torch.amp._exit_autocast  # type: ignore[attr-defined]
SET_GRAD: Any = torch._C._set_grad_enabled
ENTER_INFERENCE: Any = _enter_inference_mode
EXIT_INFERENCE: Any = _exit_inference_mode
ENTER_RECORD: Any = torch.ops.profiler._record_function_enter_new
EXIT_RECORD: Any = torch.ops.profiler._record_function_exit


def codegen_of(graph: fx.Graph) -> Any:
    """The code generator of a graph: it holds the pytree signature. There is a public setter but no getter."""
    return graph._codegen


def size_hint(value: object) -> int:
    """A plain int for an int or a ``SymInt``: the value seen at capture.

    Raises ``TypeError`` for a symbol that only the data decides (unbacked).
    """
    if isinstance(value, int):
        return value
    node = cast(Any, value).node  # SymInt.node.hint: 2.11, 2.13, 2.15
    if node.hint is None:
        raise TypeError(f"{value} depends on data: it has no size before the model runs")
    return int(node.hint)


def meta_of(module: nn.Module) -> dict[str, Any]:
    """``GraphModule.meta``, which type checkers take for a submodule."""
    return cast(dict[str, Any], getattr(module, "meta", {}))


def target_name(node: fx.Node) -> str:
    """What a node calls: ``aten.linear.default``, ``_operator.getitem``, ``transformer.wte.weight``."""
    target = node.target
    if isinstance(target, str | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", type(target).__name__)
    place = getattr(target, "__module__", None)
    return f"{place}.{name}" if place else str(name)
