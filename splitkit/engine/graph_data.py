"""Convert a GraphModule to JSON-ready data and back; functions are stored by name, and no code is stored.

The caller numbers the tensors; the data contains only their numbers::

    {"nodes": [...], "tensors": {"h.0.attn.weight": 17}, "modules": {"true_graph_0": {...}}, "ops": {...}}
"""

from __future__ import annotations

import keyword
import math
import re
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch.fx import Node

from splitkit import _torch
from splitkit._torch import pytree
from splitkit.engine.codegen.part_modules import EagerPart
from splitkit.engine.codegen.writer import LeanGraph, Writer
from splitkit.engine.function_names import function_of, name_of_function, op_schema
from splitkit.engine.json_fields import JsonField
from splitkit.errors import FileError
from splitkit.graph.caches import caches_of
from splitkit.graph.shards import collective_group
from splitkit.graph.storages import attribute

# Convert arguments of nodes to JSON-ready data and back: constants, nodes, and containers of these.


def encode_argument(value: Any, where: str) -> Any:
    """Return an argument as JSON-ready data.

    Args:
        value: the argument; a node stands for its result.
        where: the owner of the argument, for the error message.

    Raises:
        FileError: SK506 if the value cannot be represented.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, list):
        return [encode_argument(item, where) for item in value]
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [encode_argument(item, where) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode_argument(key, where), encode_argument(item, where)] for key, item in value.items()]}
    if kind is slice:
        return {"slice": [encode_argument(item, where) for item in (value.start, value.stop, value.step)]}
    for name, (known, _) in _BY_TEXT.items():
        if kind is known:
            return {name: str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": None}
    raise FileError(
        "SK506",
        f"{where} has an argument of type {kind.__name__}, which cannot be written as data",
        "Give the model constants that are numbers, strings, dtypes, devices or tensors.",
    )


def decode_argument(data: JsonField, kinds: Mapping[str, Callable[[JsonField], Any]]) -> Any:
    """Return the argument that `encode_argument` has encoded.

    Args:
        data: the data.
        kinds: further kinds of values, such as ``node`` -> what decodes them.

    Raises:
        FileError: SK505 if the data is damaged.
    """
    value = data.value
    if isinstance(value, list):
        return [decode_argument(item, kinds) for item in data.items()]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise data.damaged("an object of one field")
    ((kind, inner),) = data.fields()
    if kind in kinds:
        return kinds[kind](inner)
    if kind == "tuple":
        return tuple(decode_argument(item, kinds) for item in inner.items())
    if kind == "dict":
        return dict(decode_pair(item, kinds) for item in inner.items())
    if kind == "slice" and isinstance(inner.value, list) and len(inner.value) == 3:
        return slice(*(decode_argument(item, kinds) for item in inner.items()))
    if kind in _BY_TEXT:
        return _of_text(kind, inner)
    if kind == "ellipsis":
        return Ellipsis
    raise data.damaged("a value")


def decode_pair(data: JsonField, kinds: Mapping[str, Callable[[JsonField], Any]]) -> tuple[Any, Any]:
    """Return a key and a value of a dictionary; the value may be of the kinds of `decode_argument`."""
    items = list(data.items())
    if len(items) != 2:
        raise data.damaged("a key and a value")
    key = decode_argument(items[0], {})
    if isinstance(key, list | dict | slice):
        raise data.damaged("a key and a value")
    return key, decode_argument(items[1], kinds)


def _of_text(kind: str, data: JsonField) -> Any:
    wanted, make = _BY_TEXT[kind]
    try:
        found = make(data.text())
    except (RuntimeError, ValueError) as error:
        raise data.damaged(f"a {kind}") from error
    if not isinstance(found, wanted):
        raise data.damaged(f"a {kind}")
    return found


def _of_name(name: str) -> Any:
    return getattr(torch, name, None)


_BY_TEXT: Mapping[str, tuple[Any, Any]] = {
    "float": (float, float),
    "complex": (complex, complex),
    "dtype": (torch.dtype, _of_name),
    "device": (torch.device, torch.device),
    "layout": (torch.layout, _of_name),
    "memory_format": (torch.memory_format, _of_name),
}


def dtype_of(data: JsonField) -> torch.dtype:
    """Return the dtype that a field names; raise SK505 for any other text."""
    found = _of_name(data.text())
    if not isinstance(found, torch.dtype):
        raise data.damaged("a dtype")
    return found


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name that `dtype_of` reads."""
    return str(dtype).removeprefix("torch.")


