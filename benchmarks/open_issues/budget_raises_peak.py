"""pytorch #197838: the peak of a step rises while ``activation_memory_budget`` falls. With splitkit it falls.

``python benchmarks/open_issues/budget_raises_peak.py [--layers 6] [--json]`` divides the training step of a Llama by
torch's partitioner at several budgets, and by ``Budget(share)`` at the same ones, runs each on the CPU, and measures
the peak above what the caller holds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch._functorch import config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import splitkit as sk
from splitkit.engine.pair import Pair
from splitkit.frontends.joint_capture import Joint
from splitkit.policies import Budget
from splitkit.testing import models

BUDGETS = (0.0, 0.1, 0.3, 1.0)


def peak(joint: Joint, pair: Pair, inputs: dict[str, Any]) -> int:
    """Return the measured peak of a step above what the caller holds, in bytes."""
    tangents = joint.tangents()
    found = sk.measure_memory(lambda primals, given: pair.run(list(primals), given), joint.primals(**inputs), tangents)
    return found.peak - found.baseline


def outcomes(layers: int = 6, budgets: Sequence[float] = BUDGETS) -> dict[str, dict[float, int]]:
    """Return "torch" and "splitkit" -> budget -> bytes."""
    example = models.build("llama", layers=layers, width=64, heads=4, vocab=100, batch=2, seq=64)
    joint = sk.capture_joint(example.model, **example.kwargs)
    found: dict[str, dict[float, int]] = {"torch": {}, "splitkit": {}}
    for budget in budgets:
        with config.patch(activation_memory_budget=budget):
            theirs = joint.partition(min_cut_rematerialization_partition)
        ours = joint.split(Budget(budget))
        found["torch"][budget] = peak(joint, theirs, example.kwargs)
        found["splitkit"][budget] = peak(joint, ours, example.kwargs)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    found = outcomes(given.layers)
    if given.json:
        print(json.dumps(found))
        return
    print(f"peak above what the caller holds, Llama of {given.layers} layers, KiB\nbudget      torch   splitkit")
    for budget in BUDGETS:
        print(f"{budget:6.2f} {found['torch'][budget] / 1024:10.0f} {found['splitkit'][budget] / 1024:10.0f}")


if __name__ == "__main__":
    main()
