"""What a plan was made for: purpose, schedule, links, memory and devices. All readers of a plan price it for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, cast, get_args

from splitkit.checks import MOST, is_whole, is_word
from splitkit.hardware.device_specs import Device
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
        links: the links between the devices: the name of a preset, or the fields of a `splitkit.costs.Links`
            (`splitkit.costs.links.links_data`); ``None`` for transfers that are free.
        memory: the bytes of every rank or device, or of each of them; ``None``: what the devices have, else no limit.
        tokens: for inference, the tokens of cache for which there is room.
        cache: name of a node -> bytes of cache per token, if the policy was told.
        devices: key of each device that the policy was given, in its order -> the device; ``planned_on`` of a part says
            on which it runs.
    """

    purpose: Purpose = ""
    optimizer: Optimizer = None
    schedule: str | None = None
    microbatches: int | None = None
    links: str | Mapping[str, Any] | None = None
    memory: int | tuple[int | None, ...] | None = None
    tokens: int = 0
    cache: Mapping[str, int] | None = field(default=None, repr=False)
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
    if isinstance(request.memory, tuple):
        given["memory"] = list(request.memory)
    return {name: value for name, value in given.items() if value not in (None, "", 0, [])}


def request_from_json(data: object) -> PlanRequest:
    """Return the request that a plan file holds; a file without one says nothing.

    Raises:
        FileError: SK501 if the data is damaged.
    """
    if data is None:
        return PlanRequest()
    if not isinstance(data, Mapping) or not data.keys() <= {one.name for one in fields(PlanRequest)}:
        raise damaged("request", data, "an object with the fields of a request")
    for name in ("purpose", "optimizer", "schedule"):
        check_short_text(f"request.{name}", data.get(name, ""))
    if (purpose := data.get("purpose", "")) not in get_args(Purpose):
        raise damaged("request.purpose", purpose, "'inference' or 'training'")
    if (optimizer := data.get("optimizer")) not in (None, *OPTIMIZERS) or (purpose == "training") != bool(optimizer):
        raise damaged("request.optimizer", optimizer, f"one of {', '.join(OPTIMIZERS)}, for training alone")
    for name, least, most in (("microbatches", 1, MOST), ("tokens", 0, MOST_BYTES)):
        if name in data and not _is_within(data[name], least, most):
            raise damaged(f"request.{name}", data[name], f"a whole number from {least} to {most}")
    if "cache" in data:
        check_numbers("request.cache", data["cache"])
    read = {"links": _links(data.get("links")), "memory": _memory(data.get("memory"))}
    return PlanRequest(**{**data, **read, "devices": _devices(data.get("devices", []))})


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
    if data is None or isinstance(data, str):
        check_short_text("request.links", data or "")
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
    check_numbers("request.links", {name: data[name] for name in ("bandwidth", "latency")})
    return data


def _is_within(value: object, least: int, most: int) -> bool:
    return is_whole(value, least) and value <= most
