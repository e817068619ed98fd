"""The group that goes through the CPU's memory, for the simulated accelerator, where a lost rank may go unnoticed."""

from __future__ import annotations

import time
from datetime import timedelta

import simgpu
import torch.distributed as dist

from splitkit.cli.selftest.rank_trial import HostGroup, HostMessage

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
    """The group, with the collectives of sharded models as well; gloo adds up what it scatters."""

    message = Staged

    def scatter(self, outputs, inputs, options=None):
        """As in torch."""
        given = [[t.detach().cpu() for t in one] for one in inputs]
        return self._run(lambda staged: self._gloo.scatter(staged, given, options), outputs, False)

    def allgather_into_tensor_coalesced(self, outputs, inputs, options=None):
        """As in torch, for one tensor."""
        (output,), (given,) = outputs, inputs
        return self.allgather([list(output.chunk(self.size()))], [given], dist.distributed_c10d.AllgatherOptions())

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, options):
        """As in torch, for one tensor: gloo adds all up, and a part of it is taken."""
        (output,), (given,), how = outputs, inputs, dist.AllreduceOptions()
        how.reduceOp, summed = options.reduceOp, given.detach().cpu()
        work = self._gloo.allreduce([summed], how)
        return self.message(work, lambda: output.copy_(summed.chunk(self.size())[self.rank()]))

    def alltoall_base(self, output, given, to, came, options=None):
        read = given.detach().cpu()
        return self._run(lambda staged: self._gloo.alltoall_base(staged[0], read, to, came, options), [output], False)


def register() -> None:
    """Make the group torch's backend for the simulated accelerator."""
    dist.Backend.register_backend(NAME, StagedGroup, devices=[simgpu.TYPE])
