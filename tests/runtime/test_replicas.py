"""Which pipelines run side by side, and what is refused before anything does."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import splitkit as sk
from splitkit import _torch
from splitkit.errors import PipelineError, ScheduleError
from splitkit.graph.shards import full_tensor, local_tensor
from splitkit.runtime.ranks.order_runner import placed_order
from splitkit.runtime.ranks.pipeline import Pipeline
from splitkit.runtime.ranks.replicas import (
    BUCKET,
    Replicas,
    _buckets,
    replicas,
    require_replicable,
    row_of_rank,
    subgroup,
    with_ranks_across,
)
from splitkit.runtime.ranks.stage_chain import chain_of
from splitkit.runtime.ranks.stage_weights import shard_like, sum_shards


def test_numbers_that_do_not_divide_are_refused():
    require_replicable((), (2, 2), ranks=4, microbatches=6)
    for ranks, microbatches, says in ((3, 6, "3 ranks for 2 replicas"), (4, 5, "5 microbatches for 2 replicas")):
        with pytest.raises(ScheduleError, match=f"SK330: {says}"):
            require_replicable((), (2, 2), ranks, microbatches)


def test_stages_with_different_numbers_of_replicas_are_refused():
    with pytest.raises(ScheduleError, match="SK330: stages with 2, 1, 1 replicas") as refused:
        require_replicable((), (2, 1, 1), ranks=4, microbatches=4)
    assert "Stages(4, replicas=(2,))" in refused.value.remedy


def written(model):
    gm = sk.capture(model, torch.randn(2, 4))
    return chain_of(sk.split(gm, lambda node: 0)).facts.writes


def test_buffers_that_forward_writes_are_refused_in_replicas():
    writes = written(nn.BatchNorm1d(4))
    require_replicable(writes, (1, 1), ranks=2, microbatches=2)
    with pytest.raises(PipelineError, match=r"SK801: forward writes (num_batches_tracked|running_)"):
        require_replicable(writes, (2,), ranks=2, microbatches=2)
    require_replicable(written(nn.BatchNorm1d(4).eval()), (2,), 2, 2)


def test_each_pipeline_has_its_share_of_the_microbatches():
    shares = [list(Replicas(((0, 1), (2, 3)), 0, own, None).share(6)) for own in (0, 1)]
    assert shares == [[0, 1, 2], [3, 4, 5]]
    order = placed_order("1f1b", 2, 2, 8, 4)
    assert order.microbatches == 4 and len(order.ranks) == 2
    assert {a.microbatch for a in row_of_rank(order, Replicas(((0, 1), (2, 3)), 1, 1, None))} == {4, 5, 6, 7}


def test_gradients_go_in_buckets_of_one_dtype():
    small, half = torch.zeros(4), torch.zeros(4, dtype=torch.float64)
    large = torch.zeros(BUCKET // 4)
    found = [len(bucket) for bucket in _buckets([small, small, half, small, large, small])]
    assert found == [2, 1, 1, 1, 1] and not list(_buckets([]))


def test_groups_have_the_time_limit_of_the_one_that_they_are_of(tmp_path):
    """It was half an hour for the ranks of a tied weight, whatever was asked for."""
    limit = timedelta(seconds=7)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=limit)
    try:
        assert _torch.timeout_of(None) == limit == _torch.timeout_of(subgroup(None, [0]))
        alone = replicas(1, None, torch.device("cpu"))
        assert alone.mesh is None and alone.ranks == ((0,),) and list(alone.share(4)) == [0, 1, 2, 3]
    finally:
        dist.destroy_process_group()


def test_shards_of_a_tied_weight_are_refused(tmp_path):
    """Its copy on another rank would not get their gradient."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(PipelineError, match="SK801: there is one pipeline"):
            Pipeline.shard(SimpleNamespace(replicas=replicas(1, None, torch.device("cpu"))))
        assert with_ranks_across(dist.group.WORLD, []) is dist.group.WORLD
        part = nn.Linear(4, 4)
        weight = part.weight
        fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
        sum_shards([part], replicas(1, None, torch.device("cpu")), ())
        assert (
            local_tensor(part.weight).shape
            == full_tensor(part.weight).shape
            == shard_like(part.weight, torch.ones(4, 4)).shape
        )
        with pytest.raises(PipelineError, match=r"SK801: a parameter \[4, 4\] is sharded"):
            sum_shards([part], replicas(1, None, torch.device("cpu")), (weight,))
    finally:
        dist.destroy_process_group()
