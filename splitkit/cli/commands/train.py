"""``splitkit train``: trains a plan as a pipeline of several processes, and compares it with the unsplit model."""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import splitkit as sk
from splitkit._torch import group_of_dimensions
from splitkit.cli import DIFFERENT, launcher, source
from splitkit.cli.common import (
    TRAINING,
    CapturedModel,
    compile_parts,
    decoded,
    is_folder,
    open_folder,
    plan_file,
    planner,
    policy_of,
    prepare_for,
    require_compiler,
    require_fitting_options,
    require_own_recompute,
    require_policy_option,
    stages_of_file,
    with_part_flags,
)
from splitkit.cli.factories import require_factory
from splitkit.cli.mesh import REPLICAS, STAGES, ranks_of_mesh
from splitkit.cli.outcome import FOR_PERFETTO, STDOUT, Lines, Outcome, seconds_text
from splitkit.costs.measuring_run import progress
from splitkit.engine.staged_step import StagedStep
from splitkit.errors import FileError, PipelineError, UsageError
from splitkit.graph.shards import local_tensor
from splitkit.pipeline.synthesize import load_order
from splitkit.units import size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from splitkit.cli.reference_model import ReferenceModel
    from splitkit.engine.split import Split
    from splitkit.pipeline.order import PipelineOrder
    from splitkit.plans.record import Plan
    from splitkit.runtime.folder.training_checkpoint import CheckpointFolder
    from splitkit.runtime.ranks.pipeline import Pipeline


# The checkpoints of ``splitkit train``: which options go together, when they are opened and when they are saved.


def require_usable(args: Namespace) -> None:
    """Refuse options that need ``--checkpoint`` or ``--nproc``, and a folder with another run's checkpoints."""
    if args.checkpoint is None:
        needy = ("resume", "every", "keep", "async_save", "skip_failed_saves", "max_restarts")
        if given := [name.replace("_", "-") for name in needy if getattr(args, name) not in (None, False)]:
            raise UsageError("SK601", f"--{given[0]} needs a folder", "Add --checkpoint FOLDER.")
        return
    if args.max_restarts is not None and args.nproc is None:
        remedy = "Add --nproc N, or give it to torchrun: torchrun --max-restarts N ... -m splitkit train ... --resume"
        raise UsageError("SK601", "--max-restarts restarts the ranks that --nproc starts", remedy)
    from splitkit.runtime.folder.checkpoint_folder import require_free

    require_free(Path(args.checkpoint), args.resume)


def opened_checkpoints(args: Namespace, pipe: Pipeline, optimizer: Any) -> CheckpointFolder | None:
    """Open the folder of ``--checkpoint``, and load the last checkpoint with ``--resume``.

    Args:
        args: the arguments of the command. A given ``--lr`` replaces the learning rate of the checkpoint.
        pipe: the pipeline.
        optimizer: its optimizer.
    """
    if args.checkpoint is None:
        return None
    from splitkit.runtime.folder.training_checkpoint import open_checkpoints

    keep = {} if args.keep is None else {"keep": args.keep}
    found = open_checkpoints(args.checkpoint, pipe, optimizer, resume=args.resume, **keep)
    if args.lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = args.lr
    return found


def save(args: Namespace, folder: CheckpointFolder | None, done: int) -> list[str]:
    """Save after the last step, and after every ``--every`` steps.

    Args:
        args: the arguments of the command.
        folder: the folder of ``--checkpoint``.
        done: the number of steps done.

    Returns:
        Why checkpoints could not be written, with ``--skip-failed-saves``: this one, or the one before with
        ``--async-save``. The last one must be written.
    """
    if folder is None or not (done == args.steps or (args.every and done % args.every == 0)):
        return []
    skipped: list[str] = []
    with _skipping(skipped, folder, args.skip_failed_saves):
        folder.wait()
    with _skipping(skipped, folder, args.skip_failed_saves and done < args.steps):
        folder.save(wait=not args.async_save)
    return skipped


