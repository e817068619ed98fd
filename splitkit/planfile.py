"""Plans as files: JSON by node name with a schema number and a fingerprint of the graph. Data only, never code."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from splitkit._torch import target_name
from splitkit.errors import FileError, PlanError

if TYPE_CHECKING:
    from splitkit.plan import PartKey, Plan

SCHEMA = 1


def fingerprint(graph: fx.Graph) -> str:
    """A hash of the structure of a graph: names, targets and edges; not sizes, weights or constants."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        line = (node.op, node.name, target_name(node), *(a.name for a in node.all_input_nodes))
        digest.update(("\0".join(line) + "\n").encode())
    return digest.hexdigest()[:32]


def to_dict(plan: Plan) -> dict[str, Any]:
    """A plan as JSON-ready data. The same plan gives the same data in every process."""
    graph = next(iter(plan)).graph if plan else None
    keys = list(plan.parts)
    number: dict[PartKey, int | None] = {None: None, **{k: i for i, k in enumerate(keys)}}
    nodes = [n for n in graph.nodes if n in plan.places] if graph else []
    return {
        "schema": SCHEMA,
        "kind": "splitkit plan",
        "graph": fingerprint(graph) if graph else None,
        "note": plan.note,
        "parts": [
            {
                "key": _key_to_json(k),
                "device": str(plan.parts[k].device) if plan.parts[k].device else None,
                "call": plan.parts[k].call,
            }
            for k in keys
        ],
        "places": {n.name: [number[k] for k in plan[n]] for n in nodes},
    }


def from_dict(graph: fx.Graph, data: Mapping[str, Any]) -> Plan:
    """The plan in ``data``, for the graph that it was made for.

    Raises:
        FileError: SK501 when the data is no plan, SK502 when the graph is another one, SK503 for another schema.
    """
    from splitkit.plan import Part, Plan

    _check_header(data)
    if data["graph"] not in (None, fingerprint(graph)):
        missing = [name for name in data["places"] if name not in {n.name for n in graph.nodes}]
        raise FileError(
            "SK502",
            "the plan was made for another graph"
            + (f": {missing[0]!r} and {len(missing) - 1} more of its nodes are not in this one" if missing else ""),
            "Capture the model in the same way (same sizes, mode and torch version), or plan again.",
            missing,
        )
    try:
        parts = [
            Part(_key_from_json(p["key"]), torch.device(p["device"]) if p["device"] else None, p["call"])
            for p in data["parts"]
        ]
        by_name = {n.name: n for n in graph.nodes}
        places = {
            by_name[name]: tuple(None if i is None else parts[i].key for i in where)
            for name, where in data["places"].items()
        }
    except (KeyError, IndexError, TypeError, RuntimeError) as error:
        raise FileError("SK501", f"the plan is damaged: {error!r}", "Plan again.") from error
    return Plan(places, {p.key: p for p in parts}, str(data.get("note", "")))


def _check_header(data: object) -> None:
    if not isinstance(data, Mapping) or data.get("kind") != "splitkit plan":
        raise FileError("SK501", "this is not a splitkit plan", "Write one with plan.save(path) or `splitkit plan -o`.")
    if data.get("schema") != SCHEMA:
        raise FileError(
            "SK503",
            f"the plan has schema {data.get('schema')!r}, this splitkit reads {SCHEMA}",
            "Plan again with this version, or use the version of splitkit that wrote it.",
        )
    absent = [field for field in ("graph", "parts", "places") if field not in data]
    if absent:
        raise FileError("SK501", f"the plan has no field {absent[0]!r}", "Plan again.", absent)


def _key_to_json(key: PartKey) -> Any:
    if isinstance(key, str | int | float | bool):
        return key
    if isinstance(key, torch.device):
        return {"device": str(key)}
    if isinstance(key, tuple):
        return [_key_to_json(k) for k in key]
    raise PlanError(
        "SK206",
        f"a part called {key!r} ({type(key).__name__}) cannot be written to a file",
        "Name parts with ints, strings, devices or tuples of these.",
    )


def _key_from_json(key: Any) -> PartKey:
    if isinstance(key, list):
        return tuple(_key_from_json(k) for k in key)
    return torch.device(key["device"]) if isinstance(key, dict) else key


def write(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write JSON atomically: the file is either whole or as it was.

    Raises:
        FileError: SK504 when the file cannot be written.
    """
    target = Path(path)
    text = json.dumps(data, indent=1) + "\n"
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise FileError("SK504", f"cannot write {target}: {error.strerror}", "Name a folder that exists.") from error


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileError: SK504 when the file cannot be read, SK501 when it is not a JSON object.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError("SK504", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise FileError("SK501", f"{path} is not JSON: {error}", "Name a file that splitkit wrote.") from error
    if not isinstance(data, dict):
        raise FileError("SK501", f"{path} holds no JSON object", "Name a file that splitkit wrote.")
    return data
