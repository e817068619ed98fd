"""Joins the process of a rank to its process group, and ends it with the launcher that started it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from splitkit.testing.models import Example

T = TypeVar("T")
LAUNCHER = "SPLITKIT_LAUNCHER_PIPE"
"""The environment variable with the file descriptor of a pipe that the launcher holds open for as long as it lives."""


def end_with_launcher() -> None:
    """End this rank, and what it started, as soon as its launcher has ended, even by SIGKILL.

    The launcher has the only writing end of a pipe, which the system closes when it ends; a thread of the rank waits
    for that. Linux's ``PR_SET_PDEATHSIG`` would not work on macOS, and would not end what the rank started.
    """
    descriptor = os.environ.pop(LAUNCHER, None)
    if descriptor is not None:
        threading.Thread(target=_wait_for_end, args=(int(descriptor),), name="launcher", daemon=True).start()


def _wait_for_end(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1):
            pass
    except OSError:
        return
    is_leader = os.getpgrp() == os.getpid()
    (os.killpg if is_leader else os.kill)(os.getpid(), signal.SIGKILL)


def in_group(work: Callable[[], T], seconds: float, backend: str | None = None) -> T:
    """Join the process group that the environment names, do the work of this rank, and leave the group.

    Args:
        work: what the rank does.
        seconds: how long the ranks wait for each other.
        backend: torch's backend; by default the one for the rank's accelerator.
    """
    import torch
    import torch.distributed as dist

    from splitkit.runtime.ranks.rank_device import backend_of_rank

    # torch's default is all cores in every process, and the ranks share them
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    _join(backend or backend_of_rank(int(os.environ.get("LOCAL_RANK", "0"))), seconds)
    found = work()
    dist.destroy_process_group()  # not after an error: it would wait for the other ranks
    return found


def _join(backend: str, seconds: float) -> None:
    """Join the default process group that the environment names.

    Where torchrun restarts its workers (``--max-restarts``), they meet at the same store as those before, and would
    find addresses of ranks that are gone: each attempt therefore has keys of its own. Several agents count restarts
    differently, so this is done for one agent only.
    """
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=seconds)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0" or os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        dist.init_process_group(backend, timeout=limit)
        return
    public: Any = dist
    store, rank, size = next(rendezvous("env://", timeout=limit))
    own = public.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)


def rolled_batch(example: Example, count: int, step: int, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make a batch of different microbatches: an example's inputs, each rolled along the last dimension.

    Args:
        example: the inputs of one microbatch.
        count: the number of microbatches.
        step: the number of the step, on which the batch depends.
        seed: the seed of the run.
    """
    import torch

    from splitkit._torch import pytree

    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    shifts = torch.randint(2**20, (count,), generator=generator).tolist()

    def rolled(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        return torch.cat([value.roll(shift, -1) for shift in shifts])

    args, kwargs = pytree.tree_map(rolled, (tuple(example.args), dict(example.kwargs)))
    return args, kwargs


def peak_of_process() -> int:
    """Return the peak memory of this process in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
