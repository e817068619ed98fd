"""Save and load plans as JSON: places by node name, a schema number and a fingerprint of the graph; never code."""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import fx
from torch.fx import Node

from splitkit import files
from splitkit._torch import target_name
from splitkit.errors import FileError, PlanError, PlanWarning, SplitError
from splitkit.graph.canonical import CanonicalForm, canonical_form, value_text
from splitkit.plans.parts import (
    CALLS,
    Claim,
    Offloaded,
    Part,
    PartKey,
    PlanRequest,
    check_device,
    check_numbers,
    check_short_text,
    damaged,
    device_from_json,
    flaw_of_replicas,
    key_from_json,
    key_to_json,
    names_of_offloaded,
    offloaded_from_json,
    offloaded_to_json,
    read_key,
    request_from_json,
    request_to_json,
)
from splitkit.price_record import KINDS, PriceRecord, printable

# Match the nodes that a plan file names to the nodes of a graph: by name if the graph is the same, else by form.
#
# A plan file describes each node of its graph by one string, in canonical order (`splitkit.graph.canonical`)::
#
#     "add_3 1f2e3d4c float32[2, 16]"          name, digest of the computation, type of the value
#
# When the same model is captured in another process, its nodes may have other names and another order.


class DescribedNode(NamedTuple):
    """A node as a plan file describes it: its name, a digest of its computation, and its value (``float32[2, 16]``)."""

    name: str
    digest: str
    value: str


def describe_nodes(graph: fx.Graph) -> list[str]:
    """Return the description of each node of a graph; an empty list if the graph has no canonical form."""
    form = _form_of(graph)
    if form is None:
        return []
    pairs = zip(form.nodes, form.digests, strict=True)
    return [f"{node.name} {digest} {value_text(node)}".rstrip() for node, digest in pairs]


def parse_nodes(data: object) -> list[DescribedNode]:
    """Parse the node descriptions of a plan file; early versions of the file have none.

    Raises:
        FileError: SK501 if a description is damaged.
    """
    fields = [text.split(" ", 2) if isinstance(text, str) else [] for text in data] if isinstance(data, list) else [[]]
    names = {some[0] for some in fields if some}
    if not all(len(some) > 1 for some in fields) or len(names) < len(fields):
        raise FileError(
            "SK501", "the plan is damaged: its nodes are not a list of distinct names with digests", "Plan again."
        )
    return [DescribedNode(name, digest, rest[0] if rest else "") for name, digest, *rest in fields]


def match_nodes(
    graph: fx.Graph, known: Sequence[DescribedNode], placed: Collection[str], same: bool
) -> dict[str, Node]:
    """Return a mapping from the node names of a file to the nodes of a graph, for every name that the file places.

    Args:
        graph: the graph that the plan is loaded for.
        known: the descriptions in the file.
        placed: the names that the file places.
        same: whether the graph has the same fingerprint as the one in the file.

    Raises:
        FileError: SK502 if the graph is a different one; the message says where the two differ first.
    """
    by_name = {node.name: node for node in graph.nodes}
    missing = [name for name in placed if name not in by_name]
    if same and not missing:
        return by_name
    form = _form_of(graph) if known else None
    if form is None:
        raise _another(
            f": {missing[0]!r} and {len(missing) - 1} more of its nodes are not in this graph" if missing else "",
            missing,
        )
    if (number := form.first_difference([node.digest for node in known])) is not None:
        raise _another(_where(form, known, number), [known[number].name] if number < len(known) else missing)
    by_form = {other.name: node for other, node in zip(known, form.nodes, strict=True)}
    if lost := [name for name in placed if name not in by_form]:
        raise _another(f": {lost[0]!r} and {len(lost) - 1} more of its nodes have no description", lost)
    return by_form


def size_differences(known: Sequence[DescribedNode], nodes: Mapping[str, Node]) -> str:
    """Describe a value, an input if possible, whose shape or dtype differs from the file; "" if none differs."""
    pairs = [(node, d.value) for d in known if (node := nodes.get(d.name)) is not None]
    found = [(node, was, now) for node, was in pairs if was and (now := value_text(node)) and now != was]
    if not found:
        return ""
    node, was, now = min(found, key=lambda some: _FIRST.get(some[0].op, len(_FIRST)))
    name = node.target if node.op in _FIRST else node.name
    return f"{name} was {was} and is {now}" + (f", and so for {len(found) - 1} more" if len(found) > 1 else "")


