"""Parts of a plan (their keys, devices and ways to be called) and the claim that a policy makes about its plan."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import ceil
from typing import Any, Literal, cast, get_args

import torch
from torch.fx import Node

from splitkit.checks import MOST, is_whole, is_word, shown
from splitkit.errors import CostError, FileError, PlanError
from splitkit.hardware.device_specs import Device
from splitkit.hardware.link_specs import Link, find_link
from splitkit.late_policies import LatePolicies
from splitkit.price_record import MOST_LETTERS
from splitkit.prices import MOST_BYTES, MOST_SECONDS, Optimizer
from splitkit.short_repr import brief

PartKey = Hashable
"""The key of a part: ``0``, ``"backward"``, ``("cuda:0", 3)``."""

PARENT: PartKey = None
"""The place of nodes that no part computes: the graph that calls the parts."""

CALLS = ("plain", "checkpoint")
"""The ways in which the parent may call a part."""

_MAXIMISED = frozenset(("tokens",))
_EXACT = 1e-5  # smaller gaps are rounding
_BETTER: Mapping[str, tuple[str, str]] = {
    "bottleneck": ("Slowest", "is {} faster"),
    "makespan": ("Busiest", "is {} faster"),
    "step": ("Busiest", "is {} faster"),
    "tokens": ("Tightest", "has room for {} more tokens"),
    "parts": ("Fullest", "has {} fewer parts"),
    "traffic": ("Fullest", "sends {} fewer bytes"),
    "waiting": ("Largest", "leaves {} fewer bytes waiting"),
}
"""Objective -> what the limiting part is, and what no plan does: ``{}`` is how much, or empty."""

NAMING = "Name parts with ints, strings, devices or tuples of these."
"""The remedy for a key that cannot name a part."""


def flaw_of_key(key: object) -> str:
    """Return why a key cannot name a part; an empty string if it can."""
    if isinstance(key, torch.Tensor):
        return "equal tensors are different keys (take key.item())"
    try:
        hash(key)
    except Exception:
        return f"a {type(key).__name__} cannot be a key"
    return next(filter(None, map(flaw_of_key, key)), "") if isinstance(key, tuple) else ""


@dataclass(frozen=True)
class Part:
    """The properties of a part other than its nodes.

    Attributes:
        key: its name.
        device: where it should run. The engine moves nothing; the runtime does.
        call: ``"plain"``; or ``"checkpoint"``, which saves only the part's inputs and runs it again in backward
            (`torch.utils.checkpoint`).
        replicas: the number of devices that run it, each with all of its parameters and an equal share of every
            microbatch (data parallel). The engine makes one part; the runtime replicates it.
        planned_on: the key of the device that the part was planned for, where the policy was given devices
            (``devices`` of the plan's request); it stays when the part gets another key.
    """

    key: PartKey
    device: torch.device | None = None
    call: Literal["plain", "checkpoint"] = "plain"
    replicas: int = 1
    planned_on: PartKey = None

    def __post_init__(self) -> None:
        call: object = self.call
        device: object = self.device
        if self.key is PARENT:
            raise PlanError("SK206", "None stands for the parent, which is not a part", "Name the part.")
        if flaw := flaw_of_key(self.key):
            raise PlanError("SK206", f"{self.key!r} cannot name a part: {flaw}", NAMING)
        if not isinstance(call, str) or call not in CALLS:
            raise PlanError("SK206", f"part {self.key!r} has call={call!r}", "Use 'plain' or 'checkpoint'.")
        if device is not None and not isinstance(device, torch.device):
            raise PlanError(
                "SK206",
                f"part {self.key!r} has device={device!r}, which is not a torch.device",
                "Use torch.device('cuda:0').",
            )
        if flaw := flaw_of_replicas(self.replicas):
            raise PlanError("SK206", f"part {self.key!r} has replicas={flaw}", "Use a whole number, 1 or more.")
        object.__setattr__(self, "replicas", int(self.replicas))


def flaw_of_replicas(given: object) -> str:
    """Return the text of an invalid number of replicas; an empty string if it is valid."""
    return "" if is_whole(given, 1) and int(given) <= MOST else shown(given)


@dataclass(frozen=True)
class Claim:
    """What a policy asserts about the quality of its plan.

    Attributes:
        objective: the minimised quantity: ``"bottleneck"`` (seconds of the most loaded part), ``"makespan"`` (seconds
            of one sample), ``"parts"`` (how many), ``"traffic"`` (bytes) or ``"waiting"`` (bytes between the input part
            and the weight part, with seconds at a price); or the maximised ``"tokens"`` (of cache).
        value: the objective of this plan.
        bound: a lower bound on the objective of every plan within the same limits; for tokens an upper bound.
        solver: the method that found the plan, and the one that proved the bound if it is a different one.
        limiting: the part that determines the value, such as the most loaded one.
        tolerance: the relative distance from the bound that counts as optimal: rounding errors of the proof, or what
            the policy gave up to balance the parts.
        evenness: Jain's index of the parts' loads, from 0 to 1 (`evenness`); None if the policy did not balance them.
    """

    objective: str
    value: float
    bound: float
    solver: str
    limiting: PartKey
    tolerance: float = 1e-9  # rounding of double-precision sums over some 10^6 nodes
    evenness: float | None = None

    @property
    def gap(self) -> float:
        """An upper bound on how much lower the objective could be, as a fraction of the value.

        For tokens, how much higher it could be, as a fraction of the bound.
        """
        low, high = self.range
        return max(0.0, 1 - low / high) if high else 0.0

    @property
    def range(self) -> tuple[float, float]:
        """The bound and the value, the lower one first: for tokens, which are maximised, that is the value."""
        return (self.value, self.bound) if self.objective in _MAXIMISED else (self.bound, self.value)

    @property
    def optimal(self) -> bool:
        """Whether the plan is proven optimal within the tolerance."""
        return self.gap <= self.tolerance

    @property
    def proof(self) -> str:
        """How much better a plan could be, as a sentence without its full stop."""
        low, high = self.range
        if high > 0 >= low:
            return "How much better a plan could be is not known"
        more = high / low - 1 if self.objective in _MAXIMISED and low else self.gap
        some = "" if self.gap < _EXACT else f"more than {ceil(1000 * more - 1e-6) / 10:g} %"
        does = _BETTER.get(self.objective, ("", f"has {{}} less {self.objective}"))[1]
        return " ".join(f"No plan {does.format(some)}".split())

    def told(self, *about: str) -> str:
        """Return sentences for notes, without the last full stop: the limiting part with what is known of it, and
        `proof`.
        """
        key = self.limiting
        kind = "stage" if self.objective in ("bottleneck", "step", "tokens") else "part"
        part = f"{kind} {key}" if isinstance(key, int) else " ".join(map(str, key if isinstance(key, tuple) else [key]))
        limit = ", ".join((f"{_BETTER.get(self.objective, ('Limit', ''))[0]}: {part}", *about))
        return f"{limit}. {self.proof}"

    def __str__(self) -> str:
        return self.told()


def above_mean(load: float, mean: float) -> str:
    """Return ``7 % above the mean``."""
    return f"{100 * (load / mean - 1) if mean else 0.0:.0f} % above the mean"


def evenness(loads: Sequence[float]) -> float:
    """Return how even loads are: 1 if all are equal, 1 / n if one of n carries everything.

    This is Jain's index, the squared sum over n times the sum of squares ("A quantitative measure of fairness", 1984).
    """
    top = max(loads, default=0.0)
    shares = [load / top for load in loads] if top else []
    return sum(shares) ** 2 / (len(shares) * sum(s * s for s in shares)) if shares else 1.0


# What a plan was made for: purpose, schedule, links, memory and devices. All readers of a plan price it for that.


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
        chunk: the most new tokens of a step of a decoder; ``None`` if its steps are as the captured one.
        offload: the links of a device to its host (``"out"``) and back, over which saved values may move.
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
    chunk: int | None = None
    offload: Mapping[str, Any] | None = field(default=None, repr=False)

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
    for name, least, most in (
        ("microbatches", 1, MOST),
        ("ranks", 1, MOST),
        ("tokens", 0, MOST_BYTES),
        ("chunk", 1, MOST),
    ):
        if name in data and not _is_within(data[name], least, most):
            raise damaged(f"request.{name}", data[name], f"a whole number from {least} to {most}")
    if "cache" in data:
        check_numbers("request.cache", data["cache"])
    devices = _devices(data.get("devices", []))
    read = {
        "schedule": _schedule(data.get("schedule")),
        "links": _links(data.get("links")),
        "offload": _offload(data.get("offload")),
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


def _offload(data: object) -> Mapping[str, Any] | None:
    if data is not None and (not isinstance(data, Mapping) or data.keys() != {"out", "back"}):
        raise damaged("request.offload", data, "an object with the links out and back")
    return None if data is None else {way: _link(link) for way, link in data.items()}


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


# Fields of several records of a plan file: keys of parts, devices, numbers, texts; checked when they are read.


_DEVICE_NUMBERS = ("bandwidth", "memory", "launch")


def check_short_text(field: str, data: object) -> None:
    """Refuse what is no short text for people."""
    if not isinstance(data, str) or not data.isprintable() or len(data) > MOST_LETTERS:
        raise damaged(field, data, "a short text")


def check_device(field: str, data: object) -> None:
    """Refuse data that does not describe a device; `splitkit.costs.Device` checks the figures."""
    known = {"name", "peak", "source", "kernels", *_DEVICE_NUMBERS}
    if not isinstance(data, Mapping) or data.keys() | {"kernels"} != known:  # older files name no kernels
        raise damaged(field, data, f"an object with {', '.join(sorted(known))}")
    for name in ("name", "source", "kernels"):
        if not isinstance(data.get(name, ""), str) or not data.get(name, "").isprintable():
            raise damaged(f"{field}.{name}", data[name], "a text")
    check_numbers(f"{field}.peak", data["peak"])
    check_numbers(field, {name: data[name] for name in _DEVICE_NUMBERS})


def check_numbers(field: str, data: object) -> None:
    """Refuse what is no object of numbers within the range of prices."""
    if not isinstance(data, Mapping):
        raise damaged(field, data, "an object of numbers")
    for name, value in data.items():
        if type(value) not in (int, float) or not 0 <= value <= MOST_SECONDS:
            raise damaged(f"{field}[{name!r:.100}]", value, f"a number from 0 to {MOST_SECONDS:.0e}")


def key_to_json(key: PartKey) -> Any:
    """Return the JSON form of the key of a part; raise SK206 for one that has none."""
    if isinstance(key, str):
        return str.__str__(key)  # a plain str, also for an instance of a subclass
    if isinstance(key, int | float | bool):
        return key
    if isinstance(key, torch.device):
        return {"device": str(key)}
    if isinstance(key, tuple):
        return [key_to_json(k) for k in key]
    raise PlanError("SK206", f"a part called {key!r} ({type(key).__name__}) cannot be written to a file", NAMING)


def key_from_json(key: Any) -> PartKey:
    """Return what `key_to_json` wrote; raise TypeError, ValueError or RuntimeError for anything else."""
    if isinstance(key, list):
        return tuple(key_from_json(k) for k in key)
    if isinstance(key, Mapping) and key.keys() == {"device"}:
        return device_from_json(key["device"])
    if not isinstance(key, str | int | float | bool):
        raise TypeError(type(key).__name__)
    return key


def read_key(field: str, data: object, wanted: str = "an int, a string, a device or a list of these") -> PartKey:
    """Return the key of a part in a field of a plan file."""
    try:
        return key_from_json(data)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise damaged(field, data, wanted) from error


def read_device(field: str, data: Mapping[str, Any]) -> Device:
    """Return the `splitkit.costs.Device` in a field of a plan file."""
    check_device(field, data)
    try:
        return Device(**data)
    except CostError as error:
        raise FileError("SK501", f"the plan is damaged: {field}: {error.reason}", "Plan again.") from error


def device_from_json(name: object) -> torch.device:
    """Return the torch device of a name; raise TypeError or RuntimeError for anything else."""
    if not isinstance(name, str):  # torch.device(0) would be a GPU
        raise TypeError(type(name).__name__)
    return torch.device(name)


def damaged(field: str, value: object, wanted: str) -> FileError:
    """Return the SK501 of a field of a plan file."""
    return FileError("SK501", f"the plan is damaged: {field} is {reprlib.repr(value)}, not {wanted}", "Plan again.")


# A saved value that waits for backward in the memory of the host, and when it leaves the device and comes back.


_FIELDS = ("value", "release", "fetch")
_OFFLOADED = "a list of distinct values with the nodes after which they leave and before which they return"


@dataclass(frozen=True)
class Offloaded:
    """A saved value of a training step that is moved to the host in forward, and back in backward.

    The copy to the host starts right after the value is made. It runs beside the computation, and so does the copy
    back.

    Attributes:
        value: the node that makes the value.
        release: the node of forward after which the memory on the device is free; if the copy is not complete by then,
            the device waits for it. ``None``: the last node of forward that reads the value.
        fetch: the node of backward before which the copy back starts. ``None``: the first that reads the value.
    """

    value: Node
    release: Node | None = None
    fetch: Node | None = None


def offloaded_to_json(offloaded: Iterable[Offloaded]) -> list[dict[str, str | None]]:
    """Return the JSON form, by node name."""
    nodes = ({name: getattr(one, name) for name in _FIELDS} for one in offloaded)
    return [{name: None if node is None else node.name for name, node in each.items()} for each in nodes]


def names_of_offloaded(data: object) -> Iterator[str]:
    """Yield the names of nodes in the JSON form; files that predate offload have none.

    Raises:
        FileError: SK501 if the data is damaged.
    """
    for entry in data if isinstance(data, list) else [data] if data is not None else []:
        if not isinstance(entry, Mapping) or entry.keys() != set(_FIELDS) or not isinstance(entry["value"], str):
            raise damaged("offloaded", entry, _OFFLOADED)
        for name in filter(None, map(entry.__getitem__, _FIELDS)):
            if not isinstance(name, str):
                raise damaged("offloaded", entry, _OFFLOADED)
            yield name


def offloaded_from_json(data: Sequence[Mapping[str, Any]] | None, nodes: Mapping[str, Node]) -> tuple[Offloaded, ...]:
    """Return what `offloaded_to_json` wrote, after `names_of_offloaded` has checked it."""
    found = tuple(Offloaded(*(nodes[entry[n]] if entry[n] else None for n in _FIELDS)) for entry in data or ())  # type: ignore[arg-type]
    if len({one.value for one in found}) < len(found):
        raise damaged("offloaded", data, _OFFLOADED)
    return found
