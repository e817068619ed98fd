"""The group that goes through the CPU's memory, for the simulated accelerator, where a lost rank may go unnoticed."""

from __future__ import annotations

import time
from datetime import timedelta

import simgpu
import torch.distributed as dist

from splitkit.cli.selftest.host_group import HostGroup, HostMessage

NAME = "staged"
TOLD = True
"""Whether a rank gets an error when the one for which it waits is gone. On NCCL it gets none, and its device waits."""


class Staged(HostMessage):
    """A message of the group."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        try:
            return super().wait(timeout)
        except RuntimeError:
            while not TOLD:
                time.sleep(1)
            raise


class StagedGroup(HostGroup):
    """The group."""

    message = Staged


def register() -> None:
    """Make the group torch's backend for the simulated accelerator."""
    dist.Backend.register_backend(NAME, StagedGroup, devices=[simgpu.TYPE])
