"""Which values of a joint graph can be moved to the host, and why others cannot."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node

from splitkit.graph.symbols import value_of
from splitkit.training.flow import JointFlow, is_size


def why_not_moved(flow: JointFlow, value: Node) -> str:
    """Return why a value cannot go to the host, whatever the plan; an empty string if it can."""
    tensor, roots = value_of(value), flow.storages.under(value)
    if is_size(value) or not isinstance(tensor, Tensor):
        return "it is not a tensor"
    if not roots:
        return "it lies in the memory of an input or parameter, which the caller holds"
    if tensor.layout is not torch.strided or not all(isinstance(size, int) for size in tensor.shape):
        return "it is not strided, or has symbolic sizes"
    if len(roots) > 1 or flow.storages.nbytes[roots[0]] != tensor.numel() * tensor.element_size():
        return "it is a part of its memory: name the value that it is a view of"
    if not _is_dense(tensor):
        return "its elements overlap or have gaps between them"
    if roots[0] in {root for e in flow.effects.values() for node in e.writes for root in flow.storages.under(node)}:
        return "a node writes to its memory"
    return ""


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda dim: (dim[1], dim[0])):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
