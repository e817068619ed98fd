"""Warn of a user's forward hooks, and restore what they write to: tracing runs them, and leaves fake tensors there.

Nothing tells in advance whether a hook only reads, and the ops of one that does not belong to the graph. So each hook
runs once, and what can be reached from it is restored: lists and dicts, attributes of objects, variables of functions.
"""

from __future__ import annotations

import copy
import sysconfig
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import fx, nn

from splitkit.errors import listed

CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)
"""The types of which `restorer` restores what they hold."""
_ATOMS = (torch.Tensor, ModuleType, type, str, bytes, int, float, complex, type(None))
_DEPTH = 6  # how far from a hook is searched: a bound method that appends to a list in a dict of its object needs 4
_STDLIB = Path(sysconfig.get_path("stdlib"))
_UNSET = object()


# Libraries whose forward hooks compute something (weight_norm) or move tensors: that is captured with the model.
_LIBRARIES = ("torch", "accelerate", "transformers", "peft", "diffusers", "splitkit")


def warn_of_forward_hooks(model: nn.Module, how: str) -> None:
    """Warn of a user's forward hooks that run once, on tensors without data: no graph calls them."""
    tracer = fx.Tracer()  # which does not trace into modules of torch: a node calls them, with their hooks
    hooked = {
        name: type(module).__name__
        for name, module in model.named_modules()
        if any(_hooks_of_user(module)) and not (how == "symbolic_trace" and tracer.is_leaf_module(module, name))
    }
    if hooked:
        name, named = next(iter(hooked)), [f"{name or 'the model'} ({kind})" for name, kind in hooked.items()]
        warnings.warn(
            f"forward hooks of {listed(named, 4)} run once, during the capture, on tensors without data: the graph "
            "keeps the ops that they run, and what they store is removed again. A hook that stores outputs is set on "
            "the split, which calls it with the output alone: "
            f"split.register_forward_hook({name!r}, lambda output: ...).",
            stacklevel=3,
        )


def is_of_user(hook: Any) -> bool:
    """Return whether a forward hook is of none of the libraries whose hooks compute what the model needs."""
    while isinstance(hook, partial):
        hook = hook.func
    known = hook if hasattr(hook, "__qualname__") else type(hook)
    return str(getattr(known, "__module__", "")).split(".")[0] not in _LIBRARIES


def _hooks_of_user(module: nn.Module) -> Iterator[Any]:
    tables = ("_forward_hooks", "_forward_pre_hooks")  # 2.11, 2.13, 2.15
    return filter(is_of_user, (hook for table in tables for hook in getattr(module, table, {}).values()))


@contextmanager
def hook_state_restored(model: nn.Module) -> Iterator[None]:
    """Restore afterwards all that a user's forward hooks can reach, without the modules of the model."""
    seen: dict[int, Any] = {id(module): module for module in model.modules()}
    level, restorers = [hook for module in model.modules() for hook in _hooks_of_user(module)], []
    for _ in range(_DEPTH):
        new = {id(value): value for value in level if not isinstance(value, _ATOMS) and id(value) not in seen}
        seen |= new  # keeps them alive, so that no id is used again
        restorers += [restorer(value) for value in new.values() if type(value) in CONTAINERS]
        restorers += [r for value in new.values() if isinstance(value, FunctionType) for r in _of_variables(value)]
        level = [inner for value in new.values() for inner in _held(value)]
    try:
        yield
    finally:
        for restore in restorers:
            restore()


def restorer(held: Any) -> Callable[[], None]:
    """Return a function that lets a list, set, deque or dict hold again what it holds now."""
    before = copy.copy(held)

    def restore() -> None:
        if not is_same(held, before):
            held.clear()
            held.extend(before) if isinstance(held, (list, deque)) else held.update(before)

    return restore


def is_same(now: Any, before: Any) -> bool:
    """Return whether two containers hold the same objects in the same order."""
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all((a is b or a == b) and now[a] is before[b] for a, b in zip(now, before, strict=True))
    return all(a is b for a, b in zip(now, before, strict=True))


def _held(value: Any) -> list[Any]:
    """Return what an object refers to, as far as code that is given the object may write to it."""
    if isinstance(value, FunctionType):
        named = [value.__globals__.get(name) for name in _global_names(value)]
        return [*named, *map(_content, value.__closure__ or ()), *(value.__defaults__ or ())]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    inside = [vars(value)] if type(getattr(value, "__dict__", None)) is dict else []
    if isinstance(value, dict):
        return [*value.values(), *inside]
    return [*value, *inside] if isinstance(value, (list, tuple, set, frozenset, deque)) else inside


def _of_variables(function: FunctionType) -> Iterator[Callable[[], None]]:
    names = function.__globals__
    for cell in function.__closure__ or ():
        yield partial(_reset_cell, cell, _content(cell))
    for name in _global_names(function):
        yield partial(_reset_global, names, name, names.get(name, _UNSET))


def _reset_cell(cell: CellType, before: Any) -> None:
    if before is not _UNSET:
        cell.cell_contents = before


def _reset_global(names: dict[str, Any], name: str, before: Any) -> None:
    if before is not _UNSET:
        names[name] = before
    else:
        names.pop(name, None)


def _global_names(function: FunctionType) -> set[str]:
    """Return the globals that a function of the user names; the code of packages is not the user's state."""
    file = Path(function.__code__.co_filename)
    if "site-packages" in file.parts or "dist-packages" in file.parts or file.is_relative_to(_STDLIB):
        return set()
    codes: list[CodeType] = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {name for code in codes for name in code.co_names}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _UNSET
