"""The kernels of a node that run one after the other, as the steps of a recurrent layer do."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from splitkit.graph.fake_calls import op_name, target_of
from splitkit.graph.symbols import value_of

_LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def kernels_in_sequence(root: nn.Module, node: Node) -> int:
    """Return how many kernels a node runs one after the other at least: 1, or for a recurrent layer steps x layers.

    The steps of a layer wait for each other. The directions do not, and count once.

    Args:
        root: the module of the node's graph.
        node: a node that runs at least one kernel.
    """
    target = target_of(root, node)
    name = op_name(target)
    if not isinstance(target, nn.RNNBase) and name not in (*_LAYERS, "mkldnn_rnn_layer"):
        return 1
    given: list[Any] = [value_of(a) if isinstance(a, Node) else a for a in node.args]
    if isinstance(target, nn.RNNBase):
        return max(1, _steps(given[0], target.batch_first) * target.num_layers) if given else 1
    if name == "mkldnn_rnn_layer":
        return max(1, _steps(given[0], False))
    packed = isinstance(given[1], Tensor) and given[1].ndim == 1  # data, batch sizes, states, weights, biased, layers
    layers: int = given[5 if packed else 4]
    return max(1, layers * (int(given[1].shape[0]) if packed else _steps(given[0], bool(given[-1]))))


def _steps(x: Any, batch_first: bool) -> int:
    """Return the steps in the input of a recurrent layer; 0 if it is packed."""
    return int(x.shape[1 if batch_first and x.ndim == 3 else 0]) if isinstance(x, Tensor) else 0
