"""Plans as files: JSON by node name with a schema number and a fingerprint of the graph. Data only, never code."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import fx
from torch.fx import Node

from splitkit import files
from splitkit._torch import target_name
from splitkit.errors import FileError, PlanError, PlanWarning
from splitkit.plans import binding
from splitkit.plans.parts import CALLS, Claim, Part, PartKey, flaw_of_replicas

SCHEMA = 1
_MOST = 1e300  # of the numbers in a claim


def fingerprint(graph: fx.Graph) -> str:
    """A hash of the structure of a graph: names, targets and edges; not sizes, weights or constants."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        line = (node.op, node.name, target_name(node), *(a.name for a in node.all_input_nodes))
        digest.update(("\0".join(line) + "\n").encode())
    return digest.hexdigest()[:32]


class Fields(NamedTuple):
    """What a plan is made of; see `splitkit.Plan`."""

    places: Mapping[Node, tuple[PartKey, ...]]
    parts: Mapping[PartKey, Part]
    note: str
    routing: Literal["direct", "relay"]
    claim: Claim | None


def encode(plan: Fields) -> dict[str, Any]:
    """A plan as JSON-ready data. The same plan gives the same data in every process."""
    graph = next(iter(plan.places)).graph if plan.places else None
    keys = list(plan.parts)
    written = [_key_to_json(k) for k in keys]
    if len({_key_from_json(k) for k in written}) < len(keys):
        raise PlanError("SK206", f"two of the parts {keys!r:.200} have one name in a file", "Name them differently.")
    number: dict[PartKey, int | None] = {None: None, **{k: i for i, k in enumerate(keys)}}
    nodes = [n for n in graph.nodes if n in plan.places] if graph else []
    return {
        "schema": SCHEMA,
        "kind": "splitkit plan",
        "graph": fingerprint(graph) if graph else None,
        "nodes": binding.described(graph) if graph else [],
        "note": plan.note,
        "routing": plan.routing,
        "claim": _claim_to_json(plan.claim),
        "parts": [_part_to_json(plan.parts[k], name) for k, name in zip(keys, written, strict=True)],
        "places": {n.name: [number[k] for k in plan.places[n]] for n in nodes},
    }


def decode(graph: fx.Graph, data: Mapping[str, Any]) -> Fields:
    """What the plan in ``data`` is made of, for the graph that it was made for.

    The names of the graph's nodes, and the order of independent ones, may be others than in the file. Where sizes are
    others, the plan has no claim, and SK509 is warned of.

    Raises:
        FileError: SK501 when the data is no plan, SK502 when the graph is another one, SK503 for another schema.
    """
    _check_header(data)
    parts = _parts(data["parts"])
    _check_places(data["places"], len(parts))
    same = data["graph"] in (None, fingerprint(graph))
    known = binding.read(data.get("nodes", []))
    by_name = binding.matched(graph, known, data["places"], same)
    if other := binding.other_sizes(known, by_name):
        warnings.warn(PlanWarning("SK509", f"the plan was made for other sizes: {other}"), stacklevel=3)
    places = {
        by_name[name]: tuple(None if i is None else parts[i].key for i in where)
        for name, where in data["places"].items()
    }
    note, routing, claim = str(data.get("note", "")), _routing(data.get("routing", "direct")), _claim(data.get("claim"))
    if other:
        note, claim = f"{note} (for other sizes: {other})".lstrip(), None
    return Fields(places, {p.key: p for p in parts}, note, routing, claim)


def parts_of(data: object) -> Mapping[PartKey, Part]:
    """The parts of a plan's data, which need no graph.

    Raises:
        FileError: SK501, SK503 as `decode`.
    """
    _check_header(data)
    assert isinstance(data, Mapping)
    return {part.key: part for part in _parts(data["parts"])}


def _part_to_json(part: Part, name: Any) -> dict[str, Any]:
    """What is known of a part; files of before there were replicas have none, nor have those of plans without."""
    known = {"key": name, "device": str(part.device) if part.device else None, "call": part.call}
    return known | ({"replicas": part.replicas} if part.replicas > 1 else {})


def _claim_to_json(claim: Claim | None) -> dict[str, Any] | None:
    if claim is None:
        return None
    return {f.name: getattr(claim, f.name) for f in fields(claim)} | {"limiting": _key_to_json(claim.limiting)}


def _claim(data: object) -> Claim | None:
    """What the plan says of its quality; files of before there were claims do not say."""
    if data is None:
        return None
    wanted = "null or an object with the fields of a claim"
    if not isinstance(data, Mapping) or {f.name for f in fields(Claim)} != {"evenness", *data}:
        raise _damaged("claim", data, wanted)
    try:
        made = Claim(**{**data, "limiting": _key_from_json(data["limiting"])})
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise _damaged("claim.limiting", data["limiting"], "the key of a part") from error
    texts = (made.objective, made.solver)
    numbers = (made.value, made.bound, made.tolerance, made.evenness or 0.0)
    sane = all(type(n) in (int, float) and 0 <= n <= _MOST for n in numbers)
    if not all(isinstance(text, str) for text in texts) or not sane or made.bound > made.value:
        raise _damaged("claim", data, wanted)
    return made


