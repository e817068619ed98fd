"""Stages on several devices, data parallel: what each replica does and holds, and what keeping them alike costs.

Each of d replicas has all parameters of the stage, with their gradients and the optimizer's state, and runs 1/d of
every microbatch: so PipeDream (Narayanan et al., SOSP 2019, section 3.1), DAPPLE (Fan et al., PPoPP 2021) and Piper
(Tarnawski et al., NeurIPS 2021) price a replicated stage. Once a step, a ring adds up the gradients (Patarasuk & Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): 2 (d - 1) rounds, in each of which every
device sends 1/d of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch.fx import Node

from splitkit.graph.dataflow import Dataflow
from splitkit.graph.sizes import tensor_bytes
from splitkit.graph.storages import start_of
from splitkit.pipeline.stagecosts import StageCosts


def share(nbytes: int, replicas: int) -> int:
    """Bytes that each of so many replicas has of what they have together."""
    return -(-nbytes // replicas)


def rounds(replicas: int) -> int:
    """Messages that each replica sends, one after the other, until all have the sum of all gradients."""
    return 2 * (replicas - 1)


def ring_seconds(nbytes: float, replicas: int, latency: float, bandwidth: float) -> float:
    """Seconds until each of so many replicas has the sum of what all have, of so many bytes each."""
    return rounds(replicas) * (latency + nbytes / replicas / bandwidth)


def replica_of(whole: StageCosts, replicas: int, gradients: int = 0) -> StageCosts:
    """What each of several replicas of a stage costs for its share of a microbatch.

    Times and activations are shared out evenly, as if all of them went with the batch: a mask of no batch does not, nor
    does what autocast makes of a weight. Parameters, gradients and optimizer are whole in each. Messages stay those of
    all replicas together.

    Args:
        whole: of the stage on one device.
        replicas: how many.
        gradients: bytes of gradients of parameters among its temporaries, at most: no replica has less of them.
    """
    if replicas == 1:
        return whole
    return replace(
        whole,
        forward=whole.forward / replicas,
        backward_input=whole.backward_input / replicas,
        backward_weight=whole.backward_weight / replicas,
        saved_bytes=share(whole.saved_bytes, replicas),
        deferred_bytes=None if whole.deferred_bytes is None else share(whole.deferred_bytes, replicas),
        temporary_bytes=temporary_share(whole.temporary_bytes, replicas, gradients),
        replicas=replicas,
    )


def temporary_share(nbytes: int, replicas: int, gradients: int) -> int:
    """Temporary bytes of each replica, from above, of which so many at most are gradients of parameters."""
    return min(nbytes, share(nbytes + (replicas - 1) * gradients, replicas))


def trained_bytes(flow: Dataflow, node: Node) -> int:
    """Bytes of the parameters that require grad of those that a node reads."""
    return sum({start_of(t): tensor_bytes(t) for t in flow.owned(node) if t.requires_grad}.values())


def undivided(trained: Sequence[int], gradients: int) -> int:
    """Bytes of gradients of parameters among the temporaries of a stage, at most.

    Those of one node, and those to which several nodes add: they wait, and are there twice where one is added. What no
    node is known to read, such as a view of a cache that takes part in autograd, may be of one node.

    Args:
        trained: `trained_bytes` of each node.
        gradients: bytes of the gradients of the stage, each once.
    """
    twice = sum(trained) - gradients
    return max(trained, default=0) + max(2 * twice, -twice)
