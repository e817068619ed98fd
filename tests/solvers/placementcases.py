"""Small random placement problems, and the best placement of one by trying all of them, from the definitions."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import numpy as np
from hypothesis import strategies as st

from splitkit.solvers.placement.problem import Problem, Slot

INF = float("inf")


@st.composite
def problems(draw, *, units=6, devices=3, plain=False):
    """Problems with everything that there is: kinds, CPUs, colours, memory, links, cycles."""
    count = draw(st.integers(1, units))
    kinds = draw(st.integers(1, 2))
    prices = st.integers(0, 9) if draw(st.booleans()) else st.sampled_from([0.1, 0.2, 0.3, 0.7, 1.1])
    seconds = np.array([[draw(prices) for _ in range(count)] for _ in range(kinds)], float)
    if not plain and draw(st.integers(0, 3)) == 0:
        seconds[draw(st.integers(0, kinds - 1)), draw(st.integers(0, count - 1))] = INF
    unit = st.integers(0, count - 1)
    pairs = draw(st.lists(st.tuples(unit, unit), max_size=2 * count))
    cycles = not plain and draw(st.integers(0, 4)) == 0
    edges = [(a, b) if cycles else (min(a, b), max(a, b)) for a, b in pairs if a != b]
    colours = np.full(count, -1)
    if not plain and draw(st.booleans()):
        colours = np.array([draw(st.integers(-1, 3)) for _ in range(count)])
    if draw(st.booleans()):
        nets = [(draw(prices), (a, *sorted({b for c, b in edges if c == a}))) for a in sorted({a for a, _ in edges})]
    else:
        nets = [
            (draw(prices), tuple(draw(st.lists(unit, min_size=1, max_size=4)))) for _ in range(draw(st.integers(0, 5)))
        ]
    number = draw(st.integers(1, devices))
    limited = draw(st.booleans())
    specs = [
        Slot(
            draw(st.integers(0, kinds - 1)),
            draw(st.integers(2, 12)) if limited else INF,
            not plain and draw(st.integers(0, 3)) == 0,
        )
        for _ in range(number)
    ]
    if draw(st.booleans()):
        specs = [specs[0]] * number
    return Problem.of(
        seconds,
        nets,
        edges,
        specs,
        nbytes=np.array([draw(st.integers(0, 4)) for _ in range(count)]),
        colours=colours,
        saved=np.array([draw(st.integers(0, 3)) for _ in range(count)]),
        in_flight=draw(st.sampled_from([(), (), (1, 2), (1, 2, 3), (2,)])),
        ordered=draw(st.integers(0, 3)) == 0,
        fill=number <= count and draw(st.integers(0, 3)) == 0,
    )


def load_by_definition(problem: Problem, device) -> list[float]:
    """Seconds of each device."""
    loads = []
    for d, spec in enumerate(problem.devices):
        total = sum(problem.seconds[spec.kind, v] for v in range(problem.units) if device[v] == d)
        for net, cost in enumerate(problem.net_costs):
            pins = problem.pins[problem.net_starts[net] : problem.net_starts[net + 1]]
            here = [device[pin] == d for pin in pins]
            if spec.cpu or not any(here) or all(here):
                continue
            maker = device[pins[0]]
            if problem.links is None:
                total += cost
            elif maker == d:
                total += cost * max(problem.links[d, device[pin]] for pin in pins if device[pin] != d)
            else:
                total += cost * problem.links[maker, d]
        loads.append(total)
    return loads


def apart(problem: Problem, device) -> bool:
    """Whether units share devices that must, on devices that support them, and every device is used that must be."""
    kinds = [spec.kind for spec in problem.devices]
    if any(np.isinf(problem.seconds[kinds[d], v]) for v, d in enumerate(device)):
        return False
    of_colour = {}
    for v, d in enumerate(device):
        if problem.colours[v] >= 0 and of_colour.setdefault(problem.colours[v], d) != d:
            return False
    return not problem.fill or len(set(device)) == len(problem.devices)


def fits(problem: Problem, device, order) -> bool:
    """Whether every device has room, with what is in flight."""
    for d, spec in enumerate(problem.devices):
        mine = [v for v in range(problem.units) if device[v] == d]
        held = sum(problem.nbytes[v] for v in mine)
        if problem.in_flight and d in order:
            after = len(problem.devices) - 1 - d if problem.ordered else len(order) - 1 - order.index(d)
            held += problem.in_flight[min(after, len(problem.in_flight) - 1)] * sum(problem.saved[v] for v in mine)
        if not spec.cpu and held > spec.capacity:
            return False
    return True


def goes_down(problem: Problem, device, order) -> bool:
    """Whether the order of stages respects all edges."""
    rank = {d: place for place, d in enumerate(order)}
    if any(rank[device[a]] > rank[device[b]] for a, b in problem.edges.tolist()):
        return False
    return not problem.ordered or list(order) == sorted(order)


def best_stages(problem: Problem) -> float:
    """The least greatest load of stages; infinite if there are none."""
    best = INF
    for device in product(range(len(problem.devices)), repeat=problem.units):
        if not apart(problem, device):
            continue
        value = max(load_by_definition(problem, device))
        if value < best and any(
            goes_down(problem, device, order) and fits(problem, device, order) for order in permutations(set(device))
        ):
            best = value
    return best


def best_sets(problem: Problem) -> float:
    """The least greatest load of any sets; infinite if there are none."""
    plain = replace(problem, in_flight=())
    return min(
        (
            max(load_by_definition(plain, device))
            for device in product(range(len(plain.devices)), repeat=plain.units)
            if apart(plain, device) and fits(plain, device, ())
        ),
        default=INF,
    )


def with_links(problem: Problem, factors: list[list[int]]) -> Problem:
    """The same problem with links."""
    return replace(problem, links=np.array(factors, float))


def permuted(problem: Problem, order) -> Problem:
    """The same problem with its units numbered another way: unit ``order[i]`` becomes unit i."""
    place = np.empty(problem.units, np.int64)
    place[order] = np.arange(problem.units)
    return replace(
        problem,
        seconds=problem.seconds[:, order],
        nbytes=problem.nbytes[order],
        pins=place[problem.pins],
        edges=place[problem.edges],
        colours=problem.colours[order],
        saved=problem.saved[order],
    )


def makespan_by_definition(problem: Problem, place) -> float:
    """When everything is done: place is -1 for a CPU, else a piece of the accelerator ``piece``; by repetition.

    One piece an accelerator, the accelerators first among the devices.
    """
    cpu = next((d.kind for d in problem.devices if d.cpu), None)
    takes = {}
    for piece in sorted(set(place) - {-1}):
        takes[piece] = sum(problem.seconds[problem.devices[piece].kind, v] for v, p in enumerate(place) if p == piece)
        for net, cost in enumerate(problem.net_costs):
            pins = problem.pins[problem.net_starts[net] : problem.net_starts[net + 1]]
            here = [place[pin] == piece for pin in pins]
            takes[piece] += cost * (any(here) and not all(here))
    finish = [0.0] * problem.units
    for _ in range(problem.units + 2):
        before = list(finish)
        for v, p in enumerate(place):
            mine = [u for u, q in enumerate(place) if q == p] if p >= 0 else [v]
            inputs = [before[a] for a, b in problem.edges.tolist() if b in mine and a not in mine]
            finish[v] = max(inputs, default=0.0) + (takes[p] if p >= 0 else problem.seconds[cpu, v])
        if finish == before:
            return max(finish)
    return INF  # it never ends: pieces wait for each other


def best_latency(problem: Problem) -> float:
    """The least makespan; infinite if there is no placement."""
    accelerators = [d for d, device in enumerate(problem.devices) if not device.cpu]
    cpus = [d for d, device in enumerate(problem.devices) if device.cpu][:1]
    plain = replace(problem, in_flight=(), ordered=False, fill=False)
    best = INF
    for device in product([*accelerators, *cpus], repeat=problem.units):
        if apart(plain, device) and fits(plain, device, ()):
            best = min(best, makespan_by_definition(plain, [-1 if d in cpus else d for d in device]))
    return best
