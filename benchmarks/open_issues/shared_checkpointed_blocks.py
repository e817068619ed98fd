"""pytorch #193193: backward of two checkpointed runs through the same blocks holds several recomputed blocks at once.

``python benchmarks/open_issues/shared_checkpointed_blocks.py [--blocks 8] [--json]`` trains a stack of blocks that runs
twice in one graph, each block in ``torch.utils.checkpoint``, the second time with another input added (as CoCa and
MaMMUT do). It measures the peak above what the caller holds in eager mode, divided by torch's partitioner, and by
splitkit.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

import splitkit as sk
from splitkit.policies import Budget, SaveAll

WIDTH, ROWS = 32, 1024


class Block(nn.Module):
    """A residual block with a wide inside, of which a checkpoint saves only the input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 8 * WIDTH),
            nn.Linear(8 * WIDTH, WIDTH),
        )
        self.cross = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return x and what the block adds to it."""
        if context is not None:
            x = x + self.cross(context).tanh()
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class TwoRuns(nn.Module):
    """Blocks that run without a context, and again with one."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Return the loss of both runs."""
        first = second = x
        for block in self.blocks:
            first = checkpoint(block, first, use_reentrant=False)
        for block in self.blocks:
            second = checkpoint(block, second, context, use_reentrant=False)
        return first.square().mean() + (second - first.detach()).square().mean()


def outcomes(blocks: int = 8) -> dict[str, int]:
    """Return who divides the step -> bytes at its peak, above what the caller holds."""
    torch.manual_seed(0)
    model, inputs = TwoRuns(blocks), (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
    eager = sk.measure_memory(lambda net, *given: net(*given).backward(), model, *inputs)
    model.zero_grad()
    joint = sk.capture_joint(model, *inputs)
    pairs = {
        "torch's partitioner": joint.partition(min_cut_rematerialization_partition),
        "splitkit SaveAll": joint.split(SaveAll()),
        "splitkit least": joint.split(Budget("least")),
    }
    found = {"eager": eager.peak - eager.baseline}
    for name, pair in pairs.items():
        run = sk.measure_memory(
            lambda primals, tangents, pair=pair: pair.run(list(primals), tangents),
            joint.primals(*inputs),
            joint.tangents(),
        )
        found[name] = run.peak - run.baseline
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the peaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = outcomes(given.blocks)
    print(json.dumps(found) if given.json else "\n".join(f"{n:22}{c / 1024:10.0f} KiB" for n, c in found.items()))


if __name__ == "__main__":
    main()
