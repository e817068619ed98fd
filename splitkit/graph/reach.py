"""What opaque Python code can get at: the modules whose attributes it may rebind, and the ambient state.

Opaque code is read, never run: its bytecode, and the objects that it holds (attributes, closures, defaults, the globals
that it names)::

    def f(x):                     reaches `cache`, a module that it may give another buffer
        cache.state = x
        return helper(x)          whose code is read as well

Code that calls what cannot be found, imports, or evaluates text is taken to change everything.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
import weakref
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn

from splitkit import _torch
from splitkit.graph.ops.barriers import is_ambient, says_ambient

_LIMIT = 20_000  # objects that are looked at for one piece of code
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, np.ndarray, range)
_TRUSTED = frozenset((*sys.stdlib_module_names, "torch", "numpy", "builtins"))
_BUILTIN = (list, dict, set, tuple, str, bytes, int, float, complex, slice, np.ndarray, type, types.FunctionType)
_DYNAMIC = frozenset(("exec", "eval", "compile", "globals", "__import__", "setattr", "delattr"))


def _names_of(classes: Iterable[type]) -> frozenset[str]:
    return frozenset(name for known in classes for name in dir(known))


_KNOWN_NAMES = _names_of((*_BUILTIN, torch.Tensor, nn.Module, torch.Size, torch.dtype, torch.device, types.ModuleType))


@dataclass
class Reach:
    """What a piece of code can get at.

    Attributes:
        modules: the identities of the modules among it.
        everything: it could not be followed, and may reach any module.
        sets_state: it may change the ambient state.
    """

    modules: set[int] = field(default_factory=set)
    everything: bool = False
    sets_state: bool = False


@dataclass(frozen=True)
class _Code:
    """What the bytecode of a function, and of those inside it, says."""

    globals: frozenset[str]
    names: frozenset[str]
    imports: frozenset[str]
    stores: bool


def reach_of(code: object, read: dict[types.CodeType, Any] | None = None) -> Reach:
    """What a function, module or other callable can get at when it is called.

    Args:
        code: the callable.
        read: what earlier calls have found in bytecode; filled.
    """
    walk = _Walk({} if read is None else read)
    walk.add(code)
    return walk.run()


class _Walk:
    def __init__(self, read: dict[types.CodeType, Any]) -> None:
        self.read = read
        self.found = Reach()
        self.left: list[Any] = []
        self.seen: dict[int, Any] = {}  # keeps what it has seen alive, so that no identity is given twice
        self.names: set[str] = set()
        self.defined: set[str] = set()

    def add(self, *values: Any) -> None:
        for value in values:
            if not isinstance(value, _ATOMS) and id(value) not in self.seen:
                self.seen[id(value)] = value
                self.left.append(value)

    def run(self) -> Reach:
        while self.left and not self.found.everything:
            if len(self.seen) > _LIMIT:
                self.give_up()
            self.visit(self.left.pop())
        unresolved = self.names - self.defined - _KNOWN_NAMES
        if unresolved or any(map(says_ambient, self.names)):
            self.found.sets_state = True
        return self.found

    def give_up(self) -> None:
        self.found.everything = self.found.sets_state = True

    def visit(self, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self.function(value)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self.add(*value)
        elif isinstance(value, Mapping):
            self.add(*value.values())
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            self.method(value)
        elif isinstance(value, functools.partial):
            self.add(value.func, value.args, value.keywords)
        elif isinstance(value, weakref.ReferenceType):
            self.add(value())
        elif isinstance(value, (property, staticmethod, classmethod)):
            self.add(*(getattr(value, part, None) for part in ("fget", "fset", "fdel", "__func__")))
        elif isinstance(value, type):
            self.kind(value)
        elif isinstance(value, types.ModuleType):
            self.defined.update(vars(value))
        elif isinstance(value, fx.Graph):
            self.add(*(n.target for n in value.nodes if n.op == "call_function"))
        else:
            self.instance(value)

    def method(self, value: Any) -> None:
        self.judge(value)
        if isinstance(value, types.MethodType):
            self.add(value.__func__)
        if not isinstance(value.__self__, types.ModuleType):
            self.add(value.__self__)

    def judge(self, value: Any) -> None:
        if isinstance(value, Hashable) and is_ambient(value):
            self.found.sets_state = True

    def kind(self, value: type) -> None:
        for one in value.__mro__:
            self.defined.update(vars(one))
            if _root(one.__module__) not in _TRUSTED:
                own = (v for name, v in vars(one).items() if name not in ("__init__", "__new__", "__repr__"))
                self.add(*(v for v in own if isinstance(v, _CODE)))

    def instance(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self.found.modules.add(id(value))
        elif _root(type(value).__module__) in _TRUSTED:
            self.judge(value)
            return
        self.add(type(value))
        held = cast(dict[str, Any], getattr(value, "__dict__", {}))
        self.defined.update(held)
        self.add(*held.values())
        if isinstance(value, nn.Module):  # torch keeps these apart, under the names by which code asks for them
            apart = _torch.attributes_of(value)
            self.defined.update((*apart.modules, *apart.parameters, *apart.buffers))
        for one in type(value).__mro__:
            slots = vars(one).get("__slots__", ())
            self.add(*(getattr(value, name, None) for name in ((slots,) if isinstance(slots, str) else slots)))

    def function(self, value: types.FunctionType) -> None:
        if _root(value.__globals__.get("__name__", "")) in _TRUSTED:
            self.judge(value)
            self.add(*(_content(cell) for cell in value.__closure__ or ()))
            return
        self.add(value.__defaults__, value.__kwdefaults__, vars(value))
        self.add(*(_content(cell) for cell in value.__closure__ or ()))
        code = self.read.get(value.__code__)
        if code is None:
            code = self.read[value.__code__] = _read(value.__code__)
        self.names |= code.names
        known = {**vars(builtins), **{n: value.__globals__[n] for n in code.globals if n in value.__globals__}}
        named = [known[name] for name in code.globals if name in known]
        if _DYNAMIC & code.globals or not code.imports <= sys.modules.keys():
            self.give_up()
        self.add(*named)
        modules = [v for v in (*named, *map(sys.modules.get, code.imports)) if isinstance(v, types.ModuleType)]
        for module in modules:
            self.of_module(module, code)

    def of_module(self, module: types.ModuleType, code: _Code) -> None:
        """What a function takes from a Python module, by the names that it says."""
        self.defined.update(vars(module))
        of_torch = _root(module.__name__) == "torch"
        if of_torch and code.stores and not _SWITCHES.isdisjoint((*module.__name__.split("."), *code.names)):
            self.found.sets_state = True  # torch.backends.cudnn.deterministic = True
        for name in code.names & vars(module).keys():
            value = vars(module)[name]
            if isinstance(value, types.ModuleType):
                if id(value) not in self.seen:
                    self.seen[id(value)] = value
                    self.of_module(value, code)
            elif _root(module.__name__) not in _TRUSTED or callable(value):
                self.add(value)


_CODE = (types.FunctionType, property, staticmethod, classmethod, functools.cached_property, functools.partial)


_SWITCHES = frozenset(("backends", "config", "_C"))  # where torch keeps flags that code may assign to


def _root(module: object) -> str:
    return str(module).split(".")[0]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _read(code: types.CodeType) -> _Code:
    globals_, names, imports, stores = set[str](), set[str](), set[str](), False
    for inner in _nested(code):
        for step in dis.get_instructions(inner):
            name = step.argval
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                globals_.add(name)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
                names.add(name)
            elif step.opname == "IMPORT_NAME":
                imports.add(name)
            elif step.opname == "STORE_ATTR":
                stores = True
    consts = (c for inner in _nested(code) for c in inner.co_consts)
    names.update(c for c in consts if isinstance(c, str) and c.isidentifier() and says_ambient(c))
    return _Code(frozenset(globals_), frozenset(names), frozenset(imports), stores)


def _nested(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