# Convert pytree specs of inputs and outputs to JSON-ready data and back: containers by kind, classes by name.


_KINDS: Mapping[str, Any] = MappingProxyType(
    {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}
)  # fmt: skip
_OUTPUTS = "transformers.modeling_outputs"  # the only module that is imported: most models return its classes


def encode_tree_spec(spec: Any) -> Any:
    """Return a tree spec as JSON-ready data.

    Raises:
        FileError: SK506 for a container whose context cannot be represented.
    """
    if spec.is_leaf():
        return "leaf"
    kind = next((name for name, kind in _KINDS.items() if kind is spec.type), None)
    children = [encode_tree_spec(child) for child in spec.children()]
    if kind is not None:
        return {
            "kind": kind,
            "context": encode_argument(spec.context, "an input or output"),
            "children": children,
        }
    named = spec.type is namedtuple
    described = None if named else encode_argument(spec.context, "an input or output")
    name = _name(spec.context if named else spec.type)
    return {"kind": "namedtuple" if named else "class", "class": name, "context": described, "children": children}


def decode_tree_spec(data: JsonField) -> Any:
    """Return the tree spec that `encode_tree_spec` has encoded.

    Its classes must be registered with torch's pytree in this process.

    Raises:
        FileError: SK505 for damaged data, SK508 for a class that this process lacks.
    """
    if data.value == "leaf":
        return pytree.treespec_leaf()
    kind = data["kind"].text()
    children = [decode_tree_spec(child) for child in data["children"].items()]
    if kind in _KINDS:
        return pytree.TreeSpec(_KINDS[kind], decode_argument(data["context"], {}), children)
    if kind not in ("namedtuple", "class"):
        raise data["kind"].damaged(f"one of {', '.join(_KINDS)}, namedtuple and class")
    found = _class(data["class"])
    if kind == "class":
        if found not in pytree.SUPPORTED_NODES:
            raise _absent(data["class"])
        return pytree.TreeSpec(found, decode_argument(data["context"], {}), children)
    if not issubclass(found, tuple) or len(getattr(found, "_fields", ())) != len(children):
        raise data["class"].damaged(f"a named tuple of {len(children)}")
    return pytree.TreeSpec(namedtuple, found, children)


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class(data: JsonField) -> type:
    module, _, name = data.text().partition(":")
    found: Any = sys.modules.get(module)
    if found is None and module == _OUTPUTS and find_spec(_OUTPUTS.partition(".")[0]) is not None:
        found = import_module(_OUTPUTS)
    for atom in name.split("."):
        found = vars(found).get(atom) if found is not None and hasattr(found, "__dict__") else None
    if not isinstance(found, type):
        raise _absent(data)
    return found


def _absent(data: JsonField) -> FileError:
    module = data.text().partition(":")[0]
    return FileError(
        "SK508",
        f"{data.file} has inputs or outputs of {data.text()!r}, which this process does not know",
        f"Import {module} first, which must register it with torch's pytree.",
        [data.text()],
    )


EXPORT = "Capture the model with splitkit.capture(model, ...), by torch.export."


