"""All ranks run the same: what is planned once, and what is compared before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from splitkit.errors import PipelineError, SplitError
from splitkit.plans.file import fingerprint
from splitkit.plans.record import Plan
from splitkit.runtime.chain import Chain

_REMEDY = "Start every rank with the same files, packages and arguments; plan once: splitkit.runtime.planned_once."


def planned_once(gm: fx.GraphModule, make: Callable[[], Plan], group: dist.ProcessGroup | None = None) -> Plan:
    """The plan that rank 0 makes or loads, on every rank.

    Args:
        gm: the graph, captured on each rank.
        make: called on rank 0 only.
        group: the ranks.

    Raises:
        SplitError: whatever ``make`` raises, on every rank.
        PipelineError: SK804 where this rank captured another graph than rank 0.
    """
    sent: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            sent = [{"plan": make().to_dict(), "graph": fingerprint(gm.graph)}]
        except SplitError as error:
            sent = [error]
    dist.broadcast_object_list(sent, group=group, group_src=0)
    if isinstance(sent[0], SplitError):
        raise sent[0]
    own = fingerprint(gm.graph)
    if sent[0]["graph"] != own:
        raise _differs(dist.get_rank(group), "graph", own, sent[0]["graph"])
    return Plan.from_dict(gm.graph, sent[0]["plan"])


def require_same(chain: Chain, facts: Mapping[str, object], group: dist.ProcessGroup | None) -> None:
    """Compare what the ranks are about to run.

    Args:
        chain: the stages of this rank's split.
        facts: what else must be the same, by name.
        group: the ranks.

    Raises:
        PipelineError: SK804 on every rank, naming the first rank that differs from rank 0, and in what.
    """
    own = {
        "version of torch": torch.__version__,
        **chain.facts.identity,
        **{name: str(value) for name, value in facts.items()},
    }
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    for rank, other in enumerate(every):
        for name, value in every[0].items():
            if other.get(name) != value:
                raise _differs(rank, name, str(other.get(name)), str(value))


def _differs(rank: int, what: str, own: str, first: str) -> PipelineError:
    return PipelineError("SK804", f"rank {rank} has another {what} than rank 0: {own:.24}, not {first:.24}", _REMEDY)
