"""One rank of `splitkit.cli.selftest.device_checks`: trains a small model in stages beside the unsplit model."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

import splitkit as sk
from splitkit.cli.selftest.device_checks import exact_products, small
from splitkit.policies import Pipeline, Stages
from splitkit.runtime import pipeline
from splitkit.testing.pipeline_check import UnsplitModel

# A process group for ranks that share an accelerator: each message goes through the CPU's memory and gloo.
#
# NCCL refuses two ranks on one GPU, and gloo sends no tensors of a GPU. As on NCCL, a message is sent from what the
# current stream has computed, and received on the stream that waits for it.


dist: Any = torch.distributed  # its stubs lack much of what a process group has

NAME = "host"
"""The name of the backend after `register`."""


class HostMessage(dist.Work):  # type: ignore[misc]
    """A message under way; waiting for it copies what came to the device."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._finish, self._done = work, finish, False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the message; copy what came to the device."""
        if not self._done:
            self._work.wait()
            self._finish()
            self._done = True
        return True

    def is_completed(self) -> bool:
        """Return whether the message is there."""
        return self._done or bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether the message is there."""
        return self.is_completed()

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future that is done once the message is there."""
        self.wait()
        made: torch.futures.Future[Any] = torch.futures.Future()
        made.set_result(None)
        return made


class HostGroup(dist.ProcessGroup):  # type: ignore[misc]
    """A gloo group for tensors of an accelerator, and of the CPU.

    Attributes:
        message: the class of its messages.
    """

    message = HostMessage

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        for kind in {torch.accelerator.current_accelerator(), torch.device("cpu")} - {None}:
            self._register_backend(kind, dist.ProcessGroup.BackendType.GLOO, self._gloo)

    def _run(
        self, start: Callable[[list[torch.Tensor]], Any], tensors: Sequence[torch.Tensor], read: bool
    ) -> HostMessage:
        staged = [t.detach().cpu() if read else torch.empty(t.shape, dtype=t.dtype) for t in tensors]
        work = start(staged)

        def finish() -> None:
            with torch.no_grad():
                for own, found in zip(tensors, staged, strict=True):
                    own.copy_(found)

        return self.message(work, finish)

    def allreduce(self, tensors: Any, options: Any = None) -> HostMessage:
        """As in torch."""
        return self._run(lambda staged: self._gloo.allreduce(staged, options or dist.AllreduceOptions()), tensors, True)

    def broadcast(self, tensors: Any, options: Any = None) -> HostMessage:
        """As in torch."""
        return self._run(lambda staged: self._gloo.broadcast(staged, options), tensors, True)

    def allgather(self, outputs: Any, tensors: Any, options: Any = None) -> HostMessage:
        """As in torch."""
        given = [t.detach().cpu() for t in tensors]

        def start(staged: list[torch.Tensor]) -> Any:
            return self._gloo.allgather([staged], given, options or dist.AllgatherOptions())

        return self._run(start, outputs[0], False)

    def gather(self, outputs: Any, tensors: Any, options: Any = None) -> HostMessage:
        """As in torch."""
        given, every = [t.detach().cpu() for t in tensors], outputs[0] if outputs else []
        return self._run(lambda staged: self._gloo.gather([staged] if outputs else [], given, options), every, False)

    def barrier(self, options: Any = None) -> Any:
        """As in torch."""
        return self._gloo.barrier()

    def send(self, tensors: Any, to: int, tag: int = 0) -> HostMessage:
        """Send from what the current stream has computed."""
        staged = [t.detach().cpu().contiguous() for t in tensors]
        return self.message(self._gloo.send(staged, to, tag), lambda: staged.clear())

    def recv(self, tensors: Any, source: int, tag: int = 0) -> HostMessage:
        """Receive into tensors, once they are waited for."""
        return self._run(lambda staged: self._gloo.recv(staged, source, tag), tensors, False)


def register(kind: str) -> None:
    """Make the group torch's backend `NAME` for a type of accelerator."""
    dist.Backend.register_backend(NAME, HostGroup, devices=[kind])


_MICROBATCHES, _STEPS = 4, 3
"""More microbatches than ranks, and a step after the optimizer has changed the weights."""


def trained(kind: str, device: torch.device) -> dict[str, Any]:
    """Train for some steps; return how far losses, gradients and weights are from the unsplit model, and where most."""
    example, ranks = small("gpt2", device), dist.get_world_size()
    model = example.model.eval()  # each microbatch would draw its own dropout
    schedule = "zbv" if kind.endswith("ZBV") else "1f1b"
    stages = 2 * ranks if schedule == "zbv" else ranks
    split: Any
    if kind.startswith("joint"):
        joint = sk.capture_joint(model, **example.kwargs)
        policy = Pipeline(stages, schedule=schedule, microbatches=_MICROBATCHES)
        split = joint.split(policy, sk.costs.roofline(joint.graph_module, "h100"))
    else:
        split = sk.split(sk.capture(model, **example.kwargs), Stages(stages))
    pipe: Any = pipeline(split, schedule, _MICROBATCHES, device=device)
    unsplit = UnsplitModel(pipe, small("gpt2", device).model.eval())
    optimizers = [torch.optim.SGD(p, lr=1e-2) for p in (pipe.parameters(), [*unsplit.model.parameters()])]
    apart, worst = 0.0, ""
    for step in range(_STEPS):
        batch = {
            name: torch.cat([t.roll(step + i, -1) for i in range(_MICROBATCHES)]) for name, t in example.kwargs.items()
        }
        found = pipe.step(**batch)
        if kind == "killed rank" and step == 1 and dist.get_rank() == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        seen = unsplit.deviation(found, unsplit.step(**batch))
        if (most := max(seen.loss, seen.gradient, seen.weight)) >= apart:
            apart, worst = most, seen.worst
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {"apart": apart, "worst": worst}


def main() -> None:
    """Run the trial of the command line."""
    kind, backend, device = sys.argv[1], sys.argv[2], torch.device(sys.argv[3])
    torch.set_num_threads(1)
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    if backend == NAME:
        register(device.type)
    dist.init_process_group(backend, timeout=timedelta(seconds=25))
    with exact_products():
        print(json.dumps(trained(kind, device)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
