"""Save and load plans as JSON: places by node name, a schema number and a fingerprint of the graph; never code."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import fx
from torch.fx import Node

from splitkit import files
from splitkit._torch import target_name
from splitkit.errors import FileError, PlanError, PlanWarning
from splitkit.plans import node_matching
from splitkit.plans.offloaded import Offloaded, names_of_offloaded, offloaded_from_json, offloaded_to_json
from splitkit.plans.parts import CALLS, Claim, Part, PartKey, flaw_of_replicas
from splitkit.plans.plan_json import (
    check_device,
    check_numbers,
    check_short_text,
    damaged,
    device_from_json,
    key_from_json,
    key_to_json,
    read_key,
)
from splitkit.plans.plan_request import PlanRequest, request_from_json, request_to_json
from splitkit.plans.policy_text import MOST_TEXT
from splitkit.price_record import KINDS, PriceRecord

SCHEMA = 1
_MOST = 1e300  # no number of a claim is larger: this rejects infinity, and ints that no float can hold


def fingerprint(graph: fx.Graph) -> str:
    """Return a hash of the names, targets and edges of a graph; sizes, weights and constants do not count."""
    digest = hashlib.sha256()
    for node in graph.nodes:
        line = (node.op, node.name, target_name(node), *(a.name for a in node.all_input_nodes))
        digest.update(("\0".join(line) + "\n").encode())
    return digest.hexdigest()[:32]


class PlanFields(NamedTuple):
    """The fields of a `splitkit.Plan`."""

    places: Mapping[Node, tuple[PartKey, ...]]
    parts: Mapping[PartKey, Part]
    note: str
    routing: Literal["direct", "relay"]
    claim: Claim | None
    prices: PriceRecord | None
    offloaded: tuple[Offloaded, ...] = ()
    policy: str = ""
    request: PlanRequest = PlanRequest()


def encode_plan(plan: PlanFields) -> dict[str, Any]:
    """Return a plan as JSON-ready data, which is the same in every process."""
    graph = next(iter(plan.places)).graph if plan.places else None
    keys = list(plan.parts)
    written = [key_to_json(k) for k in keys]
    if len({key_from_json(k) for k in written}) < len(keys):
        raise PlanError(
            "SK206", f"two of the parts {keys!r:.200} have the same name in a file", "Name them differently."
        )
    number: dict[PartKey, int | None] = {None: None, **{k: i for i, k in enumerate(keys)}}
    nodes = [n for n in graph.nodes if n in plan.places] if graph else []
    data = {
        "schema": SCHEMA,
        "kind": "splitkit plan",
        "graph": fingerprint(graph) if graph else None,
        "nodes": node_matching.describe_nodes(graph) if graph else [],
        "note": plan.note,
        "routing": plan.routing,
        "claim": _claim_to_json(plan.claim),
        "parts": [_part_to_json(plan.parts[k], name) for k, name in zip(keys, written, strict=True)],
        "places": {n.name: [number[k] for k in plan.places[n]] for n in nodes},
    }
    data |= {} if plan.prices is None else {"prices": _prices_to_json(plan.prices)}
    data |= {"policy": plan.policy} if plan.policy else {}
    data |= {"request": request_to_json(plan.request)} if plan.request != PlanRequest() else {}
    return data | ({"offloaded": offloaded_to_json(plan.offloaded)} if plan.offloaded else {})


def decode_plan(graph: fx.Graph, data: Mapping[str, Any]) -> PlanFields:
    """Return the fields of the plan in ``data`` for ``graph``.

    The names of the nodes, and the order of independent nodes, may differ between the graph and the file. If sizes
    differ, the plan loses its claim and this function warns (SK509).

    Raises:
        FileError: SK501 if the data is not a plan, SK502 if the plan was made for a different graph, SK503 if the data
            has an unknown schema.
    """
    _check_header(data)
    parts = _parts(data["parts"])
    _check_places(data["places"], len(parts))
    same = data["graph"] in (None, fingerprint(graph))
    known = node_matching.parse_nodes(data.get("nodes", []))
    moved = tuple(names_of_offloaded(data.get("offloaded")))
    by_name = node_matching.match_nodes(graph, known, (*data["places"], *moved), same)
    if other := node_matching.size_differences(known, by_name):
        warnings.warn(PlanWarning("SK509", f"the plan was made for other sizes: {other}"), stacklevel=3)
    places = {
        by_name[name]: tuple(None if i is None else parts[i].key for i in where)
        for name, where in data["places"].items()
    }
    note, routing, claim = str(data.get("note", "")), _routing(data.get("routing", "direct")), _claim(data.get("claim"))
    prices = _renamed(_prices(data.get("prices")), by_name)
    if other:
        note, claim = f"{note} (for other sizes: {other})".lstrip(), None
        prices = None if prices is not None and prices.kind == "table" else prices  # a table is of the old sizes
    offloaded = offloaded_from_json(data.get("offloaded"), by_name)
    policy, request = _policy(data.get("policy", "")), request_from_json(data.get("request"))
    if strange := next((p for p in parts if p.planned_on is not None and p.planned_on not in request.devices), None):
        raise damaged(f"parts[{parts.index(strange)}].planned_on", strange.planned_on, "a device of the request")
    return PlanFields(places, {p.key: p for p in parts}, note, routing, claim, prices, offloaded, policy, request)


def parts_in_data(data: object) -> Mapping[PartKey, Part]:
    """Return the parts of a plan in its JSON form; no graph is needed.

    Raises:
        FileError: SK501 or SK503, as `decode_plan` does.
    """
    _check_header(data)
    assert isinstance(data, Mapping)
    return {part.key: part for part in _parts(data["parts"])}


def _part_to_json(part: Part, name: Any) -> dict[str, Any]:
    """Return the JSON form of a part. ``replicas`` is left out if it is 1, as in files that predate replicas."""
    known = {"key": name, "device": str(part.device) if part.device else None, "call": part.call}
    known |= {"planned_on": key_to_json(part.planned_on)} if part.planned_on is not None else {}
    return known | ({"replicas": part.replicas} if part.replicas > 1 else {})


def _claim_to_json(claim: Claim | None) -> dict[str, Any] | None:
    if claim is None:
        return None
    return {f.name: getattr(claim, f.name) for f in fields(claim)} | {"limiting": key_to_json(claim.limiting)}


def _claim(data: object) -> Claim | None:
    """Return the claim of a plan; files that predate claims have none."""
    if data is None:
        return None
    wanted = "null or an object with the fields of a claim"
    if not isinstance(data, Mapping) or {f.name for f in fields(Claim)} != {"evenness", *data}:
        raise damaged("claim", data, wanted)
    made = Claim(**{**data, "limiting": read_key("claim.limiting", data["limiting"], "the key of a part")})
    texts = (made.objective, made.solver)
    numbers = (made.value, made.bound, made.tolerance, made.evenness or 0.0)
    sane = all(type(n) in (int, float) and 0 <= n <= _MOST for n in numbers)
    if not all(isinstance(text, str) for text in texts) or not sane or made.range[0] > made.range[1]:
        raise damaged("claim", data, wanted)
    return made


def _prices_to_json(prices: PriceRecord) -> dict[str, Any]:
    """Return the JSON form of a record of prices, without the fields that have their default."""
    found: dict[str, Any] = {"name": prices.name, "kind": prices.kind, "unit": prices.unit}
    given = {name: getattr(prices, name) for name in _OPTIONAL_OF_PRICES}
    tables = {name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()}
    return found | {name: value for name, value in tables.items() if value not in (None, False)}


_OPTIONAL_OF_PRICES = ("device", "tf32", "training", "table", "backward")


def _prices(data: object) -> PriceRecord | None:
    """Return what a plan was priced with; files that predate it do not say."""
    if data is None:
        return None
    needed = {"name", "kind", "unit"}
    if not isinstance(data, Mapping) or not needed <= data.keys() <= needed | {*_OPTIONAL_OF_PRICES}:
        raise damaged("prices", data, "an object with a name, a kind and a unit")
    for name in ("name", "unit"):
        check_short_text(f"prices.{name}", data[name])
    for name in ("tf32", "training"):
        if not isinstance(data.get(name, False), bool):
            raise damaged(f"prices.{name}", data[name], "true or false")
    kind = data["kind"]
    if kind not in KINDS:
        raise damaged("prices.kind", kind, f"one of {', '.join(KINDS)}")
    if (kind in ("roofline", "fused")) != ("device" in data) or (kind == "table") != ("table" in data):
        raise damaged("prices", data, "a roofline with its device, a table, or another kind without them")
    if "backward" in data and (kind != "table" or data.get("training")):
        raise damaged("prices.backward", data["backward"], "absent: the prices are not a table that includes it")
    if "device" in data:
        check_device("prices.device", data["device"])
    for name in ("table", "backward"):
        if name in data:
            check_numbers(f"prices.{name}", data[name])
    return PriceRecord(**data)


def _renamed(prices: PriceRecord | None, nodes: Mapping[str, Node]) -> PriceRecord | None:
    """Return the record with the names that the nodes of its tables have in this graph."""
    if prices is None or prices.table is None:
        return prices

    def renamed(field: str, table: Mapping[str, float] | None) -> dict[str, float] | None:
        if strange := next((name for name in table or () if name not in nodes), None):
            raise damaged(f"prices.{field}", strange, "the name of a node of the plan's graph")
        return None if table is None else {nodes[name].name: float(value) for name, value in table.items()}

    return replace(prices, table=renamed("table", prices.table), backward=renamed("backward", prices.backward))


def _routing(data: object) -> Literal["direct", "relay"]:
    """Return how values are routed; files that predate the choice have no such field."""
    if data != "direct" and data != "relay":
        raise damaged("routing", data, "'direct' or 'relay'")
    return "direct" if data == "direct" else "relay"


def _policy(data: object) -> str:
    """Return the expression of the policy; files that predate it, and plans of functions, have none."""
    if not isinstance(data, str) or not data.isprintable() or len(data) > MOST_TEXT:
        raise damaged("policy", data, "the text of a policy")
    return data


def _parts(data: object) -> list[Part]:
    """Return the parts of a plan file."""
    if not isinstance(data, list):
        raise damaged("parts", data, "a list")
    parts: dict[PartKey, Part] = {}
    for i, entry in enumerate(data):
        if not isinstance(entry, Mapping) or not {"key", "device", "call"} <= entry.keys():
            raise damaged(f"parts[{i}]", entry, "an object with a key, a device and a call")
        part = _part(f"parts[{i}]", entry)
        if part.key in parts:  # 1, 1.0 and true are equal, hence the same key
            raise damaged(f"parts[{i}].key", entry["key"], "a name that differs from those before")
        parts[part.key] = part
    return list(parts.values())


def _part(place: str, entry: Mapping[str, Any]) -> Part:
    key, device, call, replicas = entry["key"], entry["device"], entry["call"], entry.get("replicas", 1)
    if not isinstance(call, str) or call not in CALLS:
        raise damaged(f"{place}.call", call, "'plain' or 'checkpoint'")
    if flaw_of_replicas(replicas):
        raise damaged(f"{place}.replicas", replicas, "a whole number, 1 or more")
    name, planned_on = read_key(f"{place}.key", key), entry.get("planned_on")
    on = None if planned_on is None else read_key(f"{place}.planned_on", planned_on)
    try:
        where = None if device is None else device_from_json(device)
        return Part(name, where, "plain" if call == "plain" else "checkpoint", replicas, on)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise damaged(f"{place}.device", device, "null or the name of a device") from error


def _check_places(data: object, count: int) -> None:
    if not isinstance(data, Mapping):
        raise damaged("places", data, "an object of node names")
    for name, where in data.items():
        if not isinstance(where, list) or not all(i is None or (type(i) is int and 0 <= i < count) for i in where):
            raise damaged(f"places[{name!r}]", where, f"a list of nulls and numbers below {count}")


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


def write_json(path: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write JSON atomically, as `splitkit.files.write_file` does.

    Raises:
        FileError: SK504 if the file cannot be written.
    """
    try:
        files.write_file(path, json.dumps(data, indent=1) + "\n")
    except (OSError, ValueError, RecursionError) as error:
        raise files.refusal(path, error) from error


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileError: SK504 if the file cannot be read, SK501 if it is not a JSON object or names a field twice.
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
        raise FileError("SK501", f"{path} does not hold a JSON object", "Name a file that splitkit wrote.")
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"two fields have the same name among {reprlib.repr([name for name, _ in pairs])}")
    return found