def encode_graph(
    gm: fx.GraphModule, number_of: Callable[[torch.Tensor], int], parts: Collection[str] = ()
) -> dict[str, Any]:
    """Return a module as JSON-ready data.

    Args:
        gm: the module.
        number_of: returns the number of a tensor.
        parts: the names of children that are stored elsewhere.

    Raises:
        FileError: SK506 if something cannot be represented; the message names the node.
    """
    data: dict[str, Any] = {"training": gm.training, "nodes": [], "ops": {}, "tensors": {}, "modules": {}}
    for node in gm.graph.nodes:
        data["nodes"].append(_node(node, data["ops"]))
        target = str(node.target)
        if node.op not in ("get_attr", "call_module") or target in parts:
            continue
        value = attribute(gm, target)
        if isinstance(value, torch.Tensor) and node.op == "get_attr":
            data["tensors"][target] = number_of(value)
        elif isinstance(value, fx.GraphModule) and node.op == "get_attr":
            data["modules"][target] = encode_graph(value, number_of)
        else:
            raise _unwritable(node, f"uses a {type(value).__name__}, whose code is not data")
    return data | _signature(gm)


def decode_graph(
    data: JsonField, tensor_of: Callable[[JsonField], torch.Tensor], parts: Mapping[str, nn.Module] | None = None
) -> fx.GraphModule:
    """Return the module that `encode_graph` has encoded. No code of the data is run: it can only name known functions.

    Args:
        data: the data.
        tensor_of: returns the tensor of a number.
        parts: the children that are stored elsewhere.

    Raises:
        FileError: SK505 for damaged data, SK508 for a function that this process lacks or has with another signature.
    """
    root, known = nn.Module(), parts or {}
    for name, child in known.items():
        root.add_module(name, child)
    for name, number in data["tensors"].fields():
        _put(root, _path(number, name), number, tensor_of(number))
    for name, inner in data["modules"].fields():
        _put(root, _path(inner, name), inner, decode_graph(inner, tensor_of))
    attributes = {*known, *data["tensors"].value, *data["modules"].value}
    graph = _graph(data, {"call_function": data["ops"].value, "call_module": known, "get_attr": attributes})
    try:
        module = EagerPart(root, graph, class_name="GraphModule")
    except (SyntaxError, RuntimeError, AttributeError, TypeError) as error:
        raise data.damaged("the data of a graph") from error
    module.train(data["training"].flag())
    return module


def _node(node: Node, ops: dict[str, str]) -> dict[str, Any]:
    target = str(node.target)
    if node.op == "call_function":
        name = name_of_function(node.target)
        if collective_group(node) is not None:
            reason = f"node {node.name} is a collective, in a graph of the pieces that one rank holds"
            remedy = "Capture and split the model on each rank, and give the split: splitkit.runtime.pipeline(split)."
            raise FileError("SK506", reason, remedy, [node.name])
        if name is None:
            raise _unwritable(node, f"calls {_torch.target_name(node)}, which is not an op that is known by name")
        target = name
        if signature := op_schema(node.target):
            ops[name] = signature
    elif node.op == "call_method":
        raise _unwritable(node, f"calls the method {target}")
    where = f"node {node.name}"
    return {
        "op": node.op,
        "name": node.name,
        "target": target,
        "args": [encode_argument(arg, where) for arg in node.args],
        "kwargs": {name: encode_argument(arg, where) for name, arg in node.kwargs.items()},
    }


def _signature(gm: fx.GraphModule) -> dict[str, Any]:
    info = getattr(_torch.codegen_of(gm.graph), "pytree_info", None)
    # ranks give a decoder its inputs one by one, and its caches are objects of classes that no folder can hold
    if info is None or caches_of(gm):
        return {"signature": None}
    out = None if info.out_spec is None else encode_tree_spec(info.out_spec)
    return {
        "signature": {
            "names": list(info.orig_args),
            "in_spec": encode_tree_spec(info.in_spec),
            "out_spec": out,
        }
    }


def _graph(data: JsonField, names: Mapping[str, Collection[str]]) -> fx.Graph:
    for name, signature in data["ops"].fields():
        _require_op(name, signature)
    graph = LeanGraph()
    writer, nodes = Writer(graph), dict[str, Node]()
    for item in data["nodes"].items():
        node = _appended(writer, item, nodes, names)
        nodes[node.name] = node
    if not nodes or node.op != "output":
        raise data["nodes"].damaged("a list of nodes that ends with an output")
    signature = data["signature"]
    if signature.value is not None:
        arguments = [_identifier(name) for name in signature["names"].items()]
        graph.set_codegen(_torch.pytree_codegen(arguments, decode_tree_spec(signature["in_spec"]), None))
    return graph


