"""Small joint graphs with prices, and the best pipeline of them by brute force over all cuts and all recompute."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
from jointgraphs import Hand

from splitkit.pipeline.schedules import pipeline_order, schedule_named
from splitkit.pipeline.simulate import simulate_schedule
from splitkit.search.pipelines.joint_positions import JointPositions
from splitkit.search.pipelines.offload_cut_search import StageTransfers
from splitkit.search.pipelines.stage_problems import StageProblems


class Prices:
    """Seconds by name of a node."""

    unit = "s"

    def __init__(self, seconds):
        self.known = seconds

    def seconds(self, node):
        return self.known.get(node.name, 0.0)

    def flops(self, node):
        return 0.0

    def nbytes(self, node):
        return 0

    def parameter_bytes(self, node):
        return 0


def random_joint(seed, ops=5):
    """A forward of some ops with skips and parameters, its backward, and random prices and sizes."""
    dice = random.Random(seed)
    h = Hand().inputs(x=dice.randint(1, 4), **{f"w{i}": dice.randint(1, 3) for i in range(ops)})
    reads, size = {}, {"x": 1}
    made = ["x"]
    for i in range(ops):
        read = dict.fromkeys([made[-1], *dice.sample(made, min(len(made), dice.randint(0, 1)))])
        name = f"f{i}"
        reads[name] = [*read]
        size[name] = dice.randint(1, 12)
        h.op(name, size[name], *read, f"w{i}")
        h[name].meta["seq_nr"] = i
        made.append(name)
    h.op("loss", 1, made[-1])
    h["loss"].meta["seq_nr"] = ops
    h.gradients(t=1)
    h.back("g_loss", 1, "t", made[-1])
    h["g_loss"].meta["seq_nr"] = ops
    terms = {made[-1]: ["g_loss"]}
    gradients = {}
    for i in reversed(range(ops)):
        name = f"f{i}"
        own = terms.get(name, [])
        if len(own) > 1:
            h.back(f"sum{i}", size[name], *own)
            h[f"sum{i}"].meta["seq_nr"] = i
            own = [f"sum{i}"]
        kept = [*reads[name], *([name] if dice.random() < 0.5 else [])]
        h.back(f"g{i}", size[name], *own, *kept)
        h.back(f"gw{i}", dice.randint(1, 3), *own, *kept)
        for made_here in (f"g{i}", f"gw{i}"):
            h[made_here].meta["seq_nr"] = i
        gradients[f"w{i}"] = f"gw{i}"
        for read in reads[name]:
            if read != "x":
                terms.setdefault(read, []).append(f"g{i}")
    h.back("gx", 1, "g0")
    h["gx"].meta["seq_nr"] = 0
    flow = h.flow("loss", " ".join(["gx", *(gradients[f"w{i}"] for i in range(ops))]))
    return flow, Prices({n.name: float(dice.randint(1, 9)) for n in flow.nodes})


def bytes_needed(load, costs):
    """The bytes that a rank needs at most, without messages, by its `RankLoads` and what its stages cost, in order."""
    saved, temporary = (np.array([getattr(s, f"{kind}_bytes") for s in costs]) for kind in ("saved", "temporary"))
    waits = np.array([s.saved_bytes if s.deferred_bytes is None else s.deferred_bytes for s in costs])
    moved = np.array([0 if s.copies is None else s.copies.nbytes for s in costs])
    live = load.saved @ saved + load.waiting @ waits - load.away @ moved + temporary[load.runs]
    return sum(s.fixed_bytes for s in costs) + int(live.max())


def all_choices(problem):
    """Every choice of a stage's problem, each once."""
    found = {}
    n = len(problem.ops)
    for flags in itertools.product([False, True], repeat=n):
        choice = problem.choose(np.array(flags, np.bool_))
        found[choice.runs.tobytes(), choice.saved.tobytes()] = choice
    return list(found.values())


def brute_force(flow, costs, stages, schedule, microbatches, memory=None, links=None, optimizer="adam"):
    """The shortest simulated step within the memory over all cuts and all choices; infinite if there is none."""
    positions = JointPositions(flow)
    problems = StageProblems(positions, costs, optimizer, schedule_named(schedule).divided)
    order = pipeline_order(schedule, stages, microbatches)
    best, count = float("inf"), 0
    for inner in itertools.combinations(positions.legal.tolist(), stages - 1):
        spans = list(itertools.pairwise([0, *inner, len(positions.forward)]))
        options = []
        for span in spans:
            problem = problems.problem(*span)
            options.append([problems.costs_of(problem, choice) for choice in all_choices(problem.savings)])
        for costs_of in itertools.product(*options):
            run = simulate_schedule(costs_of, order, links=links)
            count += 1
            if memory is None or max(run.peaks) <= memory:
                best = min(best, run.seconds)
    return best, count


def brute_force_offload(flow, costs, stages, schedule, microbatches, memory, link, host=None):
    """The shortest simulated step over all cuts, all choices of recompute and all sets of values on the host."""
    positions = JointPositions(flow)
    problems = StageProblems(positions, costs, "adam", schedule_named(schedule).divided)
    transfers = StageTransfers(problems, link)
    order = pipeline_order(schedule, stages, microbatches)
    best = float("inf")
    for inner in itertools.combinations(positions.legal.tolist(), stages - 1):
        options = []
        for span in itertools.pairwise([0, *inner, len(positions.forward)]):
            problem, own = problems.problem(*span), []
            for choice in all_choices(problem.savings):
                base = problems.costs_of(problem, choice)
                movable = sorted(transfers.movable(problem, choice))
                for count in range(len(movable) + 1):
                    own += [
                        replace(base, copies=transfers.copies(problem, choice, some))
                        for some in itertools.combinations(movable, count)
                    ]
            options.append(_undominated(own))
        for costs_of in itertools.product(*options):
            busy = max(s.forward + s.backward for s in costs_of) * microbatches
            if busy >= best:
                continue
            run = simulate_schedule(costs_of, order)
            if max(run.peaks) <= memory and (host is None or max(run.host_peaks) <= host):
                best = min(best, run.seconds)
    return best


def _undominated(costs):
    """Leave out what is no better in anything than another of the same cuts."""

    def numbers(s):
        c = s.copies
        moved = (0, 0.0, 0.0, 0.0, 0.0) if c is None else (c.nbytes, c.out, c.out_end, c.back, c.back_tail)
        return (s.backward, s.temporary_bytes, s.saved_bytes, s.saved_bytes - moved[0], *moved)

    found = {}
    for s in costs:
        found.setdefault(numbers(s), s)
    keys = [k for k in found if not any(o != k and all(a <= b for a, b in zip(o, k, strict=True)) for o in found)]
    return [found[k] for k in keys]
