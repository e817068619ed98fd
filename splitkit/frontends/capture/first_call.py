"""Capture models that change at their first call: they hook submodules, or create buffers and parameters.

Tracing such a model traces the changes too, and fails. The model is then called once for real, and traced again.
"""

from __future__ import annotations

import copy
import random
import sysconfig
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from splitkit._torch import FakeTensor, pytree
from splitkit.errors import SplitError, listed
from splitkit.frontends.input_copies import copy_inputs
from splitkit.frontends.module_state import buffers_kept

Captured = TypeVar("Captured")


@contextmanager
def undone(restorers: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Call functions at the end of the block."""
    try:
        yield
    finally:
        for restore in restorers:
            restore()


def attributes_restored(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the attributes, hooks and children of all modules afterwards: tracing leaves fake tensors in them.

    What forward hooks of the user can reach is restored as well.
    """
    return undone([*map(restorer, _contents(model)), *_of_hooks(model)])


def tables_restored(model: nn.Module) -> AbstractContextManager[None]:
    """Put back afterwards what was rebound in the dicts of parameters and buffers of all modules.

    Those of TorchScript's modules only mirror state in C++, and are left alone.
    """
    own = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    return undone([restorer(table) for module in own for table in (module._parameters, module._buffers)])


def retry_after_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], capture: Callable[[], Captured]
) -> Captured:
    """Return ``capture()``; if it fails and a call of the model changes the model, try once more after that call."""
    try:
        with attributes_restored(model):
            return capture()
    except Exception as error:
        lost = isinstance(error, SplitError) and error.code == "SK410"  # a call would really do what was refused
        if lost or not _is_changed_by_a_call(model, args, kwargs):
            raise
    with attributes_restored(model):
        return capture()


def parameters_and_names(model: nn.Module) -> tuple[list[int], list[str]]:
    """Return ids of parameters and names of buffers, which stay the same where a run rebinds a buffer."""
    return [id(p) for p in model.parameters()], [name for name, _ in model.named_buffers()]


def are_real(model: nn.Module, inputs: Any) -> bool:
    """Return whether the model can run for real: no tensor is fake or on the meta device."""
    held = [value for module in model.modules() for value in vars(module).values()]
    tensors = [*model.parameters(), *model.buffers(), *held, *pytree.tree_leaves(inputs)]
    return not any(isinstance(t, FakeTensor) or (isinstance(t, torch.Tensor) and t.is_meta) for t in tensors)


def _is_changed_by_a_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if not are_real(model, (args, kwargs)):
        return False
    # Compare identities before and after one call: a new buffer, hook or child is a change, a new value is not.
    held, sizes = [(now, copy.copy(now)) for now in _contents(model)], _sizes(model)
    with buffers_kept(model, sizes=False):
        try:
            call_once(model, args, kwargs)
        except Exception:  # any error: that of the capture says more
            return False
    return sizes != _sizes(model) or not all(is_same(now, before) for now, before in held)


def _sizes(model: nn.Module) -> list[tuple[object, ...]]:
    """Return shapes and dtypes of the buffers: a first call may resize them in place."""
    return [(tuple(b.shape), b.dtype) for b in model.buffers() if not is_lazy(b)]


def call_once(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the model's output for copies of the inputs, and restore the RNG states of torch, NumPy and Python."""
    inputs, named = copy_inputs((args, dict(kwargs)))
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            return model(*inputs, **named)
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def outputs_of_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the model's output for copies of the inputs; its state and the RNG states are restored."""
    with attributes_restored(model), buffers_kept(model), torch.enable_grad():
        return call_once(model, args, kwargs)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and restore the mode of each module afterwards."""
    with undone([partial(setattr, module, "training", module.training) for module in model.modules()]):
        model.eval()
        yield


def _contents(model: nn.Module) -> list[Any]:
    """Return the attribute dicts of all modules and the plain containers in them."""
    return [held for m in model.modules() for held in (vars(m), *vars(m).values()) if type(held) in CONTAINERS]


# Warn of a user's forward hooks, and restore what they write to: tracing runs them, and leaves fake tensors there.
#
# Nothing tells in advance whether a hook only reads, and the ops of one that does not belong to the graph. So each
# hook runs once, and what can be reached from it is restored: lists and dicts, attributes of objects, variables of
# functions.


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


def hook_state_restored(model: nn.Module) -> AbstractContextManager[None]:
    """Restore afterwards all that a user's forward hooks can reach, without the modules of the model."""
    return undone(_of_hooks(model))


def _of_hooks(model: nn.Module) -> list[Callable[[], None]]:
    seen: dict[int, Any] = {id(module): module for module in model.modules()}
    level = [hook for module in model.modules() for hook in _hooks_of_user(module)]
    restorers: list[Callable[[], None]] = []
    for _ in range(_DEPTH):
        new = {id(value): value for value in level if not isinstance(value, _ATOMS) and id(value) not in seen}
        seen |= new  # keeps them alive, so that no id is used again
        restorers += [restorer(value) for value in new.values() if type(value) in CONTAINERS]
        restorers += [r for value in new.values() if isinstance(value, FunctionType) for r in _of_variables(value)]
        level = [inner for value in new.values() for inner in _held(value)]
    return restorers


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
        return [*named, *map(closure_value, value.__closure__ or ()), *(value.__defaults__ or ())]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    inside = [vars(value)] if type(getattr(value, "__dict__", None)) is dict else []
    if isinstance(value, dict):
        return [*value.values(), *inside]
    return [*value, *inside] if isinstance(value, (list, tuple, set, frozenset, deque)) else inside


def _of_variables(function: FunctionType) -> Iterator[Callable[[], None]]:
    for cell in function.__closure__ or ():
        if (before := closure_value(cell)) is not _UNSET:
            yield partial(setattr, cell, "cell_contents", before)
    names = function.__globals__
    for name in _global_names(function):
        yield partial(names.__setitem__, name, names[name]) if name in names else partial(names.pop, name, None)


def _global_names(function: FunctionType) -> set[str]:
    """Return the globals that a function of the user names; the code of packages is not the user's state."""
    file = Path(function.__code__.co_filename)
    if "site-packages" in file.parts or "dist-packages" in file.parts or file.is_relative_to(_STDLIB):
        return set()
    codes: list[CodeType] = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return {name for code in codes for name in code.co_names}


def closure_value(cell: CellType) -> Any:
    """Return what a variable of a closure holds; a plain object if it holds nothing."""
    try:
        return cell.cell_contents
    except ValueError:
        return _UNSET
