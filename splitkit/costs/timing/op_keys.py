"""Make the keys of measured ops: a line of text with everything that changes how long an op takes.

::

    aten.linear.default(float32[2,16,64], float32[192,64], float32[192]) under autocast cpu bfloat16
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import HigherOrderOperator, OpOverload, OpOverloadPacket, pytree

_OPERATORS = (OpOverload, OpOverloadPacket, HigherOrderOperator)
_NAMED = (*_OPERATORS, FunctionType, BuiltinFunctionType, MethodDescriptorType, type)
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format, torch.device)
_TENSOR_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)


def key_of(node: Node, callee: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return the key of a call under the current ambient state (autocast, deterministic algorithms, inference mode).

    Args:
        node: the node.
        callee: the op, function or module that it calls, or the name of a method.
        args: its positional arguments, with real tensors.
        kwargs: its keyword arguments.
    """
    given = [*map(_text, args), *(f"{name}={_text(value)}" for name, value in kwargs.items())]
    modes = "".join(f" under {mode}" for mode in _modes())
    return f"{_name(node, callee)}({', '.join(given)}){modes}"


def is_lasting(key: str) -> bool:
    """Whether a key means the same op in another process; keys of lambdas, local functions and scripts do not."""
    return "<" not in key and "__main__" not in key


def _modes() -> Iterable[str]:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            yield f"autocast {device} {_dtype(torch.get_autocast_dtype(device))}"
    if torch.are_deterministic_algorithms_enabled():
        yield "deterministic algorithms"
    if torch.is_inference_mode_enabled():
        yield "inference mode"


def _name(node: Node, callee: Any) -> str:
    if isinstance(callee, nn.Module):
        return _module(callee)
    if isinstance(callee, str):
        return f"Tensor.{callee}"
    name = _torch.target_name(node)
    return _own(name, callee) if isinstance(callee, _NAMED) else f"{name}<{id(callee)}>"


def _own(name: str, value: object) -> str:
    """Return a name, with the id of the object if other objects may have the same name."""
    return name if is_lasting(name) else f"{name}<{id(value)}>"


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, nn.Module):
        return _module(value)
    if isinstance(value, _NAMED):
        name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value)}"
        return str(value) if isinstance(value, _OPERATORS) else _own(name, value)
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_text, value))}]"
    if isinstance(value, slice):
        return f"slice({_text(value.start)}, {_text(value.stop)}, {_text(value.step)})"
    leaves, spec = pytree.tree_flatten(value)
    if leaves == [value]:
        return type(value).__qualname__
    return f"{type(value).__qualname__}{[_text(leaf) for leaf in leaves]}#{_digest([str(spec)])}"


def _tensor(tensor: torch.Tensor) -> str:
    """Return a text of a tensor: type, sizes, strides unless contiguous, pending conj and neg, device unless CPU."""
    text = f"{_dtype(tensor.dtype)}[{_sizes(tensor.shape)}"
    if tensor.layout != torch.strided or tensor.is_nested:
        text += f"|{tensor.layout}"
    elif not tensor.is_contiguous():
        text += f"|{_sizes(tensor.stride())}"
    text += "]"
    text += ".conj" * tensor.is_conj() + ".neg" * tensor.is_neg()  # ops that read it resolve these
    text += "" if tensor.device.type == "cpu" else f"@{tensor.device.type}"
    return text if type(tensor) in _TENSOR_TYPES else f"{type(tensor).__qualname__}:{text}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(sizes: Iterable[Any]) -> str:
    return ",".join(map(str, sizes))


def _module(module: nn.Module) -> str:
    """Return the class of a module and a digest of its settings, submodules and tensors."""
    parts = [*_parts(module)]
    if isinstance(module, fx.GraphModule):
        return f"graph#{_digest(parts)}"
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return f"{name}#{_digest(parts)}" if all(map(is_lasting, (name, *parts))) else f"{name}<{id(module)}>"


def _parts(module: nn.Module) -> Iterable[str]:
    for path, part in module.named_modules():
        if isinstance(part, fx.GraphModule):  # its code describes it completely
            yield f"{path} {_digest([part.code])} {part.training}"
            continue
        own = [f"{name}={_setting(value)}" for name, value in vars(part).items() if name not in _MACHINERY]
        yield f"{path} {type(part).__qualname__} {sorted(own)}"
    for path, tensor in [*module.named_parameters(), *module.named_buffers()]:
        yield f"{path} {_tensor(tensor)}"


_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every module: hooks, and parameters and submodules, which `_parts` describes."""


def _setting(value: Any) -> str:
    """Return a text of an attribute of a module (size, switch, activation); of other objects only the class."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_setting, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_setting(k)}: {_setting(v)}' for k, v in value.items())}}}"
    return _text(value) if isinstance(value, (torch.Tensor, *_PLAIN, *_NAMED)) else type(value).__qualname__


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
