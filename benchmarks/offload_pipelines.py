"""Steps of pipelines whose stages may offload, beside the same pipelines without: simulated, H100 roofline.

    python benchmarks/offload_pipelines.py --layers 4 --link pcie5

Memory is a share of the range from the least for which a plan without offload is found to what saving everything takes.
"""

from __future__ import annotations

import argparse
import time

import splitkit as sk
from splitkit.errors import NoPlanError
from splitkit.frontends.joint_capture import Joint
from splitkit.policies import Pipeline
from splitkit.testing import models


def main() -> None:
    """Print a row for each memory and schedule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", default="1f1b")
    parser.add_argument("--link", default="pcie5")
    given = parser.parse_args()
    sizes = {"layers": given.layers, "width": given.width, "batch": given.batch, "seq": given.seq}
    example = models.build("gpt2", heads=8, vocab=1024, **sizes)
    joint = sk.capture_joint(example.model, *example.args, **example.kwargs)
    costs = sk.costs.roofline(joint.graph_module, "h100")
    for schedule in given.schedules.split(","):
        rows(joint, costs, given, schedule)


def rows(joint: Joint, costs: sk.Costs, given: argparse.Namespace, schedule: str) -> None:
    """Print the rows of one schedule."""
    numbers = given.stages, schedule, given.microbatches
    free = Pipeline(*numbers)
    whole = free.found(free.problems(joint.flow, costs)).run
    try:
        Pipeline(*numbers, memory=1).assign(joint.flow, costs)
    except NoPlanError as error:
        least = 1 + error.excess
    print(f"{schedule}: {least} to {max(whole.peaks)} bytes, step {whole.seconds:.6f} s without recompute")
    print("memory  recompute  both  gap of both  planned in")
    for share in (0.5, 0.25, 0.0, -0.05):
        memory = int(least + share * (max(whole.peaks) - least)) if share >= 0 else int(least * (1 + share))
        start = time.process_time()
        alone, both = (step(joint, costs, numbers, memory, link) for link in (None, given.link))
        told = ["no plan" if s is None else f"{s.value / whole.seconds:.3f}" for s in (alone, both)]
        gap = "-" if both is None else f"{both.gap:.1%}"
        print(f"{share:6.0%}  {told[0]}  {told[1]}  {gap}  {time.process_time() - start:.0f} s", flush=True)


def step(
    joint: Joint, costs: sk.Costs, numbers: tuple[int, str, int], memory: int, link: str | None
) -> sk.extend.Claim | None:
    """Return the claim of a plan; ``None`` if nothing fits."""
    try:
        return Pipeline(*numbers, memory=memory, offload=link).assign(joint.flow, costs).claim
    except NoPlanError:
        return None


if __name__ == "__main__":
    main()
