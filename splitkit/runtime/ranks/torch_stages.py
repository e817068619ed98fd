"""Makes stages for torch's own schedules, for programs that bring their own training loop and schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.fx import map_arg

from splitkit.engine.split import Split
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import PipelineError
from splitkit.runtime.folder.load import StageFolder
from splitkit.runtime.ranks.border_values import BorderValue
from splitkit.runtime.ranks.microbatches import MessageShapes, StepSizes
from splitkit.runtime.ranks.planned_chain import chain_of_any
from splitkit.runtime.ranks.rank_device import device_of_rank, place_stages
from splitkit.runtime.ranks.replicas import Replicas, SharedParameters
from splitkit.runtime.ranks.stage import Batch, ChainStage, PartStage, require_plain_values
from splitkit.runtime.ranks.stage_chain import Chain, LastStage
from splitkit.runtime.ranks.stage_weights import require_same_model

SEED = "microbatch_seed"
"""The keyword argument with the seed of each microbatch, if a stage draws random numbers."""


def stage(
    split: Split | StagedStep | StageFolder,
    rank: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    rank_of: Sequence[int] | None = None,
) -> PipelineStage | list[PipelineStage]:
    """Return the stage of a rank, for a schedule of ``torch.distributed.pipelining``; a list if the rank has several.

    Call it on every rank, and pass every input of the graph to ``schedule.step`` by keyword: torch splits them into
    microbatches, and each stage takes the inputs that it reads. If the model draws random numbers, also pass the seed
    of each microbatch. The last stage returns the tensors of the model's output as a flat tuple, from which
    `form_output` restores the output::

        own = stage(split, rank, group, device)
        schedule = Schedule1F1B(own, 8, loss_fn=lambda out, target: loss(form_output(own, out), target))
        with reduced_ties(own):
            schedule.step(**inputs, microbatch_seed=torch.arange(8), target=target, return_outputs=False)

    `splitkit.runtime.pipeline` does all of this, and its errors name rank, stage and microbatch.

    Args:
        split: parts in the order of the stages, captured with the inputs of one microbatch; or a folder of stages.
        rank: the rank of this process in the group.
        group: the ranks of the pipeline; all by default.
        device: the device of this rank.
        rank_of: the rank of each stage; by default stage ``s`` is on rank ``s % ranks``, as in interleaved schedules. A
            V-shaped schedule needs ``(0, 1, 1, 0)``, for example.

    Raises:
        PipelineError: SK801 for a split that cannot run on several ranks, SK802 for ranks that do not exist, SK806
            for values that this version of torch cannot send, SK804 if the ranks hold different weights.
    """
    chain = chain_of_any(split)
    ranks = dist.get_world_size(group)
    homes = tuple(rank_of) if rank_of is not None else tuple(s % ranks for s in range(chain.stages))
    if len(homes) != chain.stages or not all(home in range(ranks) for home in homes) or rank not in homes:
        raise PipelineError(
            "SK802",
            f"rank {rank} of {ranks} has none of the {chain.stages} stages, which are on ranks {list(homes)}",
            "Give rank_of a rank for each stage, and each rank a stage.",
        )
    own, where = [s for s, home in enumerate(homes) if home == rank], device_of_rank(device, group)
    if isinstance(split, StageFolder):
        split.load(own, where)
    place_stages(chain, own, where)
    require_same_model(chain, own, group)
    shared_parameters = SharedParameters(
        chain, homes, Replicas(tuple((r,) for r in range(ranks)), rank, 0, group), group, ()
    )
    made: list[PipelineStage] = []
    seen: set[int] = set()
    for number in own:
        module = KeywordStage(chain, number, where, shared_parameters)
        require_plain_values((module,))
        made.append(_Stage(module, number, chain.stages, group, seen))
    return made if len(made) > 1 else made[0]


@contextmanager
def reduced_ties(stages: PipelineStage | Sequence[PipelineStage]) -> Iterator[None]:
    """Wrap a step of torch's schedule: parameters that several ranks read get the sum of their gradients.

    Args:
        stages: the result of `stage`.
    """
    first = stages if isinstance(stages, PipelineStage) else stages[0]
    with cast(KeywordStage, first.submod).shared_parameters.added_up():
        yield


def form_output(stages: PipelineStage | Sequence[PipelineStage], given: Any) -> Any:
    """Restore the model's output from the tensors that torch's schedule got from the last stage.

    Args:
        stages: the result of `stage` on the rank of the last stage.
        given: a tensor, or several.
    """
    last = stages if isinstance(stages, PipelineStage) else stages[-1]
    return cast(KeywordStage, last.submod).output(given)


class KeywordStage(ChainStage):
    """The module of one stage, which takes the inputs of the graph by keyword.

    Attributes:
        shared_parameters: the parameters that the stage shares with stages of other ranks.
    """

    def __init__(self, chain: Chain, stage: int, device: torch.device, shared_parameters: SharedParameters) -> None:
        self._every = tuple(chain.split.module.graph.output_node().all_input_nodes)
        self._sizes = chain.facts.sizes
        fixed = MessageShapes(self._sizes.captured)
        super().__init__(chain, stage, LastStage(self._every, _of_torch), Batch(), device, fixed)
        self.shared_parameters = shared_parameters
        inputs = chain.facts.inputs
        given = ((n, inputs[str(n.target)]) for n in self._every if n.op == "placeholder")
        known = {n: BorderValue(n.name, like) for n, like in given if like is not None}
        self._results = tuple(n for n in self._every if n in known or n.op != "placeholder")
        self._forms = tuple(known.get(n) or chain.value(n).sent(True) for n in self._results) if self.last else ()

    def forward(self, *received: torch.Tensor, **inputs: Any) -> Any:
        """Run one microbatch.

        Raises:
            PipelineError: SK802 for a missing input or seed.
        """
        seed = inputs.pop(SEED, None)
        wanted = [*(str(n.target) for n in self._inputs), *(self._sizes.inputs if self._computed else ())]
        lacks = [name for name in wanted if name not in inputs]
        if lacks or (seed is None and self.rng.draws):
            raise PipelineError(
                "SK802",
                f"stage {self._stage} was not given {(lacks or [SEED])[0]}",
                f"Give every rank all inputs by keyword, and {SEED}=torch.tensor([...]) where the model draws.",
                lacks or [SEED],
            )
        self._batch.inputs, self._batch.seeds = [inputs], [0 if seed is None else int(seed)]
        self._batch.sizes = StepSizes((self._sizes.bound(inputs) if self._computed else {},))
        return self._watched(received, 0)

    def output(self, given: Any) -> Any:
        """Restore the model's output from the tensors of the last stage."""
        flat = given if isinstance(given, list | tuple) else (given,)
        values = {n: how.unpacked(v) for n, how, v in zip(self._results, self._forms, flat, strict=True)}
        return self._module.graph.process_outputs(map_arg(self._output.args[0], values.get))

    def _finish(self, number: int, values: Any, inputs: Any) -> Any:
        """The tensors of the output, with a history of their own."""
        found = [values[n] if n in values else inputs[str(n.target)] for n in self._results]
        made = [how.packed(v, self.device, "at the end") for v, how in zip(found, self._forms, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

    @property
    def output_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors on ``meta`` that torch is told the stage returns."""
        return tuple(how.meta_tensor for how in self._forms) if self.last else super().output_tensors


class _Stage(PartStage):
    """Torch's stage, which scales a gradient once even if two stages of a rank share the parameter."""

    def __init__(
        self, module: KeywordStage, number: int, count: int, group: dist.ProcessGroup | None, seen: set[int]
    ) -> None:
        super().__init__(module, number, count, group)
        self.owned = [p for p in module.parameters() if id(p) not in seen]
        seen.update(map(id, self.owned))

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide the gradients of this stage's parameters."""
        for parameter in self.owned:
            if parameter.grad is not None:
                parameter.grad.div_(grad_scale_factor)


def _of_torch(output: Any, target: Any) -> torch.Tensor:
    raise AssertionError("torch's schedule has the loss")
