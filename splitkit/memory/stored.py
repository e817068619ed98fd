"""The storages of a simulated run, and when each is there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

BEFORE = -1
"""The step that makes what is there before the run."""
HELD = 2**62
"""The last step of what its owner still holds after the run."""


@dataclass(slots=True)
class Buffer:
    """One storage of a simulated run.

    Attributes:
        nbytes: its bytes, rounded up as the allocator would.
        kind: ``"parameter"``, ``"buffer"``, ``"constant"``, ``"input"``, ``"activation"``, ``"saved"`` (for
            backward), ``"tangent"``, ``"gradient"`` or ``"output"``.
        name: the node or attribute that made it.
        node: the node, ``None`` for parameters, buffers and constants.
        device: where it lies.
        born: the step that allocates it, -1 if it is there before.
        dies: the step after which it is freed; larger than every step if its owner holds it to the end.
    """

    nbytes: int
    kind: str
    name: str
    node: Node | None
    device: torch.device
    born: int
    dies: int
