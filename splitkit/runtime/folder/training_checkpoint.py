"""Saves and loads the state of a training run with a pipeline, which may continue with any number of stages and ranks.

Names are those of the unsplit model. Tensors are in files of ``torch.distributed.checkpoint``, to which each rank
writes what it holds; the rest is JSON. `splitkit.runtime.folder.checkpoint_folder` has the layout of the folder.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from splitkit import files
from splitkit.checks import is_whole, shown
from splitkit.engine.json_fields import JsonField
from splitkit.errors import FileError, PipelineError, SplitError
from splitkit.runtime.devices.accelerators import DeviceRng
from splitkit.runtime.folder import checkpoint_folder as on_disk
from splitkit.runtime.folder.checkpoint_reader import (
    cause_of,
    look_text,
    read_stored,
    without_planner_log,
)
from splitkit.runtime.folder.optimizer_state import (
    decode_state,
    empty_tensors,
    encode_optimizer,
    encode_state,
    load_optimizer,
    merge_optimizers,
    prepare_optimizer,
    require_known,
    require_storable,
)
from splitkit.runtime.ranks.faults import beating
from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.runtime.ranks.rank_agreement import from_every
from splitkit.runtime.ranks.replicas import subgroup, with_ranks_across
from splitkit.short_repr import brief

T = TypeVar("T")
MODEL = "model."


def open_checkpoints(
    folder: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: Optimizer,
    *,
    scheduler: Any = None,
    loader: Any = None,
    state: Mapping[str, Any] | None = None,
    keep: int = 2,
    resume: bool = False,
) -> CheckpointFolder:
    """Open a folder for the checkpoints of a run, and load the last one if the run is resumed.

    Call it on every rank, after `Pipeline.shard` and before the first step. It raises errors immediately that would
    otherwise occur later: for a folder that cannot be written or that belongs to another run, and for state that cannot
    be saved.

    A checkpoint has parameters and buffers, the optimizer's state and options, the number of steps, the random number
    generators of each rank, and the objects given here. Everything is saved by name, so the run may continue with a
    different number of stages and replicas, sharded or not, and over other ranks.

    Args:
        folder: the folder, created if necessary; all ranks must see the same.
        pipe: the pipeline.
        optimizer: the optimizer of the pipeline's parameters.
        scheduler: a learning rate scheduler, or another object with ``state_dict`` and ``load_state_dict``; its state
            must be the same on all ranks.
        loader: a data loader with ``state_dict`` and ``load_state_dict``, such as torchdata's ``StatefulDataLoader``.
            The first rank that has one saves its position, from which all ranks continue, since they read the same
            batches.
        state: more data to save, see `CheckpointFolder.state`; rank 0's is saved.
        keep: how many checkpoints to keep; older ones are removed when a new one is complete.
        resume: whether to continue from the last checkpoint in the folder, if there is one.

    Raises:
        FileError: SK504 if the folder cannot be written or read; SK506 for state that cannot be saved; SK512 if the
            folder has another run's checkpoints; SK503, SK505 and SK507 if the last checkpoint has another schema, is
            damaged or has a file of another one, or does not fit model, optimizer or scheduler.
        PipelineError: SK802 if the optimizer has parameters that the pipeline does not have, or ``keep`` is invalid;
            SK804 if the schedulers of the ranks differ, or their optimizers (`Pipeline.compare_optimizer`).
    """
    return CheckpointFolder(Path(folder), pipe, optimizer, scheduler, loader, dict(state or {}), keep, resume)


class _Writer(FileSystemWriter):
    """Torch's writer with the error of the file system, which an error about the end of a zip file hides."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from error


