"""Models and runs after PyTorch's own tests of pipelining (test/distributed/pipelining, BSD-3-Clause), in our words.

As a script (`ranks.py`), one of two ranks of a pipeline.
"""

from __future__ import annotations

import copy
import json
import os
from collections import namedtuple

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipe_split

WIDTH, ROWS = 16, 8


class Skipping(nn.Module):
    """model_registry.ExampleCode: a weight that two stages use, a skip connection, a buffer."""

    def __init__(self):
        super().__init__()
        self.used_twice, self.once = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(2))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        x = torch.mm(x, self.used_twice)
        skip = x
        x = (x + y).relu()
        pipe_split()
        x = torch.mm(x, self.used_twice) + self.shift
        x = self.layer(x)
        pipe_split()
        x = x.relu() + skip
        x = torch.mm(x, self.once)
        pipe_split()
        return self.last(x).relu()


class Aliased(nn.Module):
    """test_pipe.ModelWithParamAlias: one parameter under two names."""

    def __init__(self):
        super().__init__()
        self.one = self.other = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y):
        x = torch.mm(x, self.one) + y
        pipe_split()
        return self.layer(torch.mm(x.relu(), self.other))


class Keywords(nn.Module):
    """test_unflatten: a stage is a module of modules; an argument by keyword."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(2))

    def forward(self, x, constant=None):
        x = self.blocks[0](x)
        pipe_split()
        return self.blocks[1](x) if constant is None else self.blocks[1](x) + constant


class Layers(nn.Module):
    """test_transformer.TransformerLike: cut by a split_spec."""

    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)))

    def forward(self, x):
        return self.layers(x)


Pair = namedtuple("Pair", "logits state")


class Shaped(nn.Module):
    """Takes and gives a structure."""

    def __init__(self, give):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.give = give

    def forward(self, batch):
        x = self.a(batch["x"]) + batch["more"][0]
        pipe_split()
        return self.give(self.b(x), x)


SPEC = {"layers.1": SplitPoint.BEGINNING, "layers.2": SplitPoint.BEGINNING, "layers.3": SplitPoint.BEGINNING}


def prepare() -> None:
    """What both ranks import."""
    import torch.distributed.pipelining._IR

    import splitkit as sk

    torch.distributed.pipelining._IR.split_module = sk.split_module


def main() -> None:
    """test_schedule_multiproc: GPipe over two ranks, held against the whole model."""
    import torch.distributed as dist
    from torch.distributed.pipelining import ScheduleGPipe, pipeline

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=2)
    torch.manual_seed(0)
    model, x, target = Layers(), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    whole = copy.deepcopy(model)
    loss = nn.MSELoss(reduction="sum")
    pipe = pipeline(model, (x[: ROWS // 4],), split_spec={"layers.2": SplitPoint.BEGINNING})
    schedule = ScheduleGPipe(pipe.build_stage(rank, torch.device("cpu")), 4, loss_fn=loss, scale_grads=False)
    expected = whole(x)
    loss(expected, target).backward()
    if rank == 0:
        schedule.step(x)
    else:
        losses: list[torch.Tensor] = []
        out = schedule.step(target=target, losses=losses)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(sum(losses), loss(expected, target))
    gradients = {n: p.grad for n, p in whole.named_parameters()}
    own = dict(pipe.get_stage_module(rank).named_parameters())
    assert len(own) == 4
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, gradients[name])
    dist.destroy_process_group()
    print(json.dumps({"same": rank}))
