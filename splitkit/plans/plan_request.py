"""What a plan was made for: purpose, schedule, links, memory and devices. All readers of a plan price it for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, cast, get_args

from splitkit.checks import MOST, is_whole, is_word
from splitkit.errors import CostError
from splitkit.hardware.device_specs import Device
from splitkit.hardware.link_specs import Link, find_link
from splitkit.late_policies import LatePolicies
from splitkit.plans.parts import PartKey
from splitkit.plans.plan_json import check_numbers, check_short_text, damaged, key_to_json, read_device, read_key
from splitkit.prices import MOST_BYTES, Optimizer
from splitkit.short_repr import brief

Purpose = Literal["", "inference", "training"]
OPTIMIZERS: tuple[str, ...] = get_args(get_args(Optimizer)[0])
PlannedOptimizer = Optimizer | Literal["planned"]
"""The optimizer that a reader of plans counts; ``"planned"``: the optimizer of the plan's request."""
ASSUMED: Optimizer = "adam"
"""The optimizer that readers assume for a plan that does not say what it is for."""
UNSAID = "assumed: the plan does not say what it is for"


@dataclass(frozen=True)
class PlanRequest:
    """What a plan was made for.

    Attributes:
        purpose: ``"inference"`` or ``"training"``; empty if the plan does not depend on it, and nobody said.
        optimizer: the optimizer whose state counts in training.
        schedule: the schedule of the pipeline, if there is one.
        microbatches: the microbatches of its step; ``None`` for two per stage.
        ranks: how many ranks share the stages; ``None`` for as many as the schedule usually has.
        links: the links between the devices: the name of a preset, or the fields of a `splitkit.costs.Links`
            (`splitkit.costs.links.links_data`); ``None`` for transfers that are free.
        memory: the bytes of every rank or device, or of each of them; ``None``: what the devices have, else no limit.
        tokens: for inference, the tokens of cache for which there is room.
        cache: name of a node -> bytes of cache per token, if the policy was told.
        together: patterns of module paths; all nodes that one pattern matches go to one device.
        only: pattern of module paths -> keys of the devices that can run the nodes it matches.
        devices: key of each device that the policy was given, in its order -> the device; ``planned_on`` of a part says
            on which it runs.
    """

    purpose: Purpose = ""
    optimizer: Optimizer = None
    schedule: str | None = None
    microbatches: int | None = None
    ranks: int | None = None
    links: str | Mapping[str, Any] | None = None
    memory: int | tuple[int | None, ...] | None = None
    tokens: int = 0
    cache: Mapping[str, int] | None = field(default=None, repr=False)
    together: tuple[str, ...] = field(default=(), repr=False)
    only: Mapping[str, tuple[PartKey, ...]] = field(default_factory=dict, repr=False)
    devices: Mapping[PartKey, Device] = field(default_factory=dict, repr=False)

    __repr__ = brief

    @property
    def counted(self) -> Optimizer:
        """The optimizer whose state counts; Adam is assumed where nobody said what the plan is for."""
        return self.optimizer if self.purpose else ASSUMED

    def counting(self, optimizer: PlannedOptimizer) -> Optimizer:
        """Return the given optimizer, or the one that counts for what is planned."""
        return self.counted if is_word(optimizer, "planned") else cast("Optimizer", optimizer)

    @property
    def kinds(self) -> int:
        """How many different devices there are."""
        return len(set(self.devices.values()))


def request_to_json(request: PlanRequest) -> dict[str, Any]:
    """Return the JSON form of a request, without the fields that have their default."""
    given = {one.name: getattr(request, one.name) for one in fields(request)}
    given["devices"] = [{"key": key_to_json(key), **asdict(device)} for key, device in request.devices.items()]
    if isinstance(request.links, Mapping):
        pairs = [[key_to_json(a), key_to_json(b), link] for a, b, link in request.links["pairs"]]
        given["links"] = {**request.links, "pairs": pairs}
    for name in ("memory", "together"):
        given[name] = list(given[name]) if isinstance(given[name], tuple) else given[name]
    given["only"] = {pattern: [key_to_json(key) for key in keys] for pattern, keys in request.only.items()}
    if request.schedule is not None and not LatePolicies.is_schedule(request.schedule):
        given["schedule"] = {"own": request.schedule}
    return {name: value for name, value in given.items() if value not in (None, "", 0, [], {})}


