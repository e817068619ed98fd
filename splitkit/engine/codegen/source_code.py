"""Generate the Python code of a graph, byte for byte as fx does, in a third of the time.

``CodeGen._gen_python_code`` (torch/fx/graph.py) computes the name of each target anew, queries its namespace each time
it prints a node, and parses its own text to count lines. This module computes each name once. It leaves rare cases to
fx: other code generators, most type annotations, arguments of unlisted classes. The private fields are those of torch
2.11, 2.13 and 2.15; `is_exact` compares both ways once per process.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import EllipsisType, NoneType
from typing import Any, NamedTuple, cast

import torch
from torch import fx
from torch.fx import Node
from torch.fx import graph as _fx_graph
from torch.fx.node import _get_qualified_name, _type_repr

_GENERATORS = (_fx_graph.CodeGen, _fx_graph._PyTreeCodeGen)
_PRINTED = frozenset(
    (int, float, bool, str, NoneType, EllipsisType, torch.dtype, torch.device, torch.layout, torch.memory_format)
)
"""Classes of arguments that fx prints by ``repr``."""
_CLASSES = (torch.Tensor, torch.nn.Parameter)  # whose metaclass is another than ``type``
_OPTIONS = ("FX_GRAPH_SHOW_STRIDE", "FX_GRAPH_SHOW_DEVICE", "FX_GRAPH_SHOW_META")
_ILLEGAL = _fx_graph._illegal_names


class _Rare(Exception):
    """Raised for a case that is left to fx."""


def python_code(graph: fx.Graph, root_module: str) -> Any | None:
    """Return the result of ``graph.python_code(root_module)``, or ``None`` if it is left to fx."""
    generator = graph._codegen
    plain = type(generator) in _GENERATORS and generator._body_transformer is None
    if not plain or not is_exact() or any(map(os.environ.get, _OPTIONS)):
        return None
    try:
        return _Source(graph, root_module).code()
    except _Rare:
        return None


class _Source:
    """The source of one graph under construction."""

    def __init__(self, graph: fx.Graph, root_module: str) -> None:
        self.nodes = list(graph.nodes)
        self.generator: Any = graph._codegen
        self.globals: dict[str, Any] = {}
        self._namespace = _fx_graph._Namespace()
        self._targets: dict[int, _Call] = {}
        self._types: dict[Any, str] = {None: ""}
        self._paths: dict[str, str] = {"": root_module}
        self._inputs: list[str] = []
        self._writers = {
            "placeholder": self._placeholder,
            "call_function": self._function,
            "call_method": self._method,
            "call_module": self._module,
            "get_attr": self._attribute,
            "output": self._output,
        }

    def code(self) -> Any:
        """Return the code; raise `_Rare` if fx has to generate it."""
        # fx would rename illegal names, keywords and builtins; here every node keeps the name that it has.
        names = {node.name for node in self.nodes}
        legal = all(map(str.isidentifier, names)) and all(map(str.isascii, names))
        if len(names) < len(self.nodes) or not legal or not names.isdisjoint(_ILLEGAL):
            raise _Rare
        for name, (_, value) in _fx_graph._custom_builtins.items():
            self._global(name, value)
        lines, numbers = self._lines()  # fills `globals` and `_inputs`, which the prologue needs
        if not names.isdisjoint(self.globals):  # fx would number one of the two names
            raise _Rare
        ask = self.generator._call_method_with_signature_check
        prologue = ask(self.generator.gen_fn_def, self._inputs, "", expanded_def=False)
        start = prologue.count("\n") + 1
        body = "\n".join([f"    {line}" for line in lines])
        where: dict[int, int | None] = {start + i: number for i, number in enumerate(numbers)}
        source = f"\n\n\n{prologue}\n{body}"
        return _fx_graph.PythonCode(source, self.globals, _lineno_map=where, _prologue_start=4)

    def _lines(self) -> tuple[list[str], list[int]]:
        """Return the lines of the body and the number of each line's node."""
        lines, numbers = [], []
        dying = self._dying()
        writers = self._writers
        for number, node in enumerate(self.nodes):
            if node.type is not None:
                self._learn_type(node)
            line = writers[node.op](node)
            if line is not None:
                lines.append(line + dying.get(node, "") if node.op != "output" else line)
                numbers.append(number)
        if not self.nodes or self.nodes[-1].op != "output":
            raise _Rare
        return [*lines, ""], [*numbers, len(self.nodes) - 1]

    def _dying(self) -> dict[Node, str]:
        """Return node -> the end of its line, which frees the values that no later node reads."""
        # Backwards through the graph, the first reader that we meet of a value is its last.
        seen: set[Node] = set()
        ends: dict[Node, str] = {}
        for node in reversed(self.nodes):
            last = [n for n in node._input_nodes if n not in seen]
            seen.update(last)
            if not node.users:
                last.append(node)
            if last and node.op != "placeholder":
                ends[node] = f";  {' = '.join([n.name for n in last])} = None"
        return ends

    def _placeholder(self, node: Node) -> str | None:
        target = str(node.target)
        default = f" = {self._text(node.args[0])}" if node.args else ""
        self._inputs.append(f"{target}{self._types[node.type]}{default}")
        raw = target.replace("*", "")
        return None if raw == node.name else f"{node.name} = {raw}"

    def _function(self, node: Node) -> str:
        call = self._targets.get(id(node.target)) or self._learn(node.target)
        if "is_wrapped" in node.meta or "boxed_arg_indices" in node.meta:
            raise _Rare
        args, left = node.args, f"{node.name}{self._types[node.type]}"
        if call.written:
            return f"{call.written.format(*map(self._text, args))};  {left} = {self._text(args[0])}"
        if call.operator:
            return f"{left} = {call.operator.format(*map(self._text, args))}"
        if call.name == "getattr" and len(args) == 2 and isinstance(args[1], str) and args[1].isidentifier():
            return f"{left} = {_dotted(self._text(args[0]), args[1])}"
        return f"{left} = {call.name}({self._arguments(args, node.kwargs)})"

    def _method(self, node: Node) -> str:
        subject = _dotted(self._text(node.args[0]), str(node.target))
        return f"{node.name}{self._types[node.type]} = {subject}({self._arguments(node.args[1:], node.kwargs)})"

    def _module(self, node: Node) -> str:
        path = self._path(str(node.target))
        return f"{node.name}{self._types[node.type]} = {path}({self._arguments(node.args, node.kwargs)})"

    def _attribute(self, node: Node) -> str:
        return f"{node.name}{self._types[node.type]} = {self._path(str(node.target))}"

    def _output(self, node: Node) -> str:
        ask = self.generator._call_method_with_signature_check
        line = str(ask(self.generator.generate_output, node.args[0], descs=None, repr_fn=self._text))
        if "\n" in line:
            raise _Rare
        return line

    def _path(self, target: str) -> str:
        """``self.h`` for ``h``, ``getattr(self.h, "0")`` for ``h.0``."""
        if target not in self._paths:
            above, _, name = target.rpartition(".")
            self._paths[target] = _dotted(self._path(above), name)
        return self._paths[target]

    def _arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        texts = [a.name if isinstance(a, Node) else self._text(a) for a in args]
        if kwargs:
            texts += [f"{name} = {self._text(value)}" for name, value in kwargs.items()]
        return ", ".join(texts)

    def _text(self, value: Any) -> str:
        if isinstance(value, Node):
            return value.name
        kind = type(value)
        if kind in _PRINTED:
            return repr(value)
        if kind is tuple:
            return f"({self._text(value[0])},)" if len(value) == 1 else f"({', '.join(map(self._text, value))})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if kind is slice:
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        raise _Rare

    def _learn(self, target: Any) -> _Call:
        name = getattr(target, "__name__", "")
        if getattr(target, "_boxed_arg_indices", ()):
            raise _Rare
        if getattr(target, "__module__", "") == "_operator":
            written, shown = _fx_graph.inplace_methods.get(name, ""), _fx_graph.magic_methods.get(name, "")
            call = _Call("", shown, "" if shown else written)
            if shown or written:
                self._targets[id(target)] = call
                return call
        call = self._targets[id(target)] = _Call(self._global(_get_qualified_name(target), target))
        return call

    def _learn_type(self, node: Node) -> None:
        """Store the annotation of a node whose type is a class."""
        kind: Any = node.type
        if (type(kind) is not type and kind not in _CLASSES) or node.op == "output":
            raise _Rare
        if kind not in self._types:
            self._types[kind] = f" : {self._global(_type_repr(kind), kind)}"

    def _global(self, hint: str, value: Any) -> str:
        """Return the name of a function in the code, and add it to the globals unless it is torch's."""
        if _fx_graph._is_from_torch(value) and value != torch.device:
            return _get_qualified_name(value)
        name = self._namespace.create_name(hint, value)
        if name != re.sub(r"[^0-9a-zA-Z_]+", "_", hint):  # fx numbered the name; its numbers count names of nodes too
            raise _Rare
        if self.globals.setdefault(name, value) is not value:
            raise _Rare
        return name


