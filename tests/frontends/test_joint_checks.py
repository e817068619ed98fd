"""A model that checks, logs, prints or warns in its forward has a joint graph."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
import torch.nn.functional as F
from jointmodels import Checked, assert_pair_like_eager, assert_step_like_eager
from torch import nn

import splitkit as sk
from splitkit.errors import CaptureError
from splitkit.policies import Budget, MinCut, Precompute, RecomputeAll, SaveAll


def positive(x):
    return x @ x.mT + torch.eye(4)


CHECKED = {
    "one_hot": lambda m, x: (F.one_hot((x > 0).long().flatten()[:4], 4) * m.linear(m.w * x)).sum(),
    "nonzero": lambda m, x: m.linear(x * m.w)[(x > 0).nonzero(as_tuple=True)].sum(),
    "mask": lambda m, x: m.linear(x * m.w)[x > 0].sin().sum(),
    "where": lambda m, x: torch.zeros_like(x).index_add(0, torch.where(x[:, 0] > 0)[0], m.linear(x)[x[:, 0] > 0]).sum(),
    "unique": lambda m, x: torch.unique(x).sum() * m.linear(x * m.w).sin().sum(),
    "masked_scatter": lambda m, x: m.linear(x).masked_scatter(x > 0, m.w * x).sum(),
    "item": lambda m, x: (m.linear(x) * m.w * x.sum().item()).sum(),
    "cholesky": lambda m, x: torch.linalg.cholesky(positive(x) * m.w.sum() + m.linear.weight.diag().diag()).sum(),
    "solve": lambda m, x: torch.linalg.solve(positive(x), m.linear(m.w)).sum(),
    "inv": lambda m, x: torch.linalg.inv(positive(x) * m.w).sum(),
    "two": lambda m, x: torch.linalg.inv(torch.linalg.cholesky(positive(x) * m.w.sum())).sum(),
}


@pytest.mark.parametrize("name", CHECKED)
def test_a_model_that_checks_on_the_way_is_divided_by_every_policy(name):
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    joint = sk.capture_joint(Checked(CHECKED[name]), x)
    for policy in (SaveAll(), RecomputeAll(), MinCut(), Budget(1.0), Precompute()):
        assert_pair_like_eager(joint, policy, x)


@pytest.mark.parametrize("name", ["one_hot", "mask", "cholesky"])
def test_apply_takes_a_model_that_checks_on_the_way(name):
    torch.manual_seed(0)
    model, x = Checked(CHECKED[name]), torch.randn(4, 4)
    plain = copy.deepcopy(model)
    sk.apply(model, Budget(1.0), x)(x).backward()
    plain(x).backward()
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


@pytest.mark.parametrize("policy", [SaveAll(), RecomputeAll(), MinCut()], ids=str)
def test_checks_run_in_forward(policy):
    x = torch.eye(4)
    joint = sk.capture_joint(Checked(lambda m, x: torch.linalg.cholesky(x * m.w).sum()), x)
    pair = joint.split(policy)
    assert all("_linalg_check" not in str(node.target) for node in pair.backward.graph.nodes)
    if torch.__version__.startswith("2.11"):
        return  # it leaves such checks out of what it traces
    with pytest.raises(torch.linalg.LinAlgError):
        pair.forward(*joint.primals(-x))
    joint = sk.capture_joint(Checked(lambda m, x: (F.one_hot(x, 4) * m.w).sum()), torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="smaller than num_classes"):
        joint.split(policy).forward(*joint.primals(torch.tensor([1, 9])))


def test_an_op_with_an_effect_that_its_schema_hides_is_refused_by_name():
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    @torch.library.custom_op("splitkit_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    counted.register_fake(torch.empty_like)
    counted.register_autograd(lambda ctx, gradient: gradient)
    _register_effectful_op(torch.ops.splitkit_tests.counted.default, _EffectType.ORDERED)
    with pytest.raises(CaptureError, match="SK410.*counted"):
        sk.capture_joint(Checked(lambda m, x: counted(m.linear(x)).sum()), torch.randn(2, 4))


def test_a_model_may_log_print_and_warn():
    class Logger(logging.Logger):
        def warning_once(self, text):
            self.warning(text)

    logger = Logger("splitkit.tests")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            logger.warning("a logger: %s", 1)
            logger.warning_once("a method that a library added")
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug(str(x))
            print("a print")
            warnings.warn("a warning", stacklevel=2)
            return self.linear(x).sum()

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_step_like_eager(Model(), SaveAll(), torch.randn(2, 4))


def test_gpt2_in_training_behind_a_wrapper_is_captured():
    transformers = pytest.importorskip("transformers")

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            config = transformers.GPT2Config(
                n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=1, eos_token_id=1, **dropout
            )
            self.model = transformers.GPT2LMHeadModel(config)

        def forward(self, ids):
            return self.model(ids, labels=ids, use_cache=False).loss

    assert_step_like_eager(Wrapper().train(), Budget(1.0), torch.randint(0, 32, (2, 8)))


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        ((2,), {}, r"forward\(\) takes 2 positional arguments but 3 were given, called with float32\[2, 8\]"),
        ((), {"mask": 1}, r"got an unexpected keyword argument 'mask', called with float32\[2, 8\], mask=1"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_named_and_no_other_way_is_advised(args, kwargs, said):
    with pytest.raises(CaptureError, match=f"SK401: Linear does not run on the example inputs: .*{said}") as caught:
        sk.capture_joint(nn.Linear(8, 8), torch.ones(2, 8), *args, loss=torch.sum, **kwargs)
    assert "apply" not in str(caught.value) and isinstance(caught.value.__cause__, TypeError)
