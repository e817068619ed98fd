"""A placement problem as arrays: units with prices, nets between them, devices, and constraints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import coo_array

from splitkit.solvers.clock import Clock

GRACE = 2.0
"""Seconds that a search may take besides those that its steps are counted for, so that busy machines end it alike."""

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class BadProblemError(ValueError):
    """A problem that is inconsistent.

    Attributes:
        field: the field of `Problem` or `Slot` that is wrong.
        units: the units concerned.
        devices: the devices concerned.
    """

    def __init__(self, reason: str, field: str, units: tuple[int, ...] = (), devices: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.field = field
        self.units = units
        self.devices = devices


@dataclass(frozen=True)
class Slot:
    """A device on which units can be placed.

    Attributes:
        kind: the row of `Problem.seconds` that prices the units on this device.
        capacity: bytes; infinite by default.
        cpu: whether it is a CPU, which pays for no communication and has no limit on memory.
    """

    kind: int = 0
    capacity: float = float("inf")
    cpu: bool = False


@dataclass(frozen=True, eq=False)
class Problem:
    """Units (n), kinds of devices, nets (m) with their pins (q), order edges (e), devices (d).

    A net is a value and all units that touch it: its first pin makes the value, the others read it. Each device that
    holds some of its pins, but not all, pays its cost once (a CPU pays nothing).

    Attributes:
        seconds: (kinds, n) of work, not negative; infinite where a kind does not support a unit.
        nbytes: (n,) int; the bytes that a unit always needs on its device.
        net_costs: (m,) seconds to move the value of a net, not negative.
        net_starts: (m + 1,) int; the pins of net i are ``pins[net_starts[i]:net_starts[i + 1]]``.
        pins: (q,) int; units.
        edges: (e, 2) int; pairs of units (first, then).
        devices: the devices on which units can be placed.
        colours: (n,) int; units of the same colour share a device. A negative number means no colour.
        backward: (n,) bool; a unit of the backward pass: it follows its colour, and no order holds for it.
        saved: (n,) int; bytes that a unit keeps for every microbatch in flight.
        in_flight: the microbatches in flight in a stage, by the number of stages after it; the last entry holds for all
            further ones. (1, 2, 3, 4) is 1F1B with 4 or more microbatches over 4 stages; empty means none.
        links: (d, d) factors on the cost of a transfer from one device to another; ``None`` for 1 everywhere. A device
            that sends one value to several others pays for the slowest of these links.
        ordered: whether stages take the devices in their given order, the first stage the first device.
        fill: whether every device must get a unit.
    """

    seconds: Floats
    nbytes: Ints
    net_costs: Floats
    net_starts: Ints
    pins: Ints
    edges: Ints
    devices: tuple[Slot, ...]
    colours: Ints
    backward: Bools
    saved: Ints
    in_flight: tuple[int, ...] = ()
    links: Floats | None = None
    ordered: bool = False
    fill: bool = False

    @classmethod
    def of(
        cls,
        seconds: Floats,
        nets: list[tuple[float, tuple[int, ...]]],
        edges: list[tuple[int, int]],
        devices: list[Slot],
        *,
        nbytes: Ints | None = None,
        colours: Ints | None = None,
        backward: Bools | None = None,
        saved: Ints | None = None,
        in_flight: tuple[int, ...] = (),
        links: Floats | None = None,
        ordered: bool = False,
        fill: bool = False,
    ) -> Problem:
        """Return the problem with nets given as ``(cost, pins)``; everything else is optional."""
        units = seconds.shape[-1]
        sizes = [len(pins) for _, pins in nets]
        return cls(
            seconds=np.atleast_2d(np.asarray(seconds, np.float64)),
            nbytes=np.zeros(units, np.int64) if nbytes is None else nbytes,
            net_costs=np.array([cost for cost, _ in nets], np.float64),
            net_starts=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            pins=np.array([pin for _, pins in nets for pin in pins], np.int64),
            edges=np.array(edges, np.int64).reshape(-1, 2),
            devices=tuple(devices),
            colours=np.full(units, -1, np.int64) if colours is None else colours,
            backward=np.zeros(units, np.bool_) if backward is None else backward,
            saved=np.zeros(units, np.int64) if saved is None else saved,
            in_flight=in_flight,
            links=links,
            ordered=ordered,
            fill=fill,
        )

    def __post_init__(self) -> None:
        self._check_units()
        self._check_nets()
        self._check_devices()

    @property
    def units(self) -> int:
        """The number of units."""
        return int(self.seconds.shape[1])

    @cached_property
    def pin_nets(self) -> Ints:
        """(q,) the net of each pin."""
        return np.repeat(np.arange(len(self.net_costs)), np.diff(self.net_starts))

    def _check_units(self) -> None:
        for field in ("nbytes", "colours", "backward", "saved"):
            if len(getattr(self, field)) != self.units:
                raise BadProblemError(f"{field} has {len(getattr(self, field))} entries for {self.units} units", field)
        bad = np.isnan(self.seconds).any(axis=0) | (self.seconds < 0).any(axis=0)
        if bad.any():
            raise BadProblemError("seconds are negative or missing", "seconds", _those(bad))
        for field in ("nbytes", "saved"):
            bad = getattr(self, field) < 0
            if bad.any():
                raise BadProblemError(f"{field} are negative", field, _those(bad))
        for field in ("edges", "pins"):
            ends = getattr(self, field)
            if ends.size and not 0 <= ends.min() <= ends.max() < self.units:
                raise BadProblemError(f"{field} name a unit that is not there", field)

    def _check_nets(self) -> None:
        starts = self.net_starts
        if len(starts) != len(self.net_costs) + 1 or starts[0] != 0 or starts[-1] != len(self.pins):
            raise BadProblemError("net_starts do not divide the pins", "net_starts")
        if (np.diff(starts) < 1).any():
            raise BadProblemError("a net has no pin", "net_starts")
        bad = ~np.isfinite(self.net_costs) | (self.net_costs < 0)
        if bad.any():
            makers = self.pins[starts[:-1][bad]]
            raise BadProblemError(
                "the cost of a net is negative, missing or infinite", "net_costs", tuple(map(int, makers))
            )

    def _check_devices(self) -> None:
        devices = self.devices
        if not devices:
            raise BadProblemError("there is no device", "devices")
        bad = [d for d, device in enumerate(devices) if not 0 <= device.kind < len(self.seconds)]
        if bad:
            raise BadProblemError("a device is of a kind that has no prices", "kind", devices=tuple(bad))
        bad = [d for d, device in enumerate(devices) if not device.capacity >= 0]
        if bad:
            raise BadProblemError("a device has a negative capacity", "capacity", devices=tuple(bad))
        if any(count < 0 for count in self.in_flight):
            raise BadProblemError("the number of microbatches in flight is negative", "in_flight")
        if self.fill and len(devices) > self.units:
            raise BadProblemError(f"{len(devices)} devices are to be filled with {self.units} units", "fill")
        if self.links is None:
            return
        if self.links.shape != (len(devices), len(devices)):
            raise BadProblemError("links are not a square of the devices", "links")
        linked = np.isfinite(self.links) & (self.links >= 0) | np.eye(len(devices), dtype=np.bool_)
        if not linked.all():
            raise BadProblemError("a device has no link to another", "links", devices=_those(~linked.all(axis=1)))


def _those(mask: Bools | np.bool_) -> tuple[int, ...]:
    return tuple(map(int, np.flatnonzero(mask)))


# A builder for mixed-integer programs, block by block, solved by HiGHS.


_NODES = 125_000  # nodes of a search tree times columns in a second, on a slow machine
FAR = 2.0
"""By default the clock ends a program after this many times the seconds that its nodes count for."""
_NEARLY = 0.1  # share of its time that a thread may have left and still count as having had it
_BUSIEST = 30  # how many times slower than alone a program may run
_LIMIT = "Solution limit reached"  # the message of HiGHS at the node limit
_OUT_OF_TIME, _STOPPED = 1, 4  # statuses of scipy: at the time limit; at the node limit, or after an error in presolve


class Rows:
    """The constraints ``low <= matrix @ x <= high``, over columns that are numbered block by block.

    Attributes:
        columns: the number of columns.
    """

    def __init__(self) -> None:
        self.columns = 0
        self._count = 0
        self._entries: list[tuple[Ints, Ints, Floats]] = []
        self._low: list[Floats] = []
        self._high: list[Floats] = []

    def block(self, *shape: int) -> Ints:
        """Return the numbers of new columns."""
        size = int(np.prod(shape))
        self.columns += size
        return np.arange(self.columns - size, self.columns).reshape(shape)

    def add(self, terms: list[tuple[Ints, float]], low: float = -np.inf, high: float = np.inf) -> None:
        """Add one row for each element: a sum of columns times one factor each, all of the same shape."""
        self.add_scaled([(columns, np.full(columns.shape, factor)) for columns, factor in terms], low, high)

    def add_scaled(self, terms: list[tuple[Ints, Floats]], low: float = -np.inf, high: float = np.inf) -> None:
        """Add one row for each element: a sum of columns times factors of the same shape."""
        count = terms[0][0].size
        rows = np.arange(self._count, self._count + count)
        for columns, factors in terms:
            self._entries.append((rows, columns.ravel(), factors.ravel()))
        self._bound(count, low, high)

    def add_sum(self, columns: Ints, factors: Floats, low: float = -np.inf, high: float = np.inf) -> None:
        """Add one row: the sum of all columns times their factors."""
        rows = np.full(columns.size, self._count)
        self._entries.append((rows, columns.ravel(), np.broadcast_to(factors, columns.shape).ravel().astype(float)))
        self._bound(1, low, high)

    def solve(
        self,
        price: Floats,
        whole: Bools,
        low: Floats,
        high: Floats,
        seconds: float,
        clock: Clock,
        *,
        any_will_do: bool = False,
        once: bool = False,
        far: float = FAR,
        nodes: int | None = None,
    ) -> OptimizeResult:
        """Minimise ``price @ x`` with the ``whole`` columns whole: presolved first, then as it stands.

        The nodes of the search trees are counted, so the result is the same on a slow or busy machine. If the clock
        ends the search nevertheless, ``clock`` records it, and the solution found by then is dropped (but not its
        bound), unless ``any_will_do``. With ``once``, the program is solved again without presolve only if presolve
        failed, not if the nodes ran out. The clock ends it after ``far`` times the counted ``seconds``. A tree has at
        most ``nodes`` nodes; by default, as many as the seconds are enough for where a relaxation leaves little to
        settle.
        """
        own = Clock(far * seconds + GRACE, clock)
        if nodes is None:
            nodes = max(1, int(seconds * _NODES / self.columns))
        best = self._solve(price, whole, low, high, own, nodes, presolve=True)
        results = [best]
        ended = once and ((best.mip_node_count or 0) >= nodes or _LIMIT in best.message)  # no count without a solution
        if best.status == _STOPPED and own.left > 0 and not ended:
            results.append(self._solve(price, whole, low, high, own, nodes, presolve=False))
        late = [result for result in results if result.status == _OUT_OF_TIME]
        clock.timed_out |= bool(late)
        for result in late if not any_will_do else ():
            result.x = None
        return _better(*results) if results[1:] else best

    def _solve(
        self, price: Floats, whole: Bools, low: Floats, high: Floats, clock: Clock, nodes: int, *, presolve: bool
    ) -> OptimizeResult:
        """One run of HiGHS, which works in this thread but knows the clock on the wall alone: where that ends it before
        the thread has had its time, others had the processor, and it is run again, for twice as long. What the thread
        did until then does not count for the clock, as on a quiet machine it is not done.
        """
        rows, columns, factors = (np.concatenate(part) for part in zip(*self._entries, strict=True))
        matrix = coo_array((factors, (rows, columns)), shape=(self._count, self.columns)).tocsr()
        due = wall = max(clock.left, 0.1)
        while True:
            run = Clock(due)
            result = milp(
                price,
                integrality=whole.astype(np.int64),
                bounds=Bounds(low, high),
                constraints=LinearConstraint(matrix, np.concatenate(self._low), np.concatenate(self._high)),
                options={"time_limit": wall, "node_limit": nodes, "mip_rel_gap": 1e-6, "presolve": presolve},
            )
            if result.status != _OUT_OF_TIME or run.left < _NEARLY * due or wall > _BUSIEST * due:
                return result
            clock.forgive(due - run.left)
            wall *= 2

    def _bound(self, count: int, low: float, high: float) -> None:
        self._low.append(np.full(count, low))
        self._high.append(np.full(count, high))
        self._count += count


def _better(one: OptimizeResult, other: OptimizeResult) -> OptimizeResult:
    """Return the final result of the two, or else the lesser value found with the greater of both bounds."""
    if other.status not in (_STOPPED, _OUT_OF_TIME):
        return other
    best = min((one, other), key=lambda result: np.inf if result.x is None else result.fun)
    known = [result.mip_dual_bound for result in (one, other) if result.mip_dual_bound is not None]
    best.mip_dual_bound = max(known, default=None)
    return best
