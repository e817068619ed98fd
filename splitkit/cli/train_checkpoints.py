"""The checkpoints of ``splitkit train``: which options go together, when they are opened and when they are saved."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitkit.errors import FileError, UsageError

if TYPE_CHECKING:
    from splitkit.runtime.folder.training_checkpoint import CheckpointFolder
    from splitkit.runtime.ranks.pipeline import Pipeline


def require_usable(args: Namespace) -> None:
    """Refuse options that need ``--checkpoint`` or ``--nproc``, and a folder with another run's checkpoints."""
    given = {
        "--resume": args.resume,
        "--every": args.every is not None,
        "--keep": args.keep is not None,
        "--async-save": args.async_save,
        "--skip-failed-saves": args.skip_failed_saves,
        "--max-restarts": args.max_restarts is not None,
    }
    if args.checkpoint is None:
        if needy := [word for word, is_given in given.items() if is_given]:
            raise UsageError("SK601", f"{needy[0]} needs a folder", "Add --checkpoint FOLDER.")
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
