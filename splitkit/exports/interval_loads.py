"""The load of every run of consecutive layers as a stage: its work, and the values that it sends and receives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from torch.fx import Node

from splitkit.exports.layer_sequence import LayerSequence
from splitkit.search.devices.device_request import DeviceRequest
from splitkit.search.placement_model import PlacementModel
from splitkit.search.request import StageRequest

Floats = npt.NDArray[np.float64]


def interval_loads(sequence: LayerSequence, request: StageRequest, seconds: Mapping[Node, float]) -> Floats:
    """Return (n + 1, n + 1) seconds of the layers from i to j, exclusive, as one stage; infinite unless i < j.

    A load is the work of the nodes, the work of the shared nodes that the stage needs, and each value that crosses the
    stage's borders once. Links that are not alike count as the one between the first two devices.

    Args:
        sequence: the layers.
        request: the links, and whether gradients come back.
        seconds: the price of each node on the stage's device.
    """
    count = len(sequence.layers)
    work = np.concatenate([[0.0], np.cumsum([sum(seconds[n] for n in layer.nodes) for layer in sequence.layers])])
    total = np.array(work[None, :] - work[:, None])
    for node, layers in sequence.readers.items():
        _add(total, layers, seconds[node], whole=True)
    ends = list(request.keys) if isinstance(request, DeviceRequest) else list(range(2))
    travel = request.travel(ends[:2])
    if travel is not None:
        model = PlacementModel(sequence.flow, request.costs, [seconds])
        prices = travel.seconds(model.value_bytes)
        for (_, pins), price in zip(model.values, prices.tolist(), strict=True):
            maker = model.units[pins[0]]
            if maker in sequence.number:  # a shared value never crosses
                _add(total, _layers_of(sequence, (model.units[pin] for pin in pins)), price, whole=False)
    inside = np.arange(count + 1)
    return np.where(inside[:, None] < inside[None, :], total, np.inf)


def _layers_of(sequence: LayerSequence, nodes: Iterable[object]) -> set[int]:
    return {sequence.number[node] for node in nodes if node in sequence.number}  # type: ignore[index]


def _add(total: Floats, pins: Iterable[int], price: float, *, whole: bool) -> None:
    """Add a price to the runs that have some of the pins; without ``whole`` only if they do not have all.

    A run from i to j has none of the pins if two neighbouring pins p and q enclose it: i > p and j <= q.
    """
    ordered, last = sorted(pins), len(total) - 1
    total += price
    for before, after in zip([-1, *ordered], [*ordered, last], strict=True):
        total[before + 1 : after + 1, : after + 1] -= price
    if not whole and ordered:
        total[: ordered[0] + 1, ordered[-1] + 1 :] -= price
