"""The check by which a graph refuses a call that passes an object where its parts rely on a tensor.

The check is a node of the graph, like the check of memory in `splitkit.graph.input_overlap`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, List, cast  # noqa: UP035

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from splitkit._torch import pytree
from splitkit.errors import PlanError

_PLAIN = (
    *(Tensor, torch.SymInt, torch.SymFloat, torch.SymBool, int, float, complex, bool, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, np.generic, slice, range),
)


def refuse_objects(given: List[Tensor], table: str) -> None:  # noqa: UP006
    """Refuse a call that passes an object, or an array, as an input that was assumed to be a tensor.

    The annotations are for TorchScript, whose inputs are tensors. Elsewhere ``given`` may hold any inputs.

    Args:
        given: the inputs to check.
        table: as JSON, for each input its name and the values in it that were assumed to be tensors: the attributes and
            items that lead there, the node that relies on it, and whether an array is refused too.

    Raises:
        PlanError: SK219.
    """
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        pass
    else:
        _refuse_objects(given, table)


torch.fx.node.has_side_effect(refuse_objects)


def _refuse_objects(given: Sequence[Any], table: str) -> None:
    if not torch.compiler.is_compiling() and has_torch_function(given):
        handle_torch_function(cast(Any, refuse_objects), given, given, table)
        return
    if all(isinstance(value, Tensor) for value in given):
        return
    for value, (name, assumed) in zip(given, json.loads(table), strict=True):
        for path, by, no_array in assumed:
            for leaf in pytree.tree_leaves(_read(value, path)):
                if not isinstance(leaf, _PLAIN) and (no_array or not isinstance(leaf, np.ndarray)):
                    raise _refused(name, path, leaf, by)


def _read(value: Any, path: Sequence[tuple[bool, int | str]]) -> Any:
    """Return the value at a path, or a tensor on the way to it.

    The result is ``None`` if the path does not exist; the graph itself then says what is missing.
    """
    for is_attribute, key in path:
        if isinstance(value, Tensor):
            return value
        try:
            value = getattr(value, str(key)) if is_attribute else value[key]
        except (AttributeError, LookupError, TypeError):
            return None
    return value


def _refused(name: str, path: Sequence[tuple[bool, int | str]], leaf: object, by: str) -> PlanError:
    where = name + "".join(f".{key}" if is_attribute else f"[{key!r}]" for is_attribute, key in path)
    return PlanError(
        "SK219",
        f"{where} is a {type(leaf).__name__} in this call, but {by} was split as if it were a tensor, "
        "and on another object it may do anything",
        f"Annotate the input in forward ({name}: {type(leaf).__name__}), so that the graph knows it, and split again. "
        "splitkit.split(..., check_inputs=False) leaves this check out.",
        [by],
    )