def _routing(data: object) -> Literal["direct", "relay"]:
    """How values travel; files of before there was a choice do not say."""
    if data != "direct" and data != "relay":
        raise _damaged("routing", data, "'direct' or 'relay'")
    return "direct" if data == "direct" else "relay"


def _parts(data: object) -> list[Part]:
    """The parts of a plan file."""
    if not isinstance(data, list):
        raise _damaged("parts", data, "a list")
    parts: dict[PartKey, Part] = {}
    for i, entry in enumerate(data):
        if not isinstance(entry, Mapping) or not {"key", "device", "call"} <= entry.keys():
            raise _damaged(f"parts[{i}]", entry, "an object with a key, a device and a call")
        part = _part(f"parts[{i}]", entry)
        if part.key in parts:  # 1, 1.0 and true are one key
            raise _damaged(f"parts[{i}].key", entry["key"], "another name than those of the parts before")
        parts[part.key] = part
    return list(parts.values())


def _part(place: str, entry: Mapping[str, Any]) -> Part:
    key, device, call, replicas = entry["key"], entry["device"], entry["call"], entry.get("replicas", 1)
    if not isinstance(call, str) or call not in CALLS:
        raise _damaged(f"{place}.call", call, "'plain' or 'checkpoint'")
    if flaw_of_replicas(replicas):
        raise _damaged(f"{place}.replicas", replicas, "a whole number, 1 or more")
    try:
        name = _key_from_json(key)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(f"{place}.key", key, "an int, a string, a device or a list of these") from error
    try:
        where = None if device is None else _device(device)
        return Part(name, where, "plain" if call == "plain" else "checkpoint", replicas)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise _damaged(f"{place}.device", device, "null or the name of a device") from error


def _check_places(data: object, count: int) -> None:
    if not isinstance(data, Mapping):
        raise _damaged("places", data, "an object of node names")
    for name, where in data.items():
        if not isinstance(where, list) or not all(i is None or (type(i) is int and 0 <= i < count) for i in where):
            raise _damaged(f"places[{name!r}]", where, f"a list of nulls and numbers below {count}")


def _damaged(field: str, value: object, wanted: str) -> FileError:
    return FileError("SK501", f"the plan is damaged: {field} is {reprlib.repr(value)}, not {wanted}", "Plan again.")


def _check_header(data: object) -> None:
    if not isinstance(data, Mapping) or data.get("kind") != "splitkit plan":
        raise FileError("SK501", "this is not a splitkit plan", "Write one with plan.save(path) or `splitkit plan -o`.")
    if type(data.get("schema")) is not int or data["schema"] != SCHEMA:
        raise FileError(
            "SK503",
            f"the plan has schema {data.get('schema')!r}, this splitkit reads {SCHEMA}",
            "Plan again with this version, or use the version of splitkit that wrote it.",
        )
    absent = [field for field in ("graph", "parts", "places") if field not in data]
    if absent:
        raise FileError("SK501", f"the plan has no field {absent[0]!r}", "Plan again.", absent)


def _key_to_json(key: PartKey) -> Any:
    if isinstance(key, str):
        return str.__str__(key)  # of a subclass too
    if isinstance(key, int | float | bool):
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
    if isinstance(key, Mapping) and key.keys() == {"device"}:
        return _device(key["device"])
    if not isinstance(key, str | int | float | bool):
        raise TypeError(type(key).__name__)
    return key


def _device(name: object) -> torch.device:
    if not isinstance(name, str):  # torch takes an int for a GPU
        raise TypeError(type(name).__name__)
    return torch.device(name)


def write(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write JSON, as `splitkit.files.write` does: a regular file is either whole or as it was.

    Raises:
        FileError: SK504 when the file cannot be written.
    """
    try:
        files.write(path, json.dumps(data, indent=1) + "\n")
    except (OSError, ValueError, RecursionError) as error:
        raise files.refusal(path, error) from error


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileError: SK504 when the file cannot be read, SK501 when it is not a JSON object or names a field twice.
    """
    try:
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        remedy = "Name a file that `Plan.save` or `splitkit plan MODEL ... -o FILE` wrote."
        raise FileError("SK504", f"cannot read {str(path)!r}: {reason}", remedy) from error
    if not content.strip():
        raise FileError("SK501", f"{path} is not JSON: it is empty", "Name a file that splitkit wrote.")
    try:
        data = json.loads(content.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise FileError("SK501", f"{path} is not JSON: {error}", "Name a file that splitkit wrote.") from error
    if not isinstance(data, dict):
        raise FileError("SK501", f"{path} holds no JSON object", "Name a file that splitkit wrote.")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"two fields of one name among {reprlib.repr([name for name, _ in pairs])}")
    return found
