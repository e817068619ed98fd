"""Piper's problems (bert32, gnmt, resnet), solved as Piper does and exactly: ``--json`` for machines.

Tarnawski, Narayanan, Phanishayee, "Piper: Multidimensional Planner for DNN Parallelization", NeurIPS 2021, with the
inputs and settings of https://github.com/msr-fiddle/piper (``main()`` of algo.cpp). A plan cuts the layers into stages;
a stage has a tensor-parallel degree t, a data-parallel degree d, and for each layer recompute or not. Its time per
sample, and the memory of each of its t d devices, are

    (sum of times + 2 (activations in and out, with what t adds to them) / bandwidth) / d
        + 4 (d - 1) / d * weights / (bandwidth * microbatches)
    sum of b + y * sum of a,       y = ceil(sum of the d of this and all later stages / d)

and the slowest stage counts. The format carries no order of microbatches, so there is no warm-up, and no overlap.

The paper prints its results as figures. So ``piper`` is the dynamic program of the paper run here, with its greedy
choice of what to recompute; ``ours`` chooses that exactly, where it decides, and ``bound`` is a proof for all plans.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.optimize import Bounds, LinearConstraint, milp

INPUTS = Path(__file__).parent / "workloads" / "piper"
GIB = 2.0**30
BANDWIDTH = 25 * GIB
SETTINGS: dict[str, tuple[tuple[int, float], ...]] = {
    "bert32": tuple((k, m) for m in (1.0, 2.0, 8.0, 80.0) for k in (8, 32, 64, 128)),
    "gnmt": (
        (2, 2.5), (2, 3.5), (4, 1.2), (4, 2.5), (8, 0.6), (8, 1.2), (8, 2.4), (16, 0.3), (16, 0.6), (16, 1.2),
        (32, 0.3), (32, 0.8), (64, 0.3),
    ),
    "resnet": (
        (8, 4.0), (8, 8.0), (8, 16.0), (16, 1.5), (16, 2.0), (16, 4.0), (16, 8.0), (16, 16.0), (32, 1.5), (32, 2.0),
        (32, 4.0), (32, 8.0), (32, 16.0),
    ),
}  # fmt: skip
"""The devices and GiB of each that Piper's program ran: of bert32 up to 128 devices, of resnet up to 32."""
ROUNDING = 1e-9
Floats = NDArray[np.float64]


class Way(NamedTuple):
    """A way to run a layer.

    Attributes:
        seconds: of a sample, forward and backward.
        weights: bytes that data parallelism adds up.
        each: bytes for each sample in flight.
        fixed: bytes besides.
    """

    seconds: float
    weights: float
    each: float
    fixed: float


@dataclass(frozen=True)
class Layer:
    """A layer: tensor-parallel degree -> plain, and with recompute; and what that degree adds to the edges.

    Attributes:
        ways: degree -> the two ways.
        taken: degree -> layer that it reads -> bytes added to what comes from there.
        given: degree -> layer that reads it -> bytes added to what goes there.
    """

    ways: dict[int, tuple[Way, Way]]
    taken: dict[int, dict[int, float]]
    given: dict[int, dict[int, float]]


@dataclass(frozen=True)
class PiperProblem:
    """Layers, edges (from, to, bytes), and the machine."""

    layers: Sequence[Layer]
    edges: Sequence[tuple[int, int, float]]
    microbatches: int
    devices: int
    memory: float
    bandwidth: float = BANDWIDTH


