"""Does a smaller budget ever give a higher peak? torch's memory budget and splitkit's, on many models.

``python benchmarks/budgets.py [--models 50] [--json]`` captures the training step of transformer models of several
families and sizes, divides each by torch's partitioner at ``activation_memory_budget`` 0.0 to 1.0 and by
``Budget(share)`` at the same numbers, and simulates the peaks (`splitkit.simulate_memory`, exact to the byte where the
halves run op by op). A *rise* is a budget with a higher peak than the next larger one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import splitkit as sk
from splitkit.policies import Budget
from splitkit.testing import models

BUDGETS = (0.0, 0.1, 0.3, 0.5, 1.0)
FAMILIES: dict[str, dict[str, int]] = {
    "gpt2": {"width": 32, "heads": 2, "vocab": 64, "batch": 2},
    "llama": {"width": 32, "heads": 2, "vocab": 64, "batch": 2},
    "bert": {"width": 32, "heads": 2, "vocab": 64, "batch": 2},
    "t5": {"width": 32, "heads": 2, "vocab": 64, "batch": 2},
    "vit": {"width": 32, "heads": 2, "batch": 2},
}


def specimens() -> Iterator[tuple[str, dict[str, int]]]:
    """Yield (family, sizes): all families at one depth, then at the next."""
    for layers in range(1, 100):
        for family, sizes in FAMILIES.items():
            yield family, {**sizes, "layers": layers}


def peak(pair: sk.Pair) -> int:
    """Return the simulated peak of a step in bytes."""
    return sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak


def row(family: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return the peaks of one model at all budgets."""
    example = models.build(family, **sizes)
    joint = sk.capture_joint(example.model, **example.kwargs)
    found: dict[str, Any] = {"model": f"{family}-{sizes['layers']}", "torch": [], "splitkit": []}
    for budget in BUDGETS:
        with config.patch(activation_memory_budget=budget):
            found["torch"].append(peak(joint.partition(min_cut_rematerialization_partition)))
        found["splitkit"].append(peak(joint.split(Budget(budget))))
    for who in ("torch", "splitkit"):
        found[f"{who} rises"] = sum(small > large for small, large in pairwise(found[who]))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each model, and the models in which a smaller budget has a higher peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    rows = []
    for family, sizes in islice(specimens(), given.models):
        rows.append(row(family, sizes))
        if not given.json:
            print(rows[-1], flush=True)
    rising = {who: sum(r[f"{who} rises"] > 0 for r in rows) for who in ("torch", "splitkit")}
    lower = sum(min(r["splitkit"]) < min(r["torch"]) for r in rows)
    total = {"models": len(rows), "with a rise": rising, "lowest peak is splitkit's": lower}
    print(json.dumps({"rows": rows, **total}) if given.json else total)


if __name__ == "__main__":
    main()
