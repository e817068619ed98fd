"""One rank of a run that is killed at a given point of saving; before that it continues from what is in the folder.

The points are the calls that touch the folder, as Python's audit events and ``os.fsync`` report them.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import resumed
import torch

from splitkit.engine.split import Split
from splitkit.errors import SplitError
from splitkit.runtime import open_checkpoints, pipeline

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


class Killer:
    """Kills this process at the n-th point of saving."""

    def __init__(self, folder: str, at: int) -> None:
        self.folder, self.left, self.seen, self.on = folder, at, list[str](), False
        sys.addaudithook(self.event)
        fsync = os.fsync

        def synced(number: Any) -> None:
            self.point("fsync")
            fsync(number)

        os.fsync = synced

    def event(self, name: str, args: tuple[Any, ...]) -> None:
        if self.on and name in EVENTS:
            where = [str(arg) for arg in args if isinstance(arg, str | os.PathLike)]
            # what is removed is named relative to the folder that it is in
            if any(path.startswith(self.folder) for path in where) or name in ("os.rmdir", "os.remove"):
                self.point(f"{name} {' '.join(Path(path).name for path in where)}")

    def point(self, what: str) -> None:
        if self.on:
            self.seen.append(what)
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


SPLIT: list[Split] = []


def prepare() -> None:
    """Capture and split once for all ranks."""
    resumed.prepare()
    SPLIT.append(resumed.split_of(resumed.captured(8), 2))


def stepped(pipe: Any, optimizer: Any, scheduler: Any) -> None:
    pipe.step(torch.arange(6 * resumed.COUNT) % 16)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def refused(rank: int, error: SplitError) -> NoReturn:
    print(json.dumps({"rank": rank, "code": error.code, "said": str(error)}), flush=True)
    os._exit(0)


def main() -> None:
    case = json.loads(sys.argv[1])
    rank = int(os.environ["RANK"])
    resumed.start()
    pipe = pipeline(SPLIT[0], "1f1b", resumed.COUNT, seed=7)
    optimizer, scheduler = resumed.optimizer_of("sgd", pipe)
    if "steps" in case:
        for step in range(case["steps"]):
            print(json.dumps({"rank": rank, "step": step, "whole": resumed.digest(pipe, optimizer)}), flush=True)
            stepped(pipe, optimizer, scheduler)
        return
    killer = Killer(case["folder"], case["at"] if rank == case["rank"] else 0)
    killer.on = case["when"] == "open"
    state = {"steps": 0}
    try:
        saved = open_checkpoints(case["folder"], pipe, optimizer, scheduler=scheduler, state=state, keep=1, resume=True)
    except SplitError as error:
        refused(rank, error)
    found = {"rank": rank, "step": pipe.steps, "opened": resumed.digest(pipe, optimizer), "steps": saved.state["steps"]}
    print(json.dumps(found), flush=True)
    stepped(pipe, optimizer, scheduler)
    saved.state["steps"] += 1
    killer.on = case["when"] != "open"
    try:
        saved.save(wait=case["when"] != "beside")
        saved.wait()
    except SplitError as error:
        refused(rank, error)
    killer.on = False
    print(json.dumps({"rank": rank, "points": killer.seen}), flush=True)