@contextmanager
def _skipping(skipped: list[str], folder: CheckpointFolder, may_skip: bool) -> Iterator[None]:
    """Say in place of raising that a checkpoint cannot be written; all ranks raise the same."""
    try:
        yield
    except FileError as error:
        if not may_skip or error.code != "SK504":
            raise
        skipped.append(error.reason)
        if os.environ.get("RANK") == "0":
            last = folder.last.name if folder.last is not None else "none"
            print(f"warning: {error.reason}; skipped, the last checkpoint is {last}", file=sys.stderr, flush=True)


RATES = {"adamw": 1e-3, "sgd": 1e-2}
"""The default learning rates."""


def run(args: Namespace) -> Outcome:
    """Run ``splitkit train``: start the ranks, or be one of them."""
    require_usable(args)
    if args.trace and args.steps < 2:
        raise UsageError("SK601", "--trace needs a step after the first one, which warms up", "Give --steps 2 or more.")
    require_compiler(args)
    if "RANK" in os.environ:
        return _rank(args)
    require_trace_file(args)
    if args.nproc is None:
        raise UsageError(
            "SK601",
            "a pipeline needs several processes, and this is a single one",
            "Add --nproc N, or start it with: torchrun --nproc-per-node N -m splitkit train ...",
        )
    require_target(args)
    code, data = launcher.answer(words_for_ranks(), args.nproc, args.timeout, args.max_restarts or 0)
    if data is None:
        return Outcome({}, [], code or 1, quiet=True)
    return Outcome(data, _text(data), code)


def require_trace_file(args: Namespace) -> None:
    """Refuse a trace on standard output, to which the ranks write their answer."""
    if args.trace == STDOUT:
        raise UsageError(
            "SK603", "--trace - would mix with the output of the ranks", "Name a file: --trace trace.json."
        )


def words_for_ranks() -> list[str]:
    """Return the command line for the ranks: that of this process without the options of the launcher."""
    own, words, out = ("--nproc", "--max-restarts"), iter(sys.argv[1:]), list[str]()
    for word in words:
        if word in own:
            next(words)
        elif word.partition("=")[0] not in own:
            out.append(word)
    return out


def _rank(args: Namespace) -> Outcome:
    data = launcher.in_group(lambda: _train(args), args.timeout)
    different = args.check and not data["check"]["same"]
    trace, is_first = data.pop("measured"), data["rank"] == 0
    written = {args.trace: trace.to_chrome_trace()} if trace and is_first else {}
    return Outcome(data, _text(data), DIFFERENT if different else 0, written, quiet=not is_first)


def _train(args: Namespace) -> dict[str, Any]:
    from splitkit.cli.reference_model import ReferenceModel
    from splitkit.runtime.ranks.pipeline import pipeline
    from splitkit.runtime.ranks.rank_agreement import from_every

    work, split = _split(args)
    group = group_of(work)
    pipe = pipeline(split, schedule_or_order(args.schedule), args.microbatches, seed=work.source.seed, group=group)
    if args.fsdp:
        pipe.shard(None if work.mesh is None else work.mesh[REPLICAS])
    optimizer = _optimizer(args, pipe.parameters())
    beside = None
    if args.check:
        batch = batch_of(work, pipe.microbatches, 0)
        beside = ReferenceModel(pipe, work, partial(_optimizer, args), args.tolerance, batch)
    compile_parts(pipe, args.compile)
    saved = opened_checkpoints(args, pipe, optimizer)
    first = pipe.steps
    if beside is not None:
        beside.begin(optimizer if first else None)
    if args.trace and args.steps - first < 2:
        reason = f"--trace needs a step after the first one, but {first} of {args.steps} steps are done"
        raise UsageError("SK601", reason, f"Give --steps {first + 2} or more.")
    found = _steps(args, work, pipe, optimizer, beside, saved)
    own = {
        "rank": dist.get_rank(),
        "replica": pipe.replicas.own,
        "stages": list(pipe.stages),
        "parameters": sum(local_tensor(p).nbytes for p in pipe.parameters()),
        "peak": launcher.peak_of_process(),
    }
    return {
        "rank": dist.get_rank(),
        "model": work.source.to_dict(),
        "note": split.plan.note,
        "schedule": pipe.order.name,
        "microbatches": pipe.microbatches,
        "replicas": [pipe.replicas.pipelines] * len(pipe.order.rank_of),
        "first_step": first,
        **found,
        "ranks": from_every(own, None),
    }