def without_idle(problem: PiperProblem) -> PiperProblem:
    """Return the problem without layers that cost nothing and read only such layers: all fit into the first stage.

    There are ten in gnmt (masks and states), and each would double the number of closed sets.
    """
    idle = {
        i for i, layer in enumerate(problem.layers) if not any(any(w) for ways in layer.ways.values() for w in ways)
    }
    idle -= {end for u, v, c in problem.edges if c for end in (u, v)}
    while late := {v for u, v, _ in problem.edges if v in idle and u not in idle}:
        idle -= late
    kept = [i for i in range(len(problem.layers)) if i not in idle]
    number = {layer: i for i, layer in enumerate(kept)}

    def renamed(added: dict[int, dict[int, float]]) -> dict[int, dict[int, float]]:
        return {t: {number[i]: c for i, c in of.items() if i in number} for t, of in added.items()}

    whole = [problem.layers[i] for i in kept]
    layers = [replace(layer, taken=renamed(layer.taken), given=renamed(layer.given)) for layer in whole]
    edges = [(number[u], number[v], c) for u, v, c in problem.edges if u in number and v in number]
    return replace(problem, layers=layers, edges=edges)


@dataclass
class PiperSearch:
    """The dynamic program over sets of layers that contain all readers of their members.

    Attributes:
        problem: the problem.
        exact: (set, set below, degree, y) -> seconds of recompute, where it is known exactly.
    """

    problem: PiperProblem
    exact: dict[tuple[int, int, int, int], float] = field(default_factory=dict)

    @cached_property
    def closed(self) -> list[int]:
        """The closed sets as bit masks, the empty one first."""
        readers = [0] * len(self.problem.layers)
        for source, target, _ in self.problem.edges:
            readers[source] |= 1 << target
        found, order = {0}, [0]
        for known in order:
            for layer, needs in enumerate(readers):
                more = known | 1 << layer
                if more != known and needs & ~known == 0 and more not in found:
                    found.add(more)
                    order.append(more)
        return sorted(order, key=lambda mask: (mask.bit_count(), mask))

    @cached_property
    def members(self) -> NDArray[np.bool_]:
        """(sets, layers) which layers are in each closed set."""
        count = len(self.problem.layers)
        return np.array([[mask >> i & 1 for i in range(count)] for mask in self.closed], np.bool_)

    @cached_property
    def degrees(self) -> list[int]:
        """The tensor-parallel degrees that all layers have."""
        return sorted(set.intersection(*(set(layer.ways) for layer in self.problem.layers)))

    def figures(self, degree: int) -> dict[str, Floats]:
        """Return (layers,) arrays: seconds, weights, bytes; and what recompute adds to and takes from them."""
        ways = [layer.ways[degree] for layer in self.problem.layers]
        plain, again = (np.array([way[i] for way in ways], np.float64).T for i in range(2))
        return {"plain": plain, "more": again - plain}

    def edge_bytes(self, degree: int) -> tuple[NDArray[np.int64], NDArray[np.int64], Floats, Floats]:
        """Return sources, targets, and the bytes of each edge for the stage that reads it, and that makes it."""
        layers, edges = self.problem.layers, self.problem.edges
        source, target = (np.array([edge[i] for edge in edges]) for i in range(2))
        into = np.array([c + layers[v].taken[degree].get(u, 0.0) for u, v, c in edges])
        out = np.array([c + layers[u].given[degree].get(v, 0.0) for u, v, c in edges])
        return source, target, into, out

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yield (set, smaller set) by their numbers; the layers between them can be a stage."""
        masks = self.closed
        for wide, mask in enumerate(masks):
            for narrow in range(wide):
                if masks[narrow] & ~mask == 0:
                    yield wide, narrow

    @property
    def most(self) -> int:
        """The largest sum of data-parallel degrees."""
        return min(self.problem.microbatches, self.problem.devices)

    def recompute(self, layers: NDArray[np.int64], degree: int, greedy: bool) -> tuple[Floats, Floats]:
        """Return (y,) seconds of recompute with y = 0 .. samples in flight: by Piper's greedy rule, or from below.

        The bound lets the last layer be computed again in part. It is infinite where nothing fits.
        """
        figures, y = self.figures_of[degree], np.arange(self.most + 2)
        plain, more = figures["plain"][:, layers], figures["more"][:, layers]
        lacking = plain[3].sum() + y * plain[2].sum() - self.problem.memory
        found = np.where(lacking <= 0, 0.0, np.inf)
        for at in np.flatnonzero(lacking > 0).tolist():
            freed = -(more[2] * at + more[3])
            useful = np.flatnonzero(freed > 1e-9)
            price = more[0][useful] / freed[useful]
            useful = useful[np.argsort(price, kind="stable")]
            total = np.cumsum(freed[useful])
            last = int(np.searchsorted(total, lacking[at] - 1e-9))
            if last == len(useful):
                break  # with more in flight even less fits
            seconds = more[0][useful]
            before = float(seconds[:last].sum())
            share = 1.0 if greedy else (lacking[at] - (total[last - 1] if last else 0.0)) / freed[useful[last]]
            found[at] = before + share * seconds[last]
        return found, y

    @cached_property
    def figures_of(self) -> dict[int, dict[str, Floats]]:
        """`figures` of each degree."""
        return {degree: self.figures(degree) for degree in self.degrees}

    @cached_property
    def stages(self) -> list[tuple[int, int, dict[int, tuple[float, float, Floats, Floats]]]]:
        """All stages: set, smaller set, and degree -> seconds without recompute, weights, and recompute in two ways.

        The two ways are Piper's greedy rule and the bound.
        Stages that do not fit with one sample in flight are left out.
        """
        edges = {degree: self.edge_bytes(degree) for degree in self.degrees}
        found = []
        for wide, narrow in self.pairs():
            inside = self.members[wide] & ~self.members[narrow]
            layers = np.flatnonzero(inside)
            ways = {}
            for degree in self.degrees:
                greedy, _ = self.recompute(layers, degree, True)
                if not np.isfinite(greedy[1]):
                    continue
                bound, _ = self.recompute(layers, degree, False)
                source, target, into, out = edges[degree]
                entering, leaving = ~inside[source] & inside[target], inside[source] & ~inside[target]
                sent = 2 * (into[entering].sum() + out[leaving].sum()) / self.problem.bandwidth
                plain = self.figures_of[degree]["plain"]
                ways[degree] = (float(plain[0][layers].sum() + sent), float(plain[1][layers].sum()), greedy, bound)
            if ways:
                found.append((wide, narrow, ways))
        return found

    def solve(self, greedy: bool) -> tuple[float, list[tuple[int, int, int, int, int]]]:
        """Return the least time per sample, infinite if nothing fits, and its stages: (set, smaller set, t, d, y).

        With ``greedy`` this is Piper's program; else recompute is from below, or exact where `exact` has it.
        """
        problem, most = self.problem, self.most
        alone = self.degrees == [1]  # then all devices are replicas: one count is enough
        high = 0 if alone else problem.devices
        best = np.full((len(self.closed), high + 1, most + 1), np.inf)
        best[0] = 0.0
        how: dict[tuple[int, int, int], tuple[int, int, int]] = {}
        used = np.zeros((high + 1, most + 1), np.int64)
        replicas = [d for d in range(1, most + 1) if problem.microbatches % d == 0]
        samples = np.arange(most + 1)
        choice: dict[int, list[tuple[int, int, int]]] = {}
        stages_of: dict[int, list[Any]] = {}
        for stage in self.stages:
            stages_of.setdefault(stage[0], []).append(stage)
        for wide in range(1, len(self.closed)):
            value, options, from_ = best[wide], choice.setdefault(wide, []), used.copy()
            for _, narrow, ways in stages_of.get(wide, ()):
                if not np.isfinite(best[narrow, -1, -1]):
                    continue
                for t, (seconds, weights, rule, bound) in ways.items():
                    again = rule if greedy else self._known(wide, narrow, t, bound)
                    for d in replicas:
                        if t * d > problem.devices:
                            break
                        ring = 4 * (d - 1) * weights / d / problem.microbatches / problem.bandwidth
                        own = (seconds + again[-(-samples // d)]) / d + ring
                        step = 0 if alone else t * d
                        found = np.maximum(best[narrow, : high + 1 - step, : most + 1 - d], own[d:])
                        place = value[step:, d:]
                        better = found < place - ROUNDING * 1e-3
                        if better.any():
                            options.append((narrow, t, d))
                            place[better] = found[better]
                            from_[step:, d:][better] = len(options)
            for at in np.argwhere(from_ > 0):
                how[wide, int(at[0]), int(at[1])] = options[from_[tuple(at)] - 1]
            # devices may be left over, and fewer replicas may hold fewer samples
            best[wide] = np.minimum.accumulate(np.minimum.accumulate(value, axis=0), axis=1)
        return float(best[-1, -1, -1].min()), self._path(best, how, alone)

    def _known(self, wide: int, narrow: int, degree: int, bound: Floats) -> Floats:
        known = {y: v for (a, b, t, y), v in self.exact.items() if (a, b, t) == (wide, narrow, degree)}
        if not known:
            return bound
        found = bound.copy()
        for y, value in known.items():
            found[y] = value
        return found

    def _path(
        self, best: Floats, how: dict[tuple[int, int, int], tuple[int, int, int]], alone: bool
    ) -> list[tuple[int, int, int, int, int]]:
        wide, k, s = len(self.closed) - 1, best.shape[1] - 1, best.shape[2] - 1
        if not np.isfinite(best[wide, k, s]):
            return []
        found = []
        while wide:
            while s and best[wide, k, s - 1] <= best[wide, k, s]:
                s -= 1
            while k and best[wide, k - 1, s] <= best[wide, k, s]:
                k -= 1
            narrow, t, d = how[wide, k, s]
            found.append((wide, narrow, t, d, -(-s // d)))
            wide, k, s = narrow, k - (0 if alone else t * d), s - d
        return found

    def exact_recompute(self, wide: int, narrow: int, degree: int, y: int) -> float:
        """Return the least seconds of recompute with which a stage fits: an integer program."""
        layers = np.flatnonzero(self.members[wide] & ~self.members[narrow])
        plain, more = (self.figures_of[degree][what][:, layers] for what in ("plain", "more"))
        lacking = plain[3].sum() + y * plain[2].sum() - self.problem.memory
        freed = -(more[2] * y + more[3])
        if lacking <= 0:
            return 0.0
        rows = LinearConstraint(freed[None] / lacking, 1.0, np.inf)
        options = {"mip_rel_gap": ROUNDING}
        scale = max(float(np.abs(more[0]).max()), 1e-30)
        whole = np.ones(len(layers))
        found = milp(more[0] / scale, constraints=rows, integrality=whole, bounds=Bounds(0, 1), options=options)
        return float(found.mip_dual_bound * scale) if found.success else float("inf")


def solved(problem: PiperProblem, rounds: int = 40) -> dict[str, Any]:
    """Solve a problem as Piper does and exactly.

    The program runs with recompute from below; what its stages need is then found exactly, and it runs again, until a
    plan has exact stages only: no plan is better.
    """
    began, search = time.process_time(), PiperSearch(without_idle(problem))
    piper, first = search.solve(greedy=True)
    spent = time.process_time() - began
    bound, optimal, stages = 0.0, False, first
    for _ in range(rounds):
        bound, path = search.solve(greedy=False)
        new = [key for wide, narrow, t, _, y in path if (key := (wide, narrow, t, y)) not in search.exact]
        if not new:
            optimal, stages = True, path
            break
        for key in new:
            search.exact[key] = search.exact_recompute(*key)
    ours = bound if optimal else piper
    return {
        "devices": problem.devices,
        "gib": problem.memory / GIB,
        "piper": piper if np.isfinite(piper) else None,
        "ours": ours if np.isfinite(ours) else None,
        "bound": bound if np.isfinite(bound) else None,
        "optimal": optimal,
        "gain": piper / ours - 1 if np.isfinite(ours) and ours else 0.0,
        "stages": [{"layers": _count(search, w, n), "t": t, "d": d, "in_flight": y} for w, n, t, d, y in stages],
        "sets": len(search.closed),
        "piper_seconds": spent,
        "seconds": time.process_time() - began,
    }


def _count(search: PiperSearch, wide: int, narrow: int) -> int:
    return int((search.members[wide] & ~search.members[narrow]).sum())


def read(name: str, devices: int, gib: float) -> PiperProblem:
    """Read one of the inputs; `benchmarks/workloads/README.md` describes the files."""
    data = json.loads((INPUTS / f"{name}.json").read_text())
    edges = [(u, v, c) for u, v, c in data["edges"]]
    tensor_parallel = "kinds" in data
    layers = (
        [bert_layer(*row) for row in bert_rows(data)] if tensor_parallel else [_layer(*row) for row in data["nodes"]]
    )
    return PiperProblem(layers, edges, data["mbsInBatch"], devices, gib * GIB)


def _layer(_name: str, seconds: float, again: float, weights: float, each: float) -> Layer:
    """Return a layer without tensor parallelism: recompute keeps 9 % for each sample, and the rest once."""
    kept = each * 0.09
    ways = Way(seconds, weights, each, 2 * weights), Way(again, weights, kept, 2 * weights + (each - kept))
    return Layer({1: ways}, {1: {}}, {1: {}})


def bert_rows(data: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """Yield for each layer of bert32: its kind, its times, and what it reads and gives with tensor parallelism."""
    for number, (kind, times) in enumerate(data["nodes"]):
        taken = {int(u): b for u, b in data["taken"].get(str(number), {}).items()}
        given = {int(v): b for v, b in data["given"].get(str(number), {}).items()}
        yield data["kinds"][kind], times, taken, given


def bert_layer(
    kind: dict[str, Any], times: dict[str, list[float]], taken: dict[int, float], given: dict[int, float]
) -> Layer:
    """Return a layer with tensor parallelism; its degree adds the same bytes to the edges whatever it is, from 2 on."""
    ways: dict[int, tuple[Way, Way]] = {}
    for degree, (weights, each, fixed, again_each, again_fixed) in kind.items():
        seconds, again = times.get(degree, [0.0, 0.0])
        ways[int(degree)] = Way(seconds, weights, each, fixed), Way(again, weights, again_each, again_fixed)
    return Layer(ways, {t: taken if t > 1 else {} for t in ways}, {t: given if t > 1 else {} for t in ways})


def main() -> None:
    """Run and print; the inputs name no unit of their times, which are added to bytes / bandwidth as they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", help=f"of {', '.join(SETTINGS)}; by default all")
    parser.add_argument("--devices", type=int, help="only settings with at most so many devices")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    rows = []
    for name in options.inputs or sorted(SETTINGS):
        for devices, gib in SETTINGS[name]:
            if options.devices is None or devices <= options.devices:
                rows.append({"input": name, **solved(read(name, devices, gib))})
    if options.json:
        print(json.dumps({"bandwidth": BANDWIDTH, "rows": rows}, indent=1))
        return
    table = Table()
    for title in ("input", "devices", "GiB", "piper", "ours", "bound", "piper longer by", "stages", "seconds"):
        table.add_column(title, justify="left" if title == "input" else "right")
    for row in rows:
        values = [f"{row[what]:.6g}" if row[what] is not None else "none fits" for what in ("piper", "ours", "bound")]
        values[2] = "optimal" if row["optimal"] and row["ours"] is not None else values[2]
        cells = [row["input"], str(row["devices"]), f"{row['gib']:g}", *values, f"{row['gain']:.3%}"]
        table.add_row(*cells, str(len(row["stages"])), f"{row['seconds']:.1f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
