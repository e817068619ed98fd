"""The folder of a user: a file with models, and a `plan` command on one of them."""

from __future__ import annotations

import json

FACTORIES = '''"""Models of a user."""
import torch
from torch import nn


def net(width=4, depth=3):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth))), torch.randn(2, width)


def broken():
    raise ValueError("no checkpoint here")


def wrong_inside():
    return len(3)


def needs(width):
    return nn.Linear(width, 2), torch.randn(2, width)


def module_only():
    return nn.Linear(2, 2)


model = nn.Linear(2, 2)
'''


PLAN = ["plan", "my.py:net", "--stages", "2"]


def is_a_plan(path):
    return json.loads(path.read_text())["kind"] == "splitkit plan"
