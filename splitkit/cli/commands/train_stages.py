"""``splitkit train`` of a training step in stages: each rank runs the graphs of its stages as the plan divides them."""

from __future__ import annotations

import copy
import time
from argparse import Namespace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from splitkit._torch import pytree
from splitkit.cli import source
from splitkit.cli.commands import plan_training
from splitkit.cli.common import decoded
from splitkit.cli.rank_process import peak_of_process, rolled_batch
from splitkit.engine.staged_step import StagedStep
from splitkit.graph.losses import loss_of
from splitkit.runtime.ranks.joint_pipeline import JointPipeline, joint_pipeline
from splitkit.testing.pipeline_check import relative_difference


def trained(args: Namespace, file: dict[str, Any], schedule: Any, optimizer: Any) -> dict[str, Any]:
    """Train on this rank.

    Args:
        args: the options of the command.
        file: the data of the plan file.
        schedule: the name of a schedule, or an order.
        optimizer: makes an optimizer of parameters.
    """
    work = plan_training.prepare_step(source.from_plan(args.target, file, args))
    plan = decoded(work.joint.graph_module.graph, args.target, file)
    step = work.joint.split(plan)
    assert isinstance(step, StagedStep)
    whole = copy.deepcopy(work.example.model) if args.check else None
    pipe = joint_pipeline(
        work.joint, step, schedule, args.microbatches, seed=work.source.seed, compiled=bool(args.compile)
    )
    own = optimizer(pipe.parameters())
    check = _Check(pipe, whole, optimizer(whole.parameters()), args.tolerance) if whole is not None else None
    losses, times = list[float](), list[float]()
    for number in range(args.steps):
        batch = rolled_batch(work.example, pipe.microbatches, number, work.source.seed)
        start = time.perf_counter()
        found = pipe.step(*batch[0], **batch[1])
        times.append(time.perf_counter() - start)
        each = _everywhere(pipe, found.losses)
        losses.append(float(each.mean()))
        if check is not None:
            check.gradients(batch, each, number)
        own.step()
        if check is not None:
            check.weights(number)
        own.zero_grad()
    return {
        "command": "train",
        "rank": pipe.rank,
        "model": work.source.to_dict(),
        "note": plan.note,
        "schedule": pipe.order.name,
        "microbatches": pipe.microbatches,
        "replicas": [1] * len(step.stages),
        "first_step": 0,
        "steps": args.steps,
        "losses": losses,
        "step_seconds": median(times) if times else None,
        "check": check.found() if check is not None else None,
        "trace": None,
        "measured": None,
        "ranks": _ranks(pipe),
    }


def _everywhere(pipe: JointPipeline, losses: torch.Tensor | None) -> torch.Tensor:
    """Return the losses of the last stage on every rank, as float64."""
    every = torch.zeros(pipe.microbatches, dtype=torch.float64)
    if losses is not None:
        every.copy_(losses)
    dist.broadcast(every, group_src=pipe.order.rank_of[-1])
    return every


def _ranks(pipe: JointPipeline) -> list[Any]:
    own = {
        "rank": pipe.rank,
        "replica": 0,
        "stages": list(pipe.stages),
        "parameters": sum(p.nbytes for p in pipe.parameters()),
        "peak": peak_of_process(),
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


class _Check:
    """Compares losses, gradients and weights with those of the whole model, which every rank runs beside its stages.

    As in `splitkit.cli.reference_model`, each step is compared from the same state: the whole model takes over the
    gradients before the optimizers step, and all weights after that.
    """

    def __init__(self, pipe: JointPipeline, whole: nn.Module, optimizer: Any, tolerance: float) -> None:
        self._pipe, self._optimizer, self._tolerance = pipe, optimizer, tolerance
        self._whole, self._expected = whole, dict(whole.named_parameters())
        self._own = pipe.named_parameters()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, list(self._own))
        self._home = {name: rank for rank, names in reversed(list(enumerate(every))) for name in names}
        self._apart = {"loss": 0.0, "gradient": 0.0, "weight": 0.0}
        self._furthest = dict.fromkeys(self._apart, "")

    def gradients(self, batch: Any, losses: torch.Tensor, step: int) -> None:
        """Run the whole model on each microbatch, compare losses and gradients, and take over the gradients."""
        count = self._pipe.microbatches
        for i in range(count):
            args, kwargs = pytree.tree_map(partial(_piece, count=count, number=i), batch)
            torch.manual_seed(self._pipe.seed_of(step, i))
            loss = loss_of(self._whole(*args, **kwargs))
            assert loss is not None  # it was captured
            (loss / count).backward()  # type: ignore[no-untyped-call]
            self._note("loss", f"loss of microbatch {i} in step {step}", losses[i], loss.detach().reshape(()))
        for name, parameter in self._own.items():
            other = self._expected[name]
            if parameter.grad is None or other.grad is None:
                if parameter.grad is not other.grad:
                    self._note_lost(f"gradient of {name} in step {step}")
                continue
            self._note("gradient", f"gradient of {name} in step {step}", parameter.grad, other.grad)
            other.grad.copy_(parameter.grad)

    def weights(self, step: int) -> None:
        """Step the whole model, compare the weights, and take over those of all ranks."""
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for name, parameter in self._own.items():
                self._note("weight", f"weight of {name} after step {step}", parameter, self._expected[name])
                self._expected[name].copy_(parameter)
            for name, rank in self._home.items():
                dist.broadcast(self._expected[name].data, group_src=rank)

    def _note(self, kind: str, where: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        apart = relative_difference(found, expected)
        if apart > self._apart[kind]:
            self._apart[kind], self._furthest[kind] = apart, where

    def _note_lost(self, where: str) -> None:
        self._apart["gradient"], self._furthest["gradient"] = float("inf"), f"no {where}"

    def found(self) -> dict[str, Any]:
        """Return the largest differences on any rank, as `ReferenceModel.found` does."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (self._apart, self._furthest))
        apart = {kind: max(found[kind] for found, _ in every) for kind in self._apart}
        furthest = {kind: next(where[kind] for found, where in every if found[kind] == apart[kind]) for kind in apart}
        same = all(value <= self._tolerance for value in apart.values())
        wrong = None if max(apart["loss"], apart["gradient"]) <= self._tolerance else "split"
        told = {"reference": "module", "tolerance": self._tolerance, "same": same, "wrong_step": wrong}
        return {**apart, "furthest": furthest, **told, "burnt_in": None}


def _piece(value: Any, count: int, number: int) -> Any:
    """Return a microbatch's rows of an input."""
    return value.chunk(count)[number] if isinstance(value, torch.Tensor) and value.dim() else value
