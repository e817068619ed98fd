"""A copied or pickled split keeps its hooks, input check and regions; what cannot be kept is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import splitkit as sk
from splitkit.errors import GraphError
from splitkit.policies import RoundRobin
from splitkit.testing import assert_emitted_as_planned, assert_same


def test_hooks_of_an_exported_module_find_their_attributes_on_the_parent():
    gm = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)).module(check_guards=False)
    assert_same(gm, sk.split(gm, lambda node: 0), torch.ones(1, 2))


def test_backward_hooks_of_the_original_run_on_its_split():
    gm = fx.symbolic_trace(nn.Sequential(nn.Tanh(), nn.Tanh()))
    gm.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 10,))
    gm.register_full_backward_pre_hook(lambda module, grad_out: (grad_out[0] * 3,))
    assert_same(gm, sk.split(gm, RoundRobin(2)), torch.ones(2, requires_grad=True))


def test_a_copy_of_a_split_keeps_the_check_of_its_inputs():
    gm = sk.capture(nn.Linear(3, 3), torch.ones(2, 3))
    made = sk.split(gm, lambda node: 0)
    for copied in (copy.deepcopy(made.module), copy.deepcopy(made)):
        with pytest.raises(RuntimeError, match="[Ee]xpected input"):
            copied(torch.ones(5, 3))


def test_a_split_of_a_captured_model_can_be_copied():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    gm = sk.capture(model, torch.ones(2, 3))
    made = sk.split(gm, RoundRobin(2))
    copied = copy.deepcopy(made)
    assert_emitted_as_planned(copied)
    assert not {id(p) for p in copied.module.parameters()} & {id(p) for p in made.module.parameters()}
    assert_same(gm, copied, torch.ones(2, 3))


def test_a_split_with_hooks_can_be_pickled():
    gm = sk.capture(nn.Linear(3, 3), torch.ones(2, 3), how="symbolic_trace")
    again = pickle.loads(pickle.dumps(sk.split(gm, lambda node: 0).module))
    assert torch.equal(again(torch.ones(2, 3)), gm(torch.ones(2, 3)))


def test_a_split_with_regions_can_be_copied_and_refuses_to_be_pickled():
    """fx unpickles by tracing the code, in which ``_set_grad_enabled`` would run instead of becoming a node."""

    def model(x):
        with torch.no_grad():
            y = x.sin()
        return y * x

    gm = make_fx(model, pre_dispatch=True)(torch.ones(2))
    for lazy in (False, True):
        made = sk.split(gm, lambda node: 0, lazy=lazy)
        with pytest.raises(GraphError, match="SK107"):
            pickle.dumps(made.module)
        assert_same(gm, copy.deepcopy(made.module), torch.ones(2, requires_grad=True))