_FIRST = {"placeholder": 0, "get_attr": 1}  # the sizes of other nodes follow from these


def _form_of(graph: fx.Graph) -> CanonicalForm | None:
    root = graph.owning_module
    if not isinstance(root, fx.GraphModule):
        return None
    try:
        return canonical_form(root)
    except SplitError:  # such a graph cannot be split either
        return None


def _where(form: CanonicalForm, known: Sequence[DescribedNode], number: int) -> str:
    theirs = f"{known[number].name!r} of the plan" if number < len(known) else "the end of the plan's"
    if number == len(form.nodes):
        return f": they first differ at {theirs}, and this graph has no more nodes"
    return f": they first differ at {theirs} and {form.nodes[number].name!r} of this graph"


def _another(what: str, nodes: Collection[str]) -> FileError:
    return FileError(
        "SK502",
        f"the plan was made for another graph{what}",
        "Capture the model in the same way (same mode and torch version), or plan again.",
        nodes,
    )


SCHEMA = 1  # of the JSON of a plan; plans of another schema are refused
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
        "nodes": describe_nodes(graph) if graph else [],
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
    known = parse_nodes(data.get("nodes", []))
    moved = tuple(names_of_offloaded(data.get("offloaded")))
    by_name = match_nodes(graph, known, (*data["places"], *moved), same)
    if other := size_differences(known, by_name):
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


_OPTIONAL_OF_PRICES = ("device", "tf32", "mesh", "training", "table", "backward")


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
    mesh = data.get("mesh", {})
    if not (isinstance(mesh, Mapping) and ("device" in data or not mesh) and all(map(_is_link, mesh.values()))):
        raise damaged("prices.mesh", mesh, "the links of a roofline by the names of dimensions")
    for name in ("table", "backward"):
        if name in data:
            check_numbers(f"prices.{name}", data[name])
    return PriceRecord(**data)


def _is_link(data: object) -> bool:
    """Whether data are the fields of a `splitkit.costs.Link`; its figures are checked when it is made."""
    return isinstance(data, Mapping) and data.keys() <= {"bandwidth", "latency", "source"} and "bandwidth" in data


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


# Writes a policy as an expression, such as ``Stages(4, schedule='1f1b')``, for plans and their files.


MOST_TEXT = 2000
"""The length of the longest expression that is kept."""
_PLAIN = (int, float, str, bool, type(None))


def policy_text(policy: object) -> str:
    """Return the expression that makes a policy again; empty if a parameter is not a literal, as a function is not.

    Parameters that have their default are left out. A policy may give its expression itself, as an attribute
    ``expression``.
    """
    own = getattr(policy, "expression", None)
    text = own if isinstance(own, str) else _call(policy)
    return text if text is not None and text == printable(text, MOST_TEXT) else ""


def _call(policy: object) -> str | None:
    """Return the call of a policy's class; ``None`` if it cannot be written."""
    if not is_dataclass(policy) or isinstance(policy, type) or not hasattr(policy, "assign"):
        return None
    words: list[str] = []
    for number, field in enumerate(fields(policy)):
        value = getattr(policy, field.name)
        if not field.init or _is_default(field, value):
            continue
        text = _literal(value)
        if text is None:
            return None
        words.append(text if len(words) == number == 0 else f"{field.name}={text}")
    return f"{type(policy).__name__}({', '.join(words)})"


def _is_default(field: Field[Any], value: object) -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return type(value) is type(default) and bool(value == default)


def _literal(value: object) -> str | None:
    """Return the text of a literal, or of a policy, device or link that is a parameter."""
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) in (list, tuple):
        texts = [_literal(item) for item in value]  # type: ignore[attr-defined]
        if None in texts:
            return None
        inner = ", ".join(filter(None, texts))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(texts) == 1 else ''})"
    if isinstance(value, Mapping):
        pairs = [(_literal(key), _literal(item)) for key, item in value.items()]
        if any(None in pair for pair in pairs):
            return None
        return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
    own = getattr(value, "expression", None)
    return own if isinstance(own, str) else _call(value)