def request_from_json(data: object) -> PlanRequest:
    """Return the request that a plan file holds; a file without one says nothing.

    Raises:
        FileError: SK501 if the data is damaged.
    """
    if data is None:
        return PlanRequest()
    if not isinstance(data, Mapping) or not data.keys() <= {one.name for one in fields(PlanRequest)}:
        raise damaged("request", data, "an object with the fields of a request")
    for name in ("purpose", "optimizer"):
        check_short_text(f"request.{name}", data.get(name, ""))
    if (purpose := data.get("purpose", "")) not in get_args(Purpose):
        raise damaged("request.purpose", purpose, "'inference' or 'training'")
    if (optimizer := data.get("optimizer")) not in (None, *OPTIMIZERS) or (purpose == "training") != bool(optimizer):
        raise damaged("request.optimizer", optimizer, f"one of {', '.join(OPTIMIZERS)}, for training alone")
    for name, least, most in (("microbatches", 1, MOST), ("ranks", 1, MOST), ("tokens", 0, MOST_BYTES)):
        if name in data and not _is_within(data[name], least, most):
            raise damaged(f"request.{name}", data[name], f"a whole number from {least} to {most}")
    if "cache" in data:
        check_numbers("request.cache", data["cache"])
    devices = _devices(data.get("devices", []))
    read = {
        "schedule": _schedule(data.get("schedule")),
        "links": _links(data.get("links")),
        "memory": _memory(data.get("memory")),
        "together": _patterns("request.together", data.get("together", [])),
        "only": _only(data.get("only", {}), devices),
        "devices": devices,
    }
    return PlanRequest(**{**data, **read})


def _schedule(data: object) -> str | None:
    """Return the name of a schedule; of a schedule of the user's own, which may not be registered here, ``own`` is."""
    if isinstance(data, Mapping) and data.keys() == {"own"}:
        check_short_text("request.schedule.own", data["own"])
        return str(data["own"])
    if data is not None and (not isinstance(data, str) or not LatePolicies.is_schedule(data)):
        raise damaged("request.schedule", data, "the name of a schedule")
    return data


def _patterns(field_: str, data: object) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(one, str) and one.isprintable() for one in data):
        raise damaged(field_, data, "a list of patterns of module paths")
    return tuple(data)


def _only(data: object, devices: Mapping[PartKey, Device]) -> dict[str, tuple[PartKey, ...]]:
    if not isinstance(data, Mapping):
        raise damaged("request.only", data, "an object of patterns of module paths")
    _patterns("request.only", list(data))
    found = {}
    for pattern, keys in data.items():
        read = [read_key(f"request.only[{pattern!r:.100}]", key) for key in keys] if isinstance(keys, list) else []
        if not read or not set(read) <= devices.keys():
            raise damaged(f"request.only[{pattern!r:.100}]", keys, "a list of devices of the request")
        found[pattern] = tuple(read)
    return found


def _devices(data: object) -> dict[PartKey, Device]:
    wanted = "a list of devices with different keys"
    if not isinstance(data, list):
        raise damaged("request.devices", data, wanted)
    found: dict[PartKey, Device] = {}
    for i, entry in enumerate(data):
        if not isinstance(entry, Mapping) or "key" not in entry:
            raise damaged(f"request.devices[{i}]", entry, "an object with a key and the fields of a device")
        fields_of_it = {name: value for name, value in entry.items() if name != "key"}
        key = read_key(f"request.devices[{i}].key", entry["key"])
        found[key] = read_device(f"request.devices[{i}]", fields_of_it)
    if len(found) < len(data):
        raise damaged("request.devices", [entry["key"] for entry in data], wanted)
    return found


def _memory(data: object) -> int | tuple[int | None, ...] | None:
    each = data if isinstance(data, list) else [data]
    if not all(one is None or _is_within(one, 0, 2**70) for one in each):
        raise damaged("request.memory", data, "bytes, or a list of them")
    return tuple(each) if isinstance(data, list) else data  # type: ignore[return-value, arg-type]


def _links(data: object) -> str | Mapping[str, Any] | None:
    if data is None:
        return None
    if isinstance(data, str):
        _require_link(find_link, data)
        return data
    if not isinstance(data, Mapping) or data.keys() != {"between", "inside", "size", "pairs"}:
        raise damaged("request.links", data, "the name of a preset, or an object with between, inside, size and pairs")
    if not isinstance(data["pairs"], list) or not _is_within(data["size"], 0, MOST):
        raise damaged("request.links", data, "links with a list of pairs, and a whole number of devices in a node")
    pairs = []
    for i, entry in enumerate(data["pairs"]):
        if not isinstance(entry, list) or len(entry) != 3:
            raise damaged(f"request.links.pairs[{i}]", entry, "a source, a target and a link")
        pairs.append((*(read_key(f"request.links.pairs[{i}]", end) for end in entry[:2]), _link(entry[2])))
    ends = {name: None if data[name] is None else _link(data[name]) for name in ("between", "inside")}
    return {**ends, "size": data["size"], "pairs": pairs}


def _link(data: object) -> Mapping[str, Any]:
    if not isinstance(data, Mapping) or data.keys() != {"bandwidth", "latency", "source"}:
        raise damaged("request.links", data, "links with bandwidth, latency and source")
    check_short_text("request.links", data["source"])
    _require_link(lambda figures: Link(**figures), data)
    return data


def _require_link(make: Callable[[Any], object], data: Any) -> None:
    """Refuse what makes no link."""
    try:
        make(data)
    except CostError as error:
        raise damaged("request.links", data, "a link that splitkit knows, or the figures of one") from error


def _is_within(value: object, least: int, most: int) -> bool:
    return is_whole(value, least) and value <= most