def _split(args: Namespace) -> tuple[CapturedModel, Any]:
    """Return this rank's model, split by the plan of rank 0 with the flags for parts; or the stages of a folder."""
    require_fitting_options(args)
    if is_folder(args.target):
        return open_folder(args)
    work, plan = planned_together(args)
    return work, split_as_planned(work, with_part_flags(plan, args))


def split_as_planned(work: CapturedModel, plan: Plan) -> Split | StagedStep:
    """Return the stages of a plan of a model, or of its training step."""
    if not work.trains:
        return sk.split(work.gm, plan)
    found = work.joint.split(plan)
    assert isinstance(found, StagedStep), "`require_target` refuses other plans of training steps"
    return found


def planned_together(args: Namespace) -> tuple[CapturedModel, Plan]:
    """Return the model of this rank, and the plan that rank 0 makes for all."""
    from splitkit.runtime.ranks.rank_agreement import planned_once

    file = plan_file(args)
    if file is None:
        require_policy_option(args)
        work, planned = planner(args, args.target)
        return work, planned_once(work.gm, lambda: planned()[0])
    captured = prepare_for(args, file, getattr(args, "dp", None) or 1)
    plan = planned_once(captured.gm, lambda: decoded(captured.gm.graph, args.target, file), group_of(captured))
    return captured, plan


def group_of(work: CapturedModel) -> Any:
    """Return the ranks with the stages of this rank's share of the model; ``None`` for all ranks."""
    return None if work.mesh is None else group_of_dimensions(work.mesh, STAGES, REPLICAS)


def schedule_or_order(word: str) -> str | PipelineOrder:
    """Return the name of a schedule, or the order in a file of torch's format."""
    return load_order(word) if word.endswith(".csv") else word


def _optimizer(args: Namespace, parameters: Iterable[Any]) -> Any:
    rate = args.lr if args.lr is not None else RATES[args.optimizer]
    if args.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=rate)
    return torch.optim.AdamW(parameters, lr=rate)


def _steps(
    args: Namespace,
    work: CapturedModel,
    pipe: Pipeline,
    optimizer: Any,
    beside: ReferenceModel | None,
    saved: CheckpointFolder | None,
) -> dict[str, Any]:
    from splitkit.runtime.ranks.measurements import StepRecorder

    losses, times, skipped, recorder, first = list[float](), list[float](), list[str](), None, pipe.steps
    with progress(args.steps - first, "training", hidden=dist.get_rank() > 0) as advance:
        for step in range(first, args.steps):
            batch = batch_of(work, pipe.microbatches, step)
            start = time.perf_counter()
            losses_of = pipe.step(*batch[0], loss_everywhere=True, **batch[1]).losses
            times.append(time.perf_counter() - start)
            if args.trace and recorder is None:
                recorder = StepRecorder(pipe)
            each = _require_numbers(losses_of, step)
            losses.append(float(each.mean()))
            if beside is None:
                optimizer.step()
            else:
                beside.step(batch, each, optimizer)
            optimizer.zero_grad()
            advance(description=f"loss {losses[-1]:.4f}")
            skipped += save(args, saved, step + 1)
    if saved is not None:
        saved.wait()
    return {
        "steps": args.steps,
        "losses": losses,
        "step_seconds": median(times) if times else None,
        "check": beside.found() if beside is not None else None,
        "trace": args.trace if recorder is not None else None,
        "failed_saves": skipped,
        "measured": recorder.measured() if recorder is not None else None,
    }


