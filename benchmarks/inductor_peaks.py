"""The peak of a training step as Inductor runs it: planned, and measured on the CPU.

``python benchmarks/inductor_peaks.py [--models gpt2 llama ...] [--json]`` compiles small models by
``torch.compile(model, backend="inductor")`` and by ``backend=splitkit.backend(budget, "inductor")`` at several budgets.
Columns, in bytes above what the caller holds: *plan*, the peak of the plan if its halves run op by op, which is what
`splitkit.policies.Budget` bounds; *measured*, `measure_memory` of the second real step; *allocator*, what torch's
allocator took in the same step. A C++ compiler is needed.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
from torch._inductor import config

import splitkit as sk
from splitkit.frontends.compile.compile import Backend
from splitkit.policies import Budget
from splitkit.testing import models

SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 1, "width": 64, "heads": 4, "vocab": 200, "batch": 4, "seq": 64},
    "llama": {"layers": 1, "width": 64, "heads": 4, "vocab": 200, "batch": 4, "seq": 64},
    "bert": {"layers": 1, "width": 64, "heads": 4, "vocab": 200, "batch": 4, "seq": 64},
    "t5": {"layers": 1, "width": 64, "heads": 4, "vocab": 200, "batch": 4, "seq": 64},
    "vit": {"layers": 1, "width": 64, "heads": 4, "batch": 4},
}
BUDGETS = ("torch", "least", 0.5)


class NotingBackend(Backend):
    """A backend that simulates each pair while it still has its sizes, which Inductor takes away."""

    simulated = 0

    def partition(self, *args: Any, **kwargs: Any) -> Any:
        """Divide a joint graph."""
        halves = super().partition(*args, **kwargs)
        pair = self.pairs[-1]
        self.simulated = sk.simulate_memory(pair.forward, pair.backward, user_outputs=pair.outputs).peak
        return halves


def row(name: str, budget: str | float) -> dict[str, Any]:
    """Return the peaks of one model under one budget, or as torch's partitioner divides it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    example = models.build(name, **SIZES[name])
    model, inputs = example.model, example.kwargs
    backend: Any = "inductor" if budget == "torch" else NotingBackend(Budget(budget), "inductor")
    compiled = torch.compile(model, backend=backend)

    def step(module: torch.nn.Module, **given: Any) -> None:
        compiled(**given).loss.backward()

    step(model, **inputs)
    model.zero_grad()
    found = sk.measure_memory(step, model, **inputs, allocator=True)
    held = found.baseline
    plan = None if budget == "torch" else backend.simulated - held
    peaks = {"measured": found.peak, "allocator": found.allocator_peak or 0}
    return {"model": name, "budget": budget, "plan": plan, **{kind: peak - held for kind, peak in peaks.items()}}


def main(arguments: list[str] | None = None) -> None:
    """Print a row for each model and budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(SIZES))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    rows = []
    with config.patch({"cpp.simdlen": 0}):  # kernels without vectors compile sooner, and allocate the same buffers
        for name in given.models:
            for budget in BUDGETS:
                rows.append(row(name, budget))
                if not given.json:
                    print(rows[-1], flush=True)
    if given.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
