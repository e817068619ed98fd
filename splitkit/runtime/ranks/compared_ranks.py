"""Finds ranks that have diverged while they train: copies of a weight that differ, or optimizers that do."""

from __future__ import annotations

import torch.distributed as dist
from torch.optim import Optimizer

from splitkit.runtime.ranks.faults import Progress, naming_lost_ranks
from splitkit.runtime.ranks.optimizer_agreement import ComparedOptimizer, require_same_optimizers
from splitkit.runtime.ranks.stage_tensors import StageTensors
from splitkit.runtime.ranks.weight_agreement import OtherTensors, copies, require_same_copies


class ComparedRanks(StageTensors):
    """Compares the weights and the optimizers of the ranks; a base of `splitkit.runtime.Pipeline`.

    Attributes:
        group: the ranks.
        steps: the number of training steps.
    """

    group: dist.ProcessGroup | None
    steps: int
    _progress: Progress
    _trains: ComparedRanks | None
    _compared_at: int
    _others: OtherTensors
    _optimizer: ComparedOptimizer | None

    def compare_optimizer(self, optimizer: Optimizer) -> None:
        """Compare the optimizers of the ranks, now and in each `compare_ranks`. All ranks must call it, before a step.

        Ranks compare how often ``optimizer.step`` is called from now on, and the options (``lr``, ...) of their
        parameter groups: of groups with the same ``name``, of parameters that several ranks have, and otherwise the
        options that groups took from the optimizer's defaults. `open_checkpoints` calls it.

        Raises:
            PipelineError: SK804 on every rank; names the ranks, and the option.
        """
        self._optimizer = ComparedOptimizer(optimizer)
        self._compare_optimizers()

    def compare_ranks(self) -> None:
        """Refuse to go on if the ranks have diverged. All ranks must call it.

        They compare the parameters and buffers of which several ranks have a copy (tied ones, and those of replicas),
        and their optimizers, if `compare_optimizer` was called. Each checkpoint calls it, and the first `infer` or
        `evaluate` after a training step.

        Raises:
            PipelineError: SK804 on every rank; names the ranks, and the parameter or option.
        """
        self._compare_optimizers()
        trained = self._trained
        held = {**copies(self._chain, self.stages, self._others), **copies(trained._chain, trained.stages)}
        with naming_lost_ranks(self._progress, "for all ranks to compare their weights"):
            require_same_copies(held, self.group, self._others)
        self._weights_changed, trained._compared_at = False, trained.steps

    def _compare_optimizers(self) -> None:
        trained = self._trained
        own = trained._optimizer
        facts = None if own is None else own.facts(copies(trained._chain, trained.stages))
        with naming_lost_ranks(self._progress, "for all ranks to compare their optimizers"):
            require_same_optimizers(facts, self.group)

    @property
    def _trained(self) -> ComparedRanks:
        """The pipeline that trains these weights: this one, or the one that it evaluates."""
        return self._trains or self

    def _trained_since(self) -> bool:
        """Whether a training step has begun since the ranks were compared."""
        return self._trained.steps != self._trained._compared_at
