"""Convert pytree specs of inputs and outputs to JSON-ready data and back: containers by kind, classes by name."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from splitkit._torch import pytree
from splitkit.engine.serialization import argument_data
from splitkit.engine.serialization.json_fields import JsonField
from splitkit.errors import FileError

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
            "context": argument_data.encode_argument(spec.context, "an input or output"),
            "children": children,
        }
    named = spec.type is namedtuple
    described = None if named else argument_data.encode_argument(spec.context, "an input or output")
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
        return pytree.TreeSpec(_KINDS[kind], argument_data.decode_argument(data["context"], {}), children)
    if kind not in ("namedtuple", "class"):
        raise data["kind"].damaged(f"one of {', '.join(_KINDS)}, namedtuple and class")
    found = _class(data["class"])
    if kind == "class":
        if found not in pytree.SUPPORTED_NODES:
            raise _absent(data["class"])
        return pytree.TreeSpec(found, argument_data.decode_argument(data["context"], {}), children)
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