class _Call(NamedTuple):
    """How to print a target: its name, or the template of an operator or of an in-place operator."""

    name: str
    operator: str = ""
    written: str = ""


def _dotted(base: str, target: str) -> str:
    for name in target.split("."):
        base = f"{base}.{name}" if name.isidentifier() else f'getattr({base}, "{name}")'
    return base


@cache
def is_exact() -> bool:
    """Whether `python_code` generates the code of fx for a sample of all supported cases."""
    try:
        graph = _sample()
        mine, other = _Source(graph, "self").code(), fx.Graph.python_code(graph, "self")
    except Exception:
        return False
    return _snapshot(mine) == _snapshot(other)


def _snapshot(code: Any) -> tuple[Any, ...]:
    return code.src, code.globals, list(code.globals), code._lineno_map, code._prologue_start


def _sample() -> fx.Graph:
    graph = fx.Graph()
    x, y = graph.placeholder("x", torch.Tensor), graph.placeholder("Y", default_value=1.5)
    rest = graph.placeholder("*rest")
    weight = graph.get_attr("h.0.weight")
    calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
        (torch.relu, (x,), {}),
        (torch.nn.functional.gelu, (x,), {"approximate": "none"}),
        (torch.ops.aten.add.Tensor, (x, 2), {"alpha": -1.0}),
        (torch.ops.aten.view.default, (x, [1, -1, y]), {}),
        (torch.Tensor.add_, (x, y), {}),
        (torch.full, ((1,), float("inf")), {"dtype": torch.float32, "device": torch.device("cpu")}),
        (torch.ones, ((),), {"layout": torch.strided, "memory_format": torch.preserve_format, "out": None}),
        (operator.add, (x, weight), {}),
        (operator.iadd, (x, y), {}),
        (operator.getitem, (rest, (slice(None, y), ..., None, [True, "a\n'b'"])), {}),
        (getattr, (x, "shape"), {}),
        (getattr, (x, "shape", None), {}),
        (len, (x,), {}),
        (re.sub, ("a", x), {}),
    ]
    made = [graph.call_function(target, args, kwargs) for target, args, kwargs in calls]
    made += [graph.call_method("view", (made[0], made[1]), {"k": (made[2],)}), graph.call_module("h.0", (x, made[3]))]
    for node, kind in zip(made, (torch.Tensor, torch.nn.Parameter, torch.SymInt, int, fx.Node), strict=False):
        node.type = cast(Any, kind)
    graph.output((made[0], [made[-1]], (made[4],), None))
    return graph
