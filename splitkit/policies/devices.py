"""The policy `Devices`: a placement on given devices with the least bottleneck or latency."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from splitkit.checks import Memory, are_texts, is_whole, is_word, items_of, memory_of, seconds, shown
from splitkit.costs import Costs, Device, Links
from splitkit.costs.links import as_links
from splitkit.errors import PolicyError
from splitkit.graph.dataflow import Dataflow, enough_nodes
from splitkit.hardware.device_specs import find_device
from splitkit.pipeline.stage_prices import check_stage_optimizer
from splitkit.plans.parts import PartKey
from splitkit.plans.record import Plan
from splitkit.prices import Optimizer
from splitkit.search.device_search import DeviceRequest, DeviceSearch
from splitkit.search.stages.cache_options import CacheOptions, cache_of, check_cache, check_tokens
from splitkit.solvers.clock import Clock

OBJECTIVES = ("throughput", "latency")
# The share of `seconds` that is turned into a number of solver steps. The rest is room for slower machines, which need
# longer for the same steps; for stages several searches run one after another.
_COUNTED, _STAGES_COUNTED = 0.3, 0.1


@dataclass(frozen=True)
class Devices:
    """Place nodes on devices that may differ in speed, memory and links; a device may stay empty.

    ``objective="throughput"`` minimises the bottleneck, the load of the most loaded device: the time between two
    samples of a full pipeline. A device's load is its work and, with ``links``, each value that it sends or receives,
    once. ``objective="latency"`` minimises the time of one sample: a piece starts when all its inputs have arrived and
    delivers its outputs when it ends.

    If all devices are equal, the given costs are the prices; if they differ, each device has the prices of its
    roofline. A CPU among accelerators is the *host* of the placement literature (Tarnawski et al. 2020): it has no
    memory limit and pays nothing for values that cross, unless ``memory`` says how much it has.

    Attributes:
        devices: names that `splitkit.costs.devices` knows, or `splitkit.costs.Device`; parts are then ``0, 1 ...``.
            Or a mapping ``{"cuda:0": "h200"}``: parts have its keys, and run on the torch devices of these names.
        memory: the bytes of each device: one size for all or one for each; by default what the devices have.
        links: the links between the parts' keys, or the name of a preset; ``None``: values cross for free.
        objective: ``"throughput"`` or ``"latency"``.
        pieces: the number of convex pieces that a device may run: 1, or more for latency; ``None``: any number
            (throughput).
        optimizer: the optimizer whose state counts; ``None``: the model is not trained.
        together: patterns of module paths as in `ByName`; all nodes that a pattern matches share a device.
        only: pattern of module paths -> the keys of the devices that can run the nodes that it matches.
        seconds: as in `Stages`, the time after which the search ends, without the analysis of the graph. Usually the
            search ends earlier, after a number of steps, so that a slower machine finds the same plan; if time ended
            it, the note says so.
        tokens: for inference: the tokens of all requests in flight; every device must leave room for their KV cache.
        cache: with tokens, node or its name -> bytes of cache per token, as in `Stages`.
    """

    devices: Sequence[str | Device] | Mapping[PartKey, str | Device]
    memory: Memory = None
    links: str | Links | None = None
    objective: str = "throughput"
    pieces: int | None = 1
    optimizer: Optimizer = None
    together: Sequence[str] = ()
    only: Mapping[str, Collection[PartKey]] = field(default_factory=dict)
    seconds: float = 10.0
    tokens: int = 0
    cache: Mapping[str | Node, int] | None = None

    def __post_init__(self) -> None:
        if (
            isinstance(self.devices, str | bytes)
            or not isinstance(self.devices, Sequence | Mapping)
            or not self.devices
        ):
            raise PolicyError(
                "SK302", f"Devices: devices is {shown(self.devices)}", 'List at least one: ["h200", "h200"].'
            )
        if None in self.given:
            raise PolicyError("SK302", "Devices: None is the host, not a device", "Name it.")
        for device in self.given.values():
            find_device(device)
        memory_of(self, self.memory, len(self.given))
        as_links(self.links)
        check_stage_optimizer(self.optimizer)
        seconds(self, "seconds", self.seconds, endless=False)
        if not is_word(self.objective, *OBJECTIVES):
            text = f"Devices: objective is {shown(self.objective)}"
            raise PolicyError("SK302", text, f"Use {' or '.join(OBJECTIVES)}.")
        self._check_pieces()
        check_tokens("Devices", self.tokens)
        if self.tokens and self.objective == "latency":
            reason = "Devices: tokens= is for several requests in flight, but objective='latency' is for a single one"
            raise PolicyError("SK302", reason, "Leave one of them out.")
        training = {} if self.optimizer is None else {"optimizer": self.optimizer}
        check_cache(self._cached, self.memory, training)
        if not are_texts(self.together):
            text = f"Devices: together is {shown(self.together)}"
            raise PolicyError("SK302", text, "List patterns of module paths: ['transformer.h.*'].")
        self._check_only()

    def _check_only(self) -> None:
        only: object = self.only
        if not isinstance(only, Mapping) or not are_texts(only.keys()):
            text = f"Devices: only is {shown(only)}"
            raise PolicyError("SK302", text, "Give a mapping of patterns of module paths: {'lm_head': [0]}.")
        for pattern, keys in self.only.items():
            if not items_of(keys):
                text = f"Devices: only[{pattern!r}] is {shown(keys)}"
                raise PolicyError("SK302", text, f"List devices: [{next(iter(self.given))!r}].")
            if unknown := [key for key in keys if key not in self.given]:
                known = ", ".join(map(str, self.given))
                raise PolicyError("SK302", f"Devices: only[{pattern!r}] names {unknown[0]!r}", f"Devices are {known}.")

    def _check_pieces(self) -> None:
        pieces, remedy = self.pieces, "Use 1, or None for any number."
        if self.objective == "latency":
            remedy = "Use a whole number >= 1."
            fine = is_whole(pieces, 1)
        else:
            fine = pieces is None or (is_whole(pieces) and pieces == 1)
        if not fine:
            raise PolicyError("SK302", f"Devices: pieces={shown(pieces)} with objective {self.objective!r}", remedy)

    @property
    def _cached(self) -> CacheOptions:
        return CacheOptions("Devices", "throughput" if self.tokens else None, self.tokens, self.cache)

    @property
    def given(self) -> Mapping[PartKey, str | Device]:
        """Return key of the part -> device."""
        return self.devices if isinstance(self.devices, Mapping) else dict(enumerate(self.devices))

    def assign(self, flow: Dataflow, costs: Costs) -> Plan:
        """Return a plan whose parts are the devices' keys, or ``(key, 0), (key, 1) ...`` where a device has pieces.

        Raises:
            NoPlanError: SK303 if nothing fits; it names the nodes that no device supports, or says how much memory
                would do.
        """
        enough_nodes(flow, 1)
        demand = self.request(flow, costs)
        named = isinstance(self.devices, Mapping)
        pieces = None if self.pieces is None else min(self.pieces, len(flow.nodes))
        soon = self.objective == "latency"
        counted = (_STAGES_COUNTED if pieces == 1 and not soon else _COUNTED) * self.seconds
        demand.analyze()
        return DeviceSearch(demand, soon, pieces, counted, named, clock=Clock(self.seconds)).plan()

    def request(self, flow: Dataflow, costs: Costs) -> DeviceRequest:
        """Return what is asked of a search on a graph: the prices of each device, and all limits."""
        per_token = cache_of(self._cached, flow, costs) if self.tokens else {}
        return DeviceRequest(
            policy=self,
            flow=flow,
            costs=costs,
            memory=self.memory,
            links=as_links(self.links),
            optimizer=self.optimizer,
            backward=self.optimizer is not None,
            cache={node: self.tokens * nbytes for node, nbytes in per_token.items()},
            devices={key: find_device(device) for key, device in self.given.items()},
            together=self.together,
            only=self.only,
        )
