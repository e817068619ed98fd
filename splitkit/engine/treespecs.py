"""The form of a graph's inputs and outputs as JSON-ready data: containers by kind, classes by name."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from splitkit._torch import pytree
from splitkit.engine import values
from splitkit.errors import FileError
from splitkit.fields import JsonField

_KINDS: Mapping[str, Any] = MappingProxyType(
    {"tuple": tuple, "list": list, "dict": dict, "OrderedDict": OrderedDict}
)  # fmt: skip
_OUTPUTS = "transformers.modeling_outputs"  # the one module that is imported: its classes are what most models return


def encode(spec: Any) -> Any:
    """A tree spec as data.

    Raises:
        FileError: SK506 for a container whose description is not data.
    """
    if spec.is_leaf():
        return "leaf"
    kind = next((name for name, kind in _KINDS.items() if kind is spec.type), None)
    children = [encode(child) for child in spec.children()]
    if kind is not None:
        return {"kind": kind, "context": values.encode(spec.context, "an input or output"), "children": children}
    named = spec.type is namedtuple
    described = None if named else values.encode(spec.context, "an input or output")
    name = _name(spec.context if named else spec.type)
    return {"kind": "namedtuple" if named else "class", "class": name, "context": described, "children": children}


def decode(data: JsonField) -> Any:
    """The tree spec of data.

    Classes are those that this process has registered with torch's pytree.

    Raises:
        FileError: SK505 for damaged data; SK508 for a class that is not there.
    """
    if data.value == "leaf":
        return pytree.treespec_leaf()
    kind = data["kind"].text()
    children = [decode(child) for child in data["children"].items()]
    if kind in _KINDS:
        return pytree.TreeSpec(_KINDS[kind], values.decode(data["context"], {}), children)
    if kind not in ("namedtuple", "class"):
        raise data["kind"].damaged(f"one of {', '.join(_KINDS)}, namedtuple and class")
    found = _class(data["class"])
    if kind == "class":
        if found not in pytree.SUPPORTED_NODES:
            raise _absent(data["class"])
        return pytree.TreeSpec(found, values.decode(data["context"], {}), children)
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