def batch_of(work: CapturedModel, count: int, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make a batch of different microbatches: the example's inputs, each rolled along the last dimension."""
    return launcher.rolled_batch(work.example, count, step, work.source.seed)


def _require_numbers(losses: torch.Tensor | None, step: int) -> torch.Tensor:
    """Return the losses of a step, ``[microbatches]``.

    Raises:
        PipelineError: SK805 on every rank if a loss is NaN; it names the first such microbatch.
    """
    assert losses is not None
    bad = [number for number, loss in enumerate(losses.tolist()) if loss != loss]
    if bad:
        raise PipelineError(
            "SK805",
            f"the loss of microbatch {bad[0]} in step {step} is nan",
            "Lower --lr." if step else "Correct the model or its inputs: no optimizer step has been made yet.",
        )
    return losses


def _ranks(data: dict[str, Any]) -> str:
    ranks, counts = f"{len(data['ranks'])} ranks", data["replicas"]
    return f"{ranks}, {counts[0]} pipelines" if counts[0] > 1 else ranks


def _text(data: dict[str, Any]) -> Lines:
    losses, check = data["losses"], data["check"]
    rows = {"schedule": f"{data['schedule']}, {data['microbatches']} microbatches on {_ranks(data)}"}
    if losses:
        shown = losses if len(losses) < 5 else [*losses[:2], *losses[-2:]]
        rows["steps"] = f"{data['first_step']} to {data['steps']}, {seconds_text(data['step_seconds'])} each"
        rows["loss"] = ", ".join(f"{loss:.4f}" for loss in shown[:2]) + (
            f" ... {', '.join(f'{loss:.4f}' for loss in shown[2:])}" if len(losses) > 2 else ""
        )
    else:
        rows["steps"] = f"none left: all {data['first_step']} are done"
    if failed := data.get("failed_saves"):
        rows["skipped"] = f"{len(failed)} checkpoints; {failed[-1]}"
    if check:
        rows |= pipeline_check_rows(check)
    each = [
        (r["rank"], ", ".join(map(str, r["stages"])), size(r["parameters"]), size(r["peak"])) for r in data["ranks"]
    ]
    written = [wrote_trace(data["trace"], max(data["replicas"]) == 1)] if data.get("trace") else []
    titles = ("rank", "stages", "parameters", "peak of the process")
    return [facts(rows), "", table(titles, each, ("rank",)), *written]


def wrote_trace(path: str, comparable: bool = True) -> str:
    """Say that a trace of what the ranks did was written, and what can be done with it."""
    if not comparable:
        return f"wrote {path} {FOR_PERFETTO}"
    return f"wrote {path}: splitkit view PLAN.json --measured {path} -o page.html compares it with the plan"


_REFERENCES = {
    "module": "the module that the factory makes",
    "graph": "the captured graph, since the module has other inputs or parameters than the graph",
}


def pipeline_check_rows(check: dict[str, Any]) -> dict[str, str]:
    """Return what ``splitkit train --check`` found, as rows of a table: title -> text."""
    differ = f"loss {check['loss']:.1e}, gradients {check['gradient']:.1e}, weights {check['weight']:.1e}"
    rows = {
        "same": f"{'yes' if check['same'] else 'NO'} (largest relative differences: {differ})",
        "compared with": _REFERENCES[check["reference"]],
    }
    return rows if check["same"] else rows | {"furthest": _furthest(check)}


def _furthest(check: dict[str, Any]) -> str:
    """Return where pipeline and model differ by more than the tolerance, and why, or how to tell rounding from it."""
    where = [words for what, words in check["furthest"].items() if not check[what] <= check["tolerance"]]
    found = check["burnt_in"]
    if found is None:
        return "\n".join([*where, "try the model in float64: if there is no difference then, this is rounding"])
    named = f"output{found['output']} of microbatch {found['microbatch']}"
    first = "its gradients" if found["output"] is None else named
    return "\n".join(
        [
            *where,
            "the capture burnt in what Python code decided: the captured graph does what the pipeline does, and the "
            f"module does not; the first difference is {first} in step {found['step']}",
        ]
    )


# Refuses what no rank of ``splitkit train`` could run, before any rank is started: each would report it on its own.


def require_target(args: Namespace) -> None:
    """Refuse a target that no rank could run.

    Raises:
        UsageError: SK601 for a missing ``--model`` or policy, or a plan of something else than stages.
        CaptureError: SK403 for a factory that does not exist.
        FileError: SK50x for a plan or a folder of stages that cannot be read, or is damaged.
        ScheduleError: SK330 for a schedule that does not allow these numbers of stages and processes.
    """
    if is_folder(args.target):
        _require_folder(args)
        return
    file = plan_file(args)
    stages = 0 if file is None else stages_of_file(file)
    if file is not None and file.get("what") == TRAINING and not stages:
        reason = f"{args.target} divides a training step into forward and backward, and has no stages"
        raise UsageError("SK601", reason, f"Run it with: splitkit run {args.target}; or plan with --stages N.")
    if stages:
        require_own_recompute(args)
    made = require_model(args, file, "train")
    ranks = ranks_of_stages(made, args.nproc)
    if stages := stages or (args.stages if file is None else 0):
        _require_order(args, [1] * stages, ranks)
    if file is None or stages:
        return
    if isinstance(parts := file.get("parts"), list):
        counts = [p.get("replicas", 1) for p in parts if isinstance(p, dict)]
        _require_order(args, [n for n in counts if isinstance(n, int)])


def ranks_of_stages(made: source.Source, started: int) -> int:
    """Return how many of the ranks have different stages, or replicas of them.

    Raises:
        UsageError: SK601 if the ranks that share each stage of a mesh do not divide them.
    """
    share = ranks_of_mesh(made.mesh)
    if started % share:
        reason = f"{started} ranks cannot have stages of {share} ranks each ({made.mesh})"
        raise UsageError("SK601", reason, f"Start a multiple of {share} ranks.")
    return started // share


def require_model(args: Namespace, file: dict[str, Any] | None, command: str) -> source.Source:
    """Refuse a model, a loss or a policy that no rank could make; return what the model is made of.

    Args:
        args: the options of the command.
        file: the data of the plan file, ``None`` for a model and a policy.
        command: the name of the command.

    Raises:
        UsageError: SK601 for a missing ``--model`` or policy, or a loss that is not known.
        CaptureError: SK403 for a factory or a loss that does not exist.
    """
    if file is None:
        require_policy_option(args)
        policy_of(args)
    made = source.from_args(args.target, args) if file is None else source.from_plan(args.target, file, args)
    source.require_inputs(made, command)
    require_factory(made.spec)
    return made


def _require_folder(args: Namespace) -> None:
    held = sk.runtime.open_stages(args.target, args.weights)
    files = [str(row["file"].text()) for row in held.manifest["stages"].items()]
    if missing := [file for file in files if not (Path(args.target) / file).is_file()]:
        reason = f"{args.target} has no {missing[0]}, which its manifest names"
        raise FileError("SK504", reason, "Copy the whole folder, or split again.", missing)
    if args.check:
        require_factory(source.from_plan(args.target, held.manifest.value, args).spec)
    _require_order(args, [held.plan.parts[key].replicas for key in held.names])


def _require_order(args: Namespace, counts: Sequence[int], ranks: int | None = None) -> None:
    """Refuse a schedule that does not allow these numbers of replicas of each stage, processes and microbatches."""
    from splitkit.runtime.ranks.order_runner import microbatches_or_usual, placed_order
    from splitkit.runtime.ranks.replicas import require_replicable

    counts = counts if args.dp is None else [args.dp] * len(counts)
    if not counts or min(counts) < 1:
        return
    ranks = args.nproc if ranks is None else ranks
    schedule = schedule_or_order(args.schedule)
    microbatches = microbatches_or_usual(schedule, args.microbatches)
    require_replicable((), counts, ranks, microbatches)
    placed_order(schedule, counts[0], len(counts), microbatches, ranks)
