"""pytorch #197871: ``dp_knapsack_sliding_hirschberg`` saves more than its budget. splitkit's solver never does.

``python benchmarks/open_issues/knapsack_over_budget.py [--json]`` solves random instances whose weights are whole units
of torch's quantisation, so that rounding plays no part, and counts the results over budget.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence

from torch._functorch._activation_checkpointing.knapsack import dp_knapsack, dp_knapsack_sliding_hirschberg

from splitkit.solvers.knapsack import fill_knapsack

UNIT = 1e-4
Solve = Callable[[list[float], list[float], float], Sequence[int]]
SOLVERS: dict[str, Solve] = {
    "torch dp": lambda memory, runtime, budget: dp_knapsack(memory, runtime, budget)[1],
    "torch dp_knapsack_sliding_hirschberg": lambda memory, runtime, budget: dp_knapsack_sliding_hirschberg(
        memory, runtime, budget
    )[1],
    "splitkit": lambda memory, runtime, budget: fill_knapsack(runtime, memory, budget),
}


def outcomes(instances: int = 1000) -> dict[str, int]:
    """Return solver -> the number of instances in which it saves more than the budget."""
    over = dict.fromkeys(SOLVERS, 0)
    draw = random.Random(0)
    for _ in range(instances):
        count = draw.randint(2, 8)
        units = [draw.randint(1, 26) for _ in range(count)]
        runtime = [float(draw.randint(1, 50)) for _ in range(count)]
        budget = draw.randint(1, sum(units))
        for name, solve in SOLVERS.items():
            saved = solve([unit * UNIT for unit in units], runtime, budget * UNIT)
            over[name] += sum(units[i] for i in saved) > budget
    return over


def main(arguments: list[str] | None = None) -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = outcomes(given.instances)
    print(json.dumps(found) if given.json else "\n".join(f"{n:40} over budget: {c}" for n, c in found.items()))


if __name__ == "__main__":
    main()
