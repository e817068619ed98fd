"""Stages for torch's own schedules, where a program brings its loop and its schedule itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.fx import map_arg

from splitkit.engine.split import Split
from splitkit.errors import PipelineError
from splitkit.runtime.chain import Chain, chain_of
from splitkit.runtime.ends import Ends
from splitkit.runtime.replicas import Replicas
from splitkit.runtime.stage import Batch, ChainStage, PartStage
from splitkit.runtime.stagefolder import StageFolder
from splitkit.runtime.support import require_values
from splitkit.runtime.ties import Ties
from splitkit.runtime.values import Carried

SEED = "microbatch_seed"
"""The keyword of the seed of each microbatch, where a stage draws random numbers."""


def stage(
    split: Split | StageFolder,
    rank: int,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    *,
    rank_of: Sequence[int] | None = None,
) -> PipelineStage | list[PipelineStage]:
    """The stage of a rank, for a schedule of ``torch.distributed.pipelining``; a list where it has several.

    Every rank calls it, and gives every input of the graph to ``schedule.step`` by keyword: torch cuts them into
    microbatches, and each stage takes those that it reads; where the model draws random numbers, also the seed of each
    microbatch. The last stage gives the tensors of the model's output, flat; `form_output` gives them their form::

        own = stage(split, rank, group, device)
        schedule = Schedule1F1B(own, 8, loss_fn=lambda out, target: loss(form_output(own, out), target))
        with reduced_ties(own):
            schedule.step(**inputs, microbatch_seed=torch.arange(8), target=target, return_outputs=False)

    `splitkit.runtime.pipeline` does all of this, and names what fails.

    Args:
        split: parts in the order of the stages, captured with the inputs of one microbatch; or a folder of stages.
        rank: of this process in the group.
        group: the ranks of the pipeline; all by default.
        device: of this rank.
        rank_of: the rank of each stage; stage ``s`` is on rank ``s % ranks`` by default, as interleaved schedules have
            it. V-shaped ones go back: ``(0, 1, 1, 0)``.

    Raises:
        PipelineError: SK801 for a split that cannot run on several ranks, SK802 for ranks that are not there, SK806
            for values that this version of torch cannot send.
    """
    chain = split.chain if isinstance(split, StageFolder) else chain_of(split)
    ranks = dist.get_world_size(group)
    homes = tuple(rank_of) if rank_of is not None else tuple(s % ranks for s in range(chain.stages))
    if len(homes) != chain.stages or not all(home in range(ranks) for home in homes) or rank not in homes:
        raise PipelineError(
            "SK802",
            f"rank {rank} of {ranks} has none of {chain.stages} stages, which are on the ranks {list(homes)}",
            "Give rank_of a rank for each stage, and each rank a stage.",
        )
    own, where = [s for s, home in enumerate(homes) if home == rank], torch.device(device)
    if isinstance(split, StageFolder):
        split.load(own, where)
    ties = Ties(chain, homes, Replicas(tuple((r,) for r in range(ranks)), rank, 0, group), group, ())
    made: list[PipelineStage] = []
    seen: set[int] = set()
    for number in own:
        cast(nn.Module, split.parts[chain.keys[number]]).to(where)
        module = KeywordStage(chain, number, where, ties)
        require_values((module,))
        made.append(_Stage(module, number, chain.stages, group, seen))
    return made if len(made) > 1 else made[0]


@contextmanager
def reduced_ties(stages: PipelineStage | Sequence[PipelineStage]) -> Iterator[None]:
    """Around a step of torch's schedule: parameters that stages of several ranks read get the sum of their gradients.

    Args:
        stages: what `stage` gave.
    """
    first = stages if isinstance(stages, PipelineStage) else stages[0]
    with cast(KeywordStage, first.submod).ties.added_up():
        yield


def form_output(stages: PipelineStage | Sequence[PipelineStage], given: Any) -> Any:
    """What the model returns, of what torch's schedule had from the last stage.

    Args:
        stages: what `stage` gave on the rank of the last stage.
        given: a tensor, or several.
    """
    last = stages if isinstance(stages, PipelineStage) else stages[-1]
    return cast(KeywordStage, last.submod).output(given)


class KeywordStage(ChainStage):
    """The part of one stage, which is given the inputs of the graph by keyword.

    Attributes:
        ties: the parameters that it shares with stages of other ranks.
    """

    def __init__(self, chain: Chain, stage: int, device: torch.device, ties: Ties) -> None:
        self._every = tuple(chain.split.module.graph.output_node().all_input_nodes)
        super().__init__(chain, stage, Ends(self._every, _of_torch), Batch(), device)
        self.ties = ties
        inputs = chain.facts.inputs
        given = ((n, inputs[str(n.target)]) for n in self._every if n.op == "placeholder")
        known = {n: Carried(n.name, like) for n, like in given if like is not None}
        self._results = tuple(n for n in self._every if n in known or n.op != "placeholder")
        self._forms = tuple(known.get(n) or chain.value(n).sent(True) for n in self._results) if self.last else ()

    def forward(self, *received: torch.Tensor, **inputs: Any) -> Any:
        """Run one microbatch.

        Raises:
            PipelineError: SK802 for an input, or a seed, that is not there.
        """
        seed = inputs.pop(SEED, None)
        wanted = [str(n.target) for n in self._inputs]
        lacks = [name for name in wanted if name not in inputs]
        if lacks or (seed is None and self.dice.draws):
            raise PipelineError(
                "SK802",
                f"stage {self._stage} was not given {(lacks or [SEED])[0]}",
                f"Give every rank all inputs by keyword, and {SEED}=torch.tensor([...]) where the model draws.",
                lacks or [SEED],
            )
        self._batch.inputs, self._batch.seeds = [inputs], [0 if seed is None else int(seed)]
        return self._watched(received, 0)

    def output(self, given: Any) -> Any:
        """What the model returns, of the tensors that the last stage gave."""
        flat = given if isinstance(given, list | tuple) else (given,)
        values = {n: how.unpacked(v) for n, how, v in zip(self._results, self._forms, flat, strict=True)}
        return self._module.graph.process_outputs(map_arg(self._output.args[0], values.get))

    def _finish(self, number: int, values: Any, inputs: Any) -> Any:
        """The tensors of the output, with a history of their own."""
        found = [values[n] if n in values else inputs[str(n.target)] for n in self._results]
        made = [how.packed(v, self.device, "at the end") for v, how in zip(found, self._forms, strict=True)]
        return made[0] if len(made) == 1 else tuple(made)

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """What torch is told of what the stage gives, on ``meta``."""
        return tuple(how.told for how in self._forms) if self.last else super().leaves


class _Stage(PartStage):
    """Torch's stage; it scales a gradient once where two stages of a rank have one parameter."""

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