def form_outputs(gm: fx.GraphModule, data: JsonField) -> None:
    """Let a decoded module return the output structure of the original instead of a flat list.

    This is separate from `decode_graph` because importing the output classes may take more memory than a stage, and
    only one stage needs them.

    Raises:
        FileError: SK508 for a class that this process lacks.
    """
    signature = data["signature"]
    if signature.value is not None and signature["out_spec"].value is not None:
        codegen = _torch.codegen_of(gm.graph)
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=decode_tree_spec(signature["out_spec"]))
        gm.graph.set_codegen(codegen)
        gm.recompile()


def _appended(writer: Writer, item: JsonField, nodes: Mapping[str, Node], known: Mapping[str, Collection[str]]) -> Node:
    op, name = item["op"].text(), _identifier(item["name"])
    if name in nodes or name == "self":
        raise item["name"].damaged("a name of its own")

    def node_of(given: JsonField) -> Node:
        if given.text() not in nodes:
            raise given.damaged("the name of a node before it")
        return nodes[given.text()]

    kinds = {"node": node_of}
    args = tuple(decode_argument(arg, kinds) for arg in item["args"].items())
    kwargs = {_identifier(arg, name): decode_argument(arg, kinds) for name, arg in item["kwargs"].fields()}
    target: Any = item["target"].text()
    if op == "call_function":
        target = function_of(target)
        if target is None:
            raise _unknown(item["target"])
        if op_schema(target) and item["target"].value not in known["call_function"]:
            raise item["target"].damaged("one of the ops of this file")
    elif op in ("get_attr", "call_module"):
        if target not in known[op]:  # other attributes of a module would give access to all of Python
            raise item["target"].damaged("the name of a tensor or module of this file")
    elif op == "placeholder":
        _identifier(item["target"])
    elif op != "output" or target != "output":
        raise item["op"].damaged("placeholder, get_attr, call_function, call_module or output")
    return writer.append(op, target, args, name, kwargs)


def _require_op(name: str, signature: JsonField) -> None:
    found = function_of(name)
    if found is None:
        raise _unknown(JsonField(signature.file, signature.place, name))
    if op_schema(found) != signature.text():
        raise FileError(
            "SK508",
            f"{signature.file} calls {signature.text()}, and here it is {op_schema(found)}",
            f"Use the version of torch that wrote it; this is {torch.__version__}.",
            [name],
        )


def _unknown(target: JsonField) -> FileError:
    return FileError(
        "SK508",
        f"{target.file} calls {target.text()!r}, which this process does not know",
        "Import the package that defines it first, or use the version of torch that wrote the file.",
        [target.text()],
    )


def _identifier(data: JsonField, text: str | None = None) -> str:
    """Return a name that is safe in generated code."""
    name = data.text() if text is None else text
    if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
        raise data.damaged("a name")
    return name


def _path(data: JsonField, name: str) -> list[str]:
    atoms = name.split(".")
    if not all(re.fullmatch(r"\w+", atom, re.ASCII) for atom in atoms):
        raise data.damaged("the dotted name of an attribute")
    return atoms


def _put(root: nn.Module, path: list[str], data: JsonField, value: torch.Tensor | nn.Module) -> None:
    *way, last = path
    for atom in way:
        below = getattr(root, atom, None)
        if below is None:
            below = nn.Module()
            root.add_module(atom, below)
        if not isinstance(below, nn.Module):
            raise data.damaged("an attribute of a module")
        root = below
    if hasattr(root, last):
        raise data.damaged("an attribute that is not there yet")
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(last, value)
    else:
        setattr(root, last, value)


def _unwritable(node: Node, what: str) -> FileError:
    return FileError("SK506", f"node {node.name} {what}, so that its stage cannot be written", EXPORT, [node.name])
