"""Prices replicated stages (data parallel): the work and memory of each replica, and the all-reduce of gradients.

Each of d replicas has all parameters of the stage, with their gradients and the optimizer's state, and runs 1/d of
every microbatch: so PipeDream (Narayanan et al., SOSP 2019, section 3.1), DAPPLE (Fan et al., PPoPP 2021) and Piper
(Tarnawski et al., NeurIPS 2021) price a replicated stage. Once a step, a ring adds up the gradients (Patarasuk & Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009): 2 (d - 1) rounds, in each of which
every device sends 1/d of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from splitkit.pipeline.stage_costs import StageCosts

if TYPE_CHECKING:  # simulating an order does not wait for torch
    from torch.fx import Node

    from splitkit.graph.dataflow import Dataflow


def share(nbytes: int, replicas: int) -> int:
    """Return the bytes of each replica's share, rounded up."""
    return -(-nbytes // replicas)


def ring_rounds(replicas: int) -> int:
    """Return the number of messages that each replica sends in a ring all-reduce."""
    return 2 * (replicas - 1)


def ring_seconds(nbytes: float, replicas: int, latency: float, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce of ``nbytes`` over ``replicas`` devices."""
    return ring_rounds(replicas) * (latency + nbytes / replicas / bandwidth)


def replica_of(whole: StageCosts, replicas: int, gradients: int = 0) -> StageCosts:
    """Return the costs of one replica of a stage for its share of a microbatch.

    Times and activations are divided evenly, as if all of them scaled with the batch; a mask without a batch dimension
    and autocast's copy of a weight do not. Each replica has all parameters, gradients and optimizer state. Messages
    stay those of all replicas together.

    Args:
        whole: the costs of the stage on one device.
        replicas: the number of replicas.
        gradients: upper bound on the bytes of parameter gradients among the temporaries, which replication does not
            divide.
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
    """Return an upper bound on a replica's temporary bytes, of which at most ``gradients`` are not divided."""
    return min(nbytes, share(nbytes + (replicas - 1) * gradients, replicas))


def trained_bytes(flow: Dataflow, node: Node) -> int:
    """Return the bytes of the parameters that a node reads and that require grad."""
    from splitkit.graph.byte_sizes import tensor_bytes
    from splitkit.graph.storages import start_of

    return sum({start_of(t): tensor_bytes(t) for t in flow.owned(node) if t.requires_grad}.values())


def undivided(trained: Sequence[int], gradients: int) -> int:
    """Return an upper bound on the bytes of parameter gradients among the temporaries of a stage.

    They are the gradients of one node, and those to which several nodes add: these stay alive, and exist twice during
    each addition. A gradient that no node is known to read, such as that of a view of a cache, may belong to one node.

    Args:
        trained: node -> `trained_bytes`.
        gradients: bytes of the gradients of the stage, each counted once.
    """
    twice = sum(trained) - gradients
    return max(trained, default=0) + max(2 * twice, -twice)
