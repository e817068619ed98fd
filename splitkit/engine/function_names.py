"""Names for the functions that a graph file may call: ops of torch and a short list of others.

A name is looked up; nothing is run for it, and nothing imported but the module that registers transformers' ops.
Functions that are not listed, and ops that access files, are refused.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from splitkit import _torch
from splitkit._torch import HigherOrderOperator, OpOverload, OpOverloadPacket

_OPERATORS = (
    "getitem add sub mul truediv floordiv mod pow neg pos abs and_ or_ xor not_ invert lshift rshift eq ne lt le gt ge "
    "is_ is_not matmul iadd isub imul itruediv ifloordiv imod ipow iand ior ixor"
)
_MATH = "ceil floor trunc sqrt exp log log2 cos sin tan cosh sinh tanh acos asin atan pow"
_SYMBOLIC = "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum"
_STATE: Mapping[str, Any] = MappingProxyType(
    {
        "is_grad_enabled": torch.is_grad_enabled,
        "set_grad_enabled": _torch.SET_GRAD,
        "is_fwd_grad_enabled": _torch.IS_FWD_GRAD,
        "set_fwd_grad_enabled": _torch.SET_FWD_GRAD,
        "enter_autocast": _torch.ENTER_AUTOCAST,
        "exit_autocast": _torch.EXIT_AUTOCAST,
        "enter_inference_mode": _torch.ENTER_INFERENCE,
        "exit_inference_mode": _torch.EXIT_INFERENCE,
        "enter_record_function": _torch.ENTER_RECORD,
        "enter_old_record_function": _torch.ENTER_OLD_RECORD,
        "exit_record_function": _torch.EXIT_RECORD,
        "deterministic": _torch.deterministic,
        "set_deterministic": _torch.SET_DETERMINISTIC,
        "checkpoint": checkpoint,
    }
)
_FILES = "filename"  # the argument by which ops that read or write files are recognised
_NO_NAMESPACES = ("debugprims",)  # one of its ops loads files
_REGISTERED_BY = {"transformers": "transformers.integrations.moe"}
"""Namespace of ops -> the module that registers them; ``import transformers`` alone does not."""


_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {f"operator.{name}": getattr(operator, name) for name in _OPERATORS.split()}
    | {f"math.{name}": getattr(math, name) for name in _MATH.split()}
    | {f"torch.{name}": getattr(torch, name) for name in _SYMBOLIC.split() if hasattr(torch, name)}
    | {f"state.{name}": function for name, function in _STATE.items()}
)
_NAMES: Mapping[int, str] = MappingProxyType({id(function): name for name, function in _FUNCTIONS.items()})


def name_of_function(target: Any) -> str | None:
    """Return the name under which `function_of` finds a function; ``None`` if it has none."""
    if isinstance(target, OpOverload | HigherOrderOperator):
        name = f"op.{target}" if isinstance(target, OpOverload) else f"higher_order.{target}"
        return name if function_of(name) is target else None
    return _NAMES.get(id(target))


def function_of(name: str) -> Any:
    """Return the function of a name; ``None`` if there is none that may be called."""
    kind, _, rest = name.partition(".")
    if kind == "op":
        return _op(rest)
    if kind == "higher_order":
        found = getattr(torch.ops.higher_order, rest, None) if rest.isidentifier() else None
        return found if isinstance(found, HigherOrderOperator) else None
    return _FUNCTIONS.get(name)


def op_schema(target: Any) -> str:
    """Return the schema of an op, which may differ between versions of torch; an empty string for other functions."""
    return str(_torch.schema_of(target)) if isinstance(target, OpOverload) else ""


def _op(name: str) -> OpOverload | None:
    """Return the registered overload of a name such as ``aten.linear.default``."""
    if not re.fullmatch(r"[A-Za-z]\w*(\.\w+){2}", name):
        return None
    space, packet, overload = name.split(".")
    if space in _REGISTERED_BY:
        with suppress(ImportError):
            import_module(_REGISTERED_BY[space])
    found = getattr(getattr(torch.ops, space), packet, None) if space not in _NO_NAMESPACES else None
    if not isinstance(found, OpOverloadPacket):
        return None
    op = getattr(found, overload, None)
    if not isinstance(op, OpOverload) or any(a.name == _FILES for a in _torch.schema_of(op).arguments):
        return None
    return op
