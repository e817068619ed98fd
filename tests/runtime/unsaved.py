"""One rank that opens folders and saves where it cannot; prints for each attempt what it was told."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import resumed
import torch
import torch.distributed as dist

from splitkit.cli.commands.train import save
from splitkit.engine.split import Split
from splitkit.errors import SplitError
from splitkit.runtime import open_checkpoints, pipeline
from splitkit.runtime.folder import checkpoint_folder

T = TypeVar("T")
SPLITS: list[Split] = []


def prepare() -> None:
    torch.set_num_threads(1)
    SPLITS.extend(resumed.split_of(resumed.captured(width), 2) for width in (8, 4))


def said(what: str, attempt: Callable[[], Any]) -> Any:
    """Print what an attempt was refused with; return what it returns."""
    found, text, code = None, "", ""
    try:
        found = attempt()
    except SplitError as error:
        text, code = str(error), error.code
    print(json.dumps({"rank": dist.get_rank(), "what": what, "code": code, "said": text}), flush=True)
    dist.barrier()
    return found


def skip_on_full_disk(run: Any, is_full: bool) -> None:
    """Save as ``splitkit train --skip-failed-saves`` does, first waiting and then beside; in the end the last one."""
    now, beside = (Namespace(steps=9, every=1, async_save=way, skip_failed_saves=True) for way in (False, True))
    (reason,) = save_on_full_disk(is_full, lambda: save(now, run, 6))
    assert reason.endswith("File too large (rank 1)") and run.last is None
    assert save(beside, run, 7) == []
    run.wait()
    assert run.last is not None
    save_on_full_disk(is_full, lambda: (save(beside, run, 7), run._writing[2].exception()))
    assert save(beside, run, 8) == [reason]
    run.wait()
    assert run.last.name.endswith(".1")
    save_on_full_disk(is_full, lambda: save(now, run, 9))


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def of_an_earlier_step(place: Path, name: str) -> None:
    shutil.copy(place.parent / "step-1" / name, place / name)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "flipped 0": lambda place: flip(place / "__0_0.distcp", -900),
    "flipped 1": lambda place: flip(place / "__1_0.distcp", 2000),
    "flipped record": lambda place: flip(place / "checkpoint.json", 3000),
    "flipped digests": lambda place: flip(place / "digests.json", 40),
    "earlier file": lambda place: of_an_earlier_step(place, "__1_0.distcp"),
    "earlier record": lambda place: of_an_earlier_step(place, "checkpoint.json"),
    "earlier digests": lambda place: of_an_earlier_step(place, "digests.json"),
    "no digests": lambda place: (place / "digests.json").unlink(),
    "no file": lambda place: (place / "__1_0.distcp").unlink(),
}


def save_on_full_disk(is_full: bool, save: Callable[[], T]) -> T:
    """Save while this process cannot write more than 100 bytes to a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        return save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def main() -> None:
    resumed.start()
    folder, rank = Path(sys.argv[1]), dist.get_rank()
    pipe, small = (pipeline(split, "1f1b", resumed.COUNT) for split in SPLITS)
    optimizer, scheduler = resumed.optimizer_of("sgd", pipe)

    def opened(name: str, pipe: Any = pipe, optimizer: Any = optimizer, **more: Any) -> Any:
        return open_checkpoints(folder / name, pipe, optimizer, **more)

    (folder / "file").touch()
    said("file", lambda: opened("file/run"))
    said("proc", lambda: open_checkpoints("/proc/self/checkpoints", pipe, optimizer))
    said("apart", lambda: opened(f"apart-{rank}"))
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=1000)
    said("full", lambda: opened("full"))
    shutil.disk_usage = usage
    said("state", lambda: opened("refused", state={"model": [pipe] if rank == 0 else 0}))
    said("loader", lambda: opened("refused", loader=[1, 2]))
    said("keep", lambda: opened("refused", keep=0))
    stranger = torch.optim.SGD([*pipe.parameters(), torch.nn.Parameter(torch.ones(3))], 0.1)
    said("stranger", lambda: opened("refused", optimizer=stranger))

    run = said("first", lambda: opened("run", scheduler=scheduler, state={"epoch": 1}))
    resumed.seed(3)
    for _ in range(2):
        pipe.step(resumed.batch_of(0))
        optimizer.step()
        said("saved", run.save)
    said("twice", lambda: (run.save(wait=False), run.wait()))
    for what, full, wait in (("full 1", 1, True), ("full 0", 0, True), ("full 1 beside", 1, False)):
        pipe.step(resumed.batch_of(0))
        said(
            what,
            lambda full=full, wait=wait: save_on_full_disk(rank == full, lambda: (run.save(wait=wait), run.wait())),
        )
    skipping = opened("skipping", scheduler=scheduler)
    said("last one", lambda: skip_on_full_disk(skipping, rank == 1))
    said("left", lambda: None)
    if rank == 0:
        print(json.dumps({"left": sorted(path.name for path in (folder / "run").iterdir())}), flush=True)
    if rank == 1:
        scheduler.last_epoch += 1
    said("schedulers", run.save)

    def resume(pipe: Any = pipe, optimizer: Any = optimizer, scheduler: Any = scheduler, name: str = "run") -> Any:
        return opened(name, pipe, optimizer, scheduler=scheduler, resume=True)

    said("fresh", lambda: opened("run", scheduler=scheduler))
    said("no scheduler", lambda: resume(scheduler=None))
    adam = torch.optim.AdamW(pipe.parameters())
    said("other optimizer", lambda: resume(optimizer=adam, scheduler=torch.optim.lr_scheduler.MultiStepLR(adam, [9])))
    said("other scheduler", lambda: resume(scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 9)))
    tiny = torch.optim.SGD(small.parameters(), 0.1, momentum=0.9)
    said("other model", lambda: resume(small, tiny, torch.optim.lr_scheduler.MultiStepLR(tiny, [9])))
    parts = [{"params": [p], "lr": 0.1 + i} for i, p in enumerate(pipe.parameters())]
    apart = torch.optim.SGD(parts, momentum=0.9)
    mine = said("groups", lambda: opened("groups", optimizer=apart))
    said("groups saved", mine.save)
    said("joined groups", lambda: resume(name="groups", scheduler=None))

    again = said("again", resume)
    said("late writer", run.save)
    before, place, saved = resumed.digest(pipe, optimizer), again.last, folder / "saved"
    if rank == 0:
        shutil.copytree(place, saved)
        shutil.copytree(folder / "groups" / mine.last.name, folder / "run" / "step-99")
    dist.barrier()
    said("two runs", resume)
    if rank == 0:
        shutil.rmtree(folder / "run" / "step-99")
        (folder / "run" / "step-99").mkdir()
    dist.barrier()
    said("damaged", resume)
    if rank == 0:
        shutil.rmtree(folder / "run" / "step-99")
        (file,) = place.glob("__1_*")
        os.truncate(file, 300)
    dist.barrier()
    said("truncated", resume)
    for what, damage in DAMAGE.items():
        if rank == 0:
            shutil.rmtree(place)
            shutil.copytree(saved, place)
            damage(place)
        dist.barrier()
        said(what, resume)
    assert resumed.digest(pipe, optimizer) == before
    if rank == 0:
        shutil.rmtree(place)
    dist.barrier()
    assert said("remedy", resume).last.name == "step-1" and resumed.digest(pipe, optimizer) != before
    assert checkpoint_folder.complete_steps(folder / "refused") == []
    dist.destroy_process_group()
