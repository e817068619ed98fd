"""Find what opaque Python code may reach, and which attributes of the graph it may bind anew.

A node that splitkit does not know may do ``self.state = self.state + x``. What ``get_attr`` yields then depends on when
it runs. So the engine keeps the place of such a ``get_attr`` among the opaque nodes, and parts that use the same module
share the whole module::

    a = get_attr[leaf.state]      before `leaf`: the old tensor
    y = leaf(x)                   binds leaf.state anew
    b = get_attr[leaf.state]      after `leaf`: the new tensor

Opaque code is read, never run: `reach_of` walks over its bytecode and over the objects that it holds (attributes,
closures, defaults, the globals that it names), like a garbage collector over references::

    def f(x):                     reaches `cache`, a module whose buffer it may replace
        cache.state = x
        return helper(x)          the code of `helper` is read as well

Code that calls something that cannot be found, imports a module that is not loaded, or evaluates text is assumed to
change everything. Inputs of the graph are assumed to hold none of its modules.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
import weakref
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, cast

import numpy as np
import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit.graph.ops import Effects
from splitkit.graph.ops.functions import is_ambient, says_ambient
from splitkit.graph.storages import attribute


@dataclass(frozen=True)
class Bindings:
    """The attributes of a graph that opaque code may bind anew.

    Attributes:
        reads: ``get_attr`` node that may yield something else later -> the opaque nodes just before and after it.
        calls: the ``call_module`` nodes that may call something else later.
        opaque: the opaque nodes, in graph order.
        whole: the names of the modules that parts share as objects, so that they see new bindings.
        of_root: an opaque node that may bind attributes of the graph module itself. Each part is a graph module of its
            own, so such a node cannot be split.
    """

    reads: Mapping[Node, tuple[Node | None, Node | None]] = field(default_factory=dict)
    calls: frozenset[Node] = frozenset()
    opaque: tuple[Node, ...] = ()
    whole: frozenset[str] = frozenset()
    of_root: Node | None = None


NO_BINDINGS = Bindings()


def bindings_of(effects: Mapping[Node, Effects], root: nn.Module) -> tuple[Mapping[Node, Effects], Bindings]:
    """Return the effects, not ambient where opaque code cannot set the ambient state, and the bindings."""
    opaque = [n for n, e in effects.items() if not e.known]
    if not opaque:
        return effects, NO_BINDINGS
    reaches = _reaches(opaque, root)
    settled = {n: replace(effects[n], ambient=False) for n in opaque if not reaches[n].sets_state}
    return {**effects, **settled}, _bindings(effects, root, opaque, reaches)


def _reaches(opaque: Iterable[Node], root: nn.Module) -> dict[Node, Reach]:
    known: dict[tuple[int, ...], Reach] = {}
    read: dict[Any, Any] = {}
    found: dict[Node, Reach] = {}
    for node in opaque:
        given = _code_of(node, root)
        key = tuple(map(id, given))
        if key not in known:
            known[key] = reach_of(list(given), read)
        found[node] = known[key]
        if node.op == "call_method":  # which class defines the method is not known, so its code cannot be read
            found[node] = Reach(known[key].modules, known[key].everything, sets_state=True)
    return found


def _code_of(node: Node, root: nn.Module) -> list[object]:
    """Return what a node calls and its arguments, without tensors and values of other nodes."""
    target = node.target if callable(node.target) else None
    given: list[object] = [attribute(root, str(node.target)) if node.op == "call_module" else target]
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, Node) and argument.op == "get_attr":
            given.append(attribute(root, str(argument.target)))
        elif isinstance(argument, Node) and argument.op == "placeholder":
            given.append(argument.type)
        elif not isinstance(argument, Node):
            given.append(argument)
    return [value for value in given if not isinstance(value, (torch.Tensor, str, int, float, type(None)))]


def _bindings(
    effects: Mapping[Node, Effects], root: nn.Module, opaque: list[Node], reaches: Mapping[Node, Reach]
) -> Bindings:
    called: dict[Node, Any] = {n: attribute(root, str(n.target)) for n in effects if n.op == "call_module"}
    reached = {i for found in reaches.values() for i in found.modules}
    shared = [n for n, found in reaches.items() if found.everything]
    if shared:  # code that may reach any module may reach each module that the graph calls
        reached.update(id(m) for module in called.values() for m in module.modules())
    whole: set[str] = set()
    reads: list[Node] = []
    calls: set[Node] = set()
    for node in effects:
        if node.op not in ("get_attr", "call_module"):
            continue
        value: Any = called[node] if node.op == "call_module" else attribute(root, str(node.target))
        path = _reached_owner(root, str(node.target), reached)
        if path:
            whole.add(path)
        if node.op == "call_module":
            if path is not None or any(id(m) in reached for m in value.modules()):
                calls.add(node)
        elif path is not None and not isinstance(value, nn.Module):
            reads.append(node)
    of_root = next((n for n in opaque if id(root) in reaches[n].modules), None)
    index, around = {node: i for i, node in enumerate(effects)}, [None, *opaque, None]
    places = [index[n] for n in opaque]
    after = {n: bisect_left(places, index[n]) for n in reads}
    return Bindings(
        {n: (around[i], around[i + 1]) for n, i in after.items()},
        frozenset(calls),
        tuple(opaque),
        frozenset(whole),
        of_root,
    )


def _reached_owner(root: nn.Module, target: str, reached: set[int]) -> str | None:
    """Return the name of the outermost owner of an attribute that opaque code reaches, ``""`` for the root."""
    start: Any = root
    names = target.split(".")[:-1]
    owners = accumulate(names, lambda owner, name: getattr(owner, name), initial=start)
    return next((".".join(names[:i]) for i, owner in enumerate(owners) if id(owner) in reached), None)


# ---------------------------------------------------------------- what opaque code reaches


# Objects visited for one piece of code before it is assumed to reach everything: bounds the time of `analyze` on code
# that holds a large data structure. The value was not measured.
_LIMIT = 20_000
_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, np.ndarray, range)
_TRUSTED = frozenset((*sys.stdlib_module_names, "torch", "numpy", "builtins"))
_BUILTIN = (list, dict, set, tuple, str, bytes, int, float, complex, slice, np.ndarray, type, types.FunctionType)
_DYNAMIC = frozenset(("exec", "eval", "compile", "globals", "__import__", "setattr", "delattr"))


def _names_of(classes: Iterable[type]) -> frozenset[str]:
    return frozenset(name for known in classes for name in dir(known))


_KNOWN_NAMES = _names_of((*_BUILTIN, torch.Tensor, nn.Module, torch.Size, torch.dtype, torch.device, types.ModuleType))


@dataclass
class Reach:
    """What a piece of code may reach.

    Attributes:
        modules: the ids of the modules that it may reach.
        everything: whether it could not be followed, so that it may reach any module.
        sets_state: whether it may change the ambient state.
    """

    modules: set[int] = field(default_factory=set)
    everything: bool = False
    sets_state: bool = False


@dataclass(frozen=True)
class _Code:
    """The names in the bytecode of a function and of the functions nested in it.

    Attributes:
        globals: global names that it loads.
        names: attributes that it loads, and strings that name a change of the ambient state (for ``getattr``).
        imports: modules that it imports.
        stores: whether it assigns to an attribute.
    """

    globals: frozenset[str]
    names: frozenset[str]
    imports: frozenset[str]
    stores: bool


def reach_of(code: object, read: dict[types.CodeType, Any] | None = None) -> Reach:
    """Return what a function, module or other callable may reach when it is called.

    Args:
        code: the callable, or a list of callables and their arguments.
        read: code object -> names in its bytecode, a cache that this call adds to.
    """
    walk = _Walk({} if read is None else read)
    walk.add(code)
    return walk.run()


class _Walk:
    def __init__(self, read: dict[types.CodeType, Any]) -> None:
        self.read = read
        self.found = Reach()
        self.left: list[Any] = []
        self.seen: dict[int, Any] = {}  # id -> object: keeps the object alive, so that no id is reused
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
        if isinstance(value, nn.Module):  # parameters, buffers and submodules are not in the module's __dict__
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
        """Follow the attributes of a Python module that a function loads by name."""
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