class CheckpointFolder:
    """The checkpoints of a run, see `open_checkpoints`.

    Attributes:
        path: the folder.
        state: more data to save: numbers, strings, tensors, and containers of these. If a checkpoint has been loaded,
            the data in it.
        last: the folder of the last complete checkpoint; ``None`` if there is none.
    """

    def __init__(
        self,
        path: Path,
        pipe: Pipeline,
        optimizer: Optimizer,
        scheduler: Any,
        loader: Any,
        state: dict[str, Any],
        keep: int,
        resume: bool,
    ) -> None:
        self.path, self.state = path, state
        self._pipe, self._optimizer, self._scheduler, self._loader = pipe, optimizer, scheduler, loader
        self._group = with_ranks_across(pipe.group, pipe.meshes.values())
        self._rank = dist.get_rank(self._group)
        self._keep = keep
        self._background: dist.ProcessGroup | None = None
        self._writing: tuple[Path, Path, Future[None]] | None = None
        self._loader_rank = -1
        self.last: Path | None = None
        with self._naming_loss(f"opened {path}"):
            every = self._on_all(self._checked)
            self._parameters = {name: look for rank in every for name, look in rank["parameters"].items()}
            self._loader_rank = next((rank for rank, found in enumerate(every) if found["loader"]), -1)
            needed = sum({name: size for found in every for name, size in found["bytes"].items()}.values())
            self._run, last = self._on_first(lambda: on_disk.claim(path, resume, needed))
            self._on_all(self._require_folder)
            pipe.compare_optimizer(optimizer)
            if last is not None:
                self._load(last)
                self.last = last

    __repr__ = brief

    def save(self, *, wait: bool = True) -> Path:
        """Save the state after the pipeline's last step. All ranks must call it.

        The checkpoint is either complete or absent, even if a process ends at any time: its folder is renamed when all
        ranks have written everything. Older checkpoints are removed after that.

        Args:
            wait: whether to wait until it is complete. Otherwise the state is copied to the CPU's memory, and written
                while training goes on; `wait`, or the next `save`, waits and reports a failure.

        Returns:
            The folder of the checkpoint.

        Raises:
            FileError: SK504 on all ranks if one cannot write; SK506 for state that cannot be saved; SK512 if another
                process has opened the folder. Earlier checkpoints are still there.
            PipelineError: SK804 if the ranks have diverged (`Pipeline.compare_ranks`), or their schedulers differ;
                SK805 if a rank is gone.
        """
        self.wait()
        step = self._pipe.steps
        with self._naming_loss(f"saved step {step}"):
            self._pipe.compare_ranks()
            tensors: dict[str, torch.Tensor] = {}
            every = self._on_all(lambda: self._encoded(tensors))
            record: dict[str, Any] = {}
            place, draft = self._on_first(lambda: self._begun(step, every, record))
            if wait:
                digests = self._on_all(lambda: self._write(tensors, draft), draft)
                self._on_first(lambda: self._complete(record, digests, place, draft), draft)
                self.last = place
            else:
                self._writing = place, draft, self._write_beside(tensors, record, place, draft)
        return place

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete, if there is one. All ranks must call it.

        Raises:
            FileError, PipelineError: as `save`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            place, draft, done = writing
            with self._naming_loss(f"saved {place}"):
                self._on_all(lambda: self._done(place, done), draft)
            self.last = place

    def _checked(self) -> dict[str, Any]:
        """Refuse what can be refused before the first step; return what the other ranks must know."""
        if not is_whole(self._keep, 1):
            raise PipelineError("SK802", f"keep is {shown(self._keep)}", "Give a whole number of at least 1.")
        such = "one of torch.optim.lr_scheduler", "torchdata's StatefulDataLoader"
        for name, thing, known in zip(("scheduler", "loader"), (self._scheduler, self._loader), such, strict=True):
            if thing is not None and not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
                raise FileError(
                    "SK506",
                    f"the {name}, a {type(thing).__name__}, has no state_dict and load_state_dict to save it by",
                    f"Leave it out, or use one that has, such as {known}.",
                )
        require_known(self._optimizer, self._pipe.named_parameters())
        tensors: dict[str, torch.Tensor] = {}
        self._encoded(tensors)
        return {
            "parameters": {n: look_text(p.shape, p.dtype) for n, p in self._pipe.named_parameters().items()},
            "bytes": {name: t.numel() * t.element_size() for name, t in tensors.items()},
            "loader": self._loader is not None,
        }

    def _require_folder(self) -> None:
        """Refuse a folder that this rank does not share with rank 0, or to which it cannot write."""
        on_disk.require_own(self.path, self._run)
        try:
            files.require_room(self.path)
        except OSError as error:
            raise on_disk.unwritable(self.path, error) from error

    def _encoded(self, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Return this rank's share of the record; add its tensors, which alias those of the run."""
        pipe, rank = self._pipe, self._rank
        for name, tensor in pipe.named_tensors().items():
            require_storable(name, tensor)
            tensors[MODEL + name] = tensor.detach()
        scheduler = self._scheduler
        schedule = None
        if scheduler is not None:
            schedule = encode_state(_marked(scheduler.state_dict(), self._optimizer), "scheduler", tensors)
        loader = self._loader.state_dict() if rank == self._loader_rank else None
        return {
            "optimizer": encode_optimizer(self._optimizer, pipe.named_parameters(), tensors),
            "scheduler": None if scheduler is None else {"class": type(scheduler).__name__, "state": schedule},
            "loader": encode_state(loader, "loader", tensors),
            "random": encode_state(random_state(pipe.device), f"random.{rank}", tensors),
            "state": encode_state(self.state, "state", tensors) if rank == 0 else None,
        }

    def _begun(self, step: int, every: list[dict[str, Any]], record: dict[str, Any]) -> tuple[Path, Path]:
        """Fill the record, on rank 0; return the folder that the checkpoint will have, and the one to write it in."""
        on_disk.require_own(self.path, self._run)
        record |= {
            "torch": torch.__version__,
            "step": step,
            "parameters": self._parameters,
            "optimizer": merge_optimizers([each["optimizer"] for each in every]),
            "scheduler": merge_schedulers([each["scheduler"] for each in every]),
            "loader": every[self._loader_rank]["loader"] if self._loader_rank >= 0 else None,
            "random": [each["random"] for each in every],
            "state": every[0]["state"],
        }
        return on_disk.begin(self.path, step)

    def _write(self, tensors: dict[str, torch.Tensor], draft: Path) -> dict[str, str]:
        """Write the tensors of this rank, and return the digests of its files."""
        with self._refusing(), without_planner_log():
            write(tensors, storage_writer=_Writer(draft), process_group=self._group)
            return self._digests(draft)

    def _digests(self, draft: Path) -> dict[str, str]:
        written, ranks = [file.name for file in draft.iterdir()], dist.get_world_size(self._group)
        return {n: on_disk.digest_of_file(draft / n) for n in on_disk.of_rank(written, self._rank, ranks)}

    def _write_beside(
        self, tensors: dict[str, torch.Tensor], record: dict[str, Any], place: Path, draft: Path
    ) -> Future[None]:
        """Write in another thread, which has a process group of its own; rank 0 completes the checkpoint there.

        The result is done when this rank has done its share.
        """
        if self._background is None:
            self._background = subgroup(self._group, range(dist.get_world_size(self._group)), "gloo")
        done: Future[None] = Future()

        def written(found: Future[Any]) -> None:
            try:
                digests = self._on_all(lambda: self._written(found, draft), group=self._background)
                if self._rank == 0:
                    self._complete(record, digests, place, draft)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        began = async_save(tensors, storage_writer=_Writer(draft), process_group=self._background)
        (began.upload_completion if isinstance(began, AsyncSaveResponse) else began).add_done_callback(written)
        return done

    def _written(self, found: Future[Any], draft: Path) -> dict[str, str]:
        with self._refusing():
            found.result()
            return self._digests(draft)

    def _done(self, place: Path, done: Future[None]) -> None:
        with self._naming_loss(f"saved {place}"):
            done.result()

    def _complete(self, record: dict[str, Any], digests: list[dict[str, str]], place: Path, draft: Path) -> None:
        with self._refusing():
            on_disk.commit(draft, place, record, {n: d for each in digests for n, d in each.items()}, self._run)
        on_disk.remove_older(self.path, self._keep)

    def _load(self, place: Path) -> None:
        record = JsonField(str(place), "", self._on_first(lambda: on_disk.read_record(place).value))
        self._on_all(lambda: self._require_model(record["parameters"]))
        self._on_all(lambda: on_disk.require_undamaged(place, self._rank, dist.get_world_size(self._group)))
        self._on_all(lambda: self._restore(place, record))
        self._pipe.steps = record["step"].whole()

    def _require_model(self, stored: JsonField) -> None:
        theirs, own = {name: look.text() for name, look in stored.fields()}, self._parameters
        for name in [*own, *theirs]:
            if theirs.get(name) != own.get(name):
                one, other = (found.get(name, "not a parameter") for found in (theirs, own))
                raise FileError(
                    "SK507",
                    f"{name} is {one} in {stored.file}, and {other} in this model",
                    "Continue with the model that was trained, or name another folder.",
                    [name],
                )

    def _restore(self, place: Path, record: JsonField) -> None:
        pipe, optimizer, named = self._pipe, self._optimizer, self._pipe.named_parameters()
        self._require_given(record)
        every = list(record["random"].items())
        random = every[self._rank if len(every) == dist.get_world_size(self._group) else 0]
        rest = [record["scheduler"], record["loader"], record["state"], random]
        tensors = prepare_optimizer(record["optimizer"], optimizer, named)
        for data in rest:
            tensors |= empty_tensors(data)
        read_stored(place, tensors | {MODEL + name: tensor for name, tensor in pipe.named_tensors().items()})
        load_optimizer(record["optimizer"], optimizer, named, tensors)
        if self._scheduler is not None:
            load_scheduler(record["scheduler"], self._scheduler, optimizer, tensors)
        if self._loader is not None:
            self._loader.load_state_dict(decode_state(record["loader"], tensors))
        self.state = decode_state(record["state"], tensors)
        set_random_state(decode_state(random, tensors), pipe.device)

    def _require_given(self, record: JsonField) -> None:
        for name, given in (("scheduler", self._scheduler is not None), ("loader", self._loader_rank >= 0)):
            if given != (record[name].value is not None):
                has, own = ("no", "one is given") if given else ("a", "none is given")
                raise FileError(
                    "SK507",
                    f"{record.file} has {has} {name}'s state, and {own}",
                    "Open the folder with the same objects as the run that wrote the checkpoint.",
                )

    def _on_first(self, work: Callable[[], T], draft: Path | None = None) -> T:
        """Return on all ranks what rank 0 finds; see `_on_all`."""
        first = self._rank == 0
        found: T | None = self._on_all(lambda: work() if first else None, draft)[0]
        return found  # type: ignore[return-value]

    def _on_all(
        self, work: Callable[[], T], draft: Path | None = None, group: dist.ProcessGroup | None = None
    ) -> list[T]:
        """Run something on each rank and return what each finds. If one refuses, all raise its refusal.

        Args:
            work: what to run.
            draft: what rank 0 removes after a refusal.
            group: the ranks, as a group for messages; by default all that have a share of the run.
        """
        own: tuple[T | None, SplitError | None]
        try:
            own = work(), None
        except SplitError as error:
            own = None, error
        every = from_every(own, group or self._group)
        refused = [(rank, error) for rank, (_, error) in enumerate(every) if error is not None]
        if refused:
            if draft is not None and self._rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            rank, first = refused[0]
            alone = len(refused) < len(every) and rank and "(rank" not in first.reason
            where = f" (rank {rank})" if alone else ""
            raise type(first)(first.code, first.reason + where, first.remedy, first.nodes)
        return [found for found, _ in every]

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise SK504 in place of the errors of torch and of the file system."""
        try:
            yield
        except SplitError:
            raise
        except (OSError, CheckpointException) as error:
            raise on_disk.unwritable(self.path, cause_of(error)) from error

    @contextmanager
    def _naming_loss(self, doing: str) -> Iterator[None]:
        """Raise SK805 if another rank ends while the ranks do something together."""
        try:
            with beating(dist.get_rank(), dist.get_process_group_ranks(self._group), f"for all ranks while it {doing}"):
                yield
        except SplitError:
            raise
        except RuntimeError as error:
            left = f"{self.last} is complete" if self.last is not None else "No checkpoint is complete"
            raise PipelineError(
                "SK805",
                f"another rank is gone, or does not answer, while this one {doing}",
                f"Look at the messages of the other ranks. {left}; continue with resume=True (--resume). "
                f"Here: {cause_of(error)}",
            ) from error


# Saves and restores the random number generators of a process, from which a training loop draws between steps.
#
# The pipeline itself draws nothing from them: each microbatch has a seed of its own (`Pipeline.seed_of`). They matter
# to what surrounds it, such as shuffling and augmentation.


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of Python, numpy, torch on the CPU, and torch on a device."""
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": (version, torch.tensor(words), gauss),
        "numpy": (kind, torch.tensor(np.asarray(keys).astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = DeviceRng(device).state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `random_state` returned. The state of another kind of device is left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and device.type in state:
        DeviceRng(device).set_state(state[device.type])


# Describes the state of a learning rate scheduler apart from the parameter groups, which differ between ranks.
#
# A scheduler keeps lists with a value for each parameter group. Where they repeat what the groups say themselves, only
# that is saved, so that the state fits optimizers with other numbers of groups.


_OF_GROUPS = {"base_lrs": "initial_lr", "_last_lr": "lr", "lr_lambdas": ""}
"""Lists with a value for each group, and the option that has this value; lambdas are saved as ``None``."""

_MARK = "of each group"


def merge_schedulers(every: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the description that all ranks have.

    Raises:
        PipelineError: SK804 if ranks differ; names the first field that does.
    """
    for rank, other in enumerate(every):
        if other != every[0]:
            where = _difference(every[0], other)
            raise PipelineError(
                "SK804",
                f"the scheduler of rank {rank} differs from rank 0's in {where}",
                "Step all schedulers in the same way; one that reads the loss needs the same loss on every rank.",
            )
    return every[0]


def load_scheduler(data: JsonField, scheduler: Any, optimizer: Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Set the state of a scheduler, after its optimizer's.

    Raises:
        FileError: SK505 for damaged data, SK507 if it is the state of another scheduler.
    """
    kind = data["class"].text()
    if kind != type(scheduler).__name__:
        raise FileError(
            "SK507",
            f"the checkpoint has the state of a {kind}, but this scheduler is a {type(scheduler).__name__}",
            "Create the scheduler as in the run that wrote the checkpoint.",
        )
    scheduler.load_state_dict(_unmarked(decode_state(data["state"], tensors), optimizer))


def _values(option: str, optimizer: Optimizer) -> list[Any]:
    found = [group.get(option) if option else None for group in optimizer.param_groups]
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in found]


def _marked(value: Any, optimizer: Optimizer) -> Any:
    if isinstance(value, list):
        return [_marked(item, optimizer) for item in value]
    if type(value) is not dict:
        return value
    found = {key: _marked(item, optimizer) for key, item in value.items()}
    for key, option in _OF_GROUPS.items():
        same = _values(option, optimizer)
        # a scheduler that waits in a SequentialLR shows the rate that it set last, and reads it nowhere
        if key in value and (value[key] == same or (key == "_last_lr" and len(value[key]) == len(same))):
            found[key] = {_MARK: option}
    return found


def _unmarked(value: Any, optimizer: Optimizer) -> Any:
    if isinstance(value, list):
        return [_unmarked(item, optimizer) for item in value]
    if type(value) is not dict:
        return value
    if value.keys() == {_MARK}:
        return _values(str(value[_MARK]), optimizer)
    return {key: _unmarked(item, optimizer) for key, item in value.items()}


def _difference(one: Any, other: Any) -> str:
    if one is None or other is None or one["class"] != other["class"]:
        return "its class"
    rows, others = one["state"]["dict"], other["state"]["dict"]
    return next((str(row[0]) for row in rows if row not in others), "its fields")
