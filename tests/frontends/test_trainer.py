"""One line in a script of transformers' Trainer: the losses, checkpoints and evaluation of the script without it."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import splitkit as sk

STEPS = 4


def model():
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 99, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def trained(net, folder, *, resume=False, steps=STEPS, **more):
    """Train for some steps, and return the losses of all steps, of evaluation, and the weights."""
    rows = torch.randint(0, 99, (16, 8), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=2,
        max_steps=steps, logging_steps=1, save_steps=2, eval_strategy="steps", eval_steps=2, use_cpu=True,
        report_to=[], disable_tqdm=True, lr_scheduler_type="constant", **more,
    )  # fmt: skip
    trainer = Trainer(model=net, args=arguments, train_dataset=data, eval_dataset=data[:4])
    trainer.train(resume_from_checkpoint=resume)
    told = {name: [e[name] for e in trainer.state.log_history if name in e] for name in ("loss", "eval_loss")}
    return told, [parameter.detach().clone() for parameter in net.parameters()]


def in_place(net):
    net.compile(backend=sk.backend("least"))
    return net


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(model(), tmp_path_factory.mktemp("plain"))


def assert_same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(a, b) for a, b in zip(one[1], other[1], strict=True))


def applied(net):
    return sk.apply(net, "least")


@pytest.mark.parametrize("line", these_first([applied], [in_place]))
def test_one_line_changes_no_loss_and_no_weight(line, plain, tmp_path):
    """With accumulation, evaluation, dropout, clipping and checkpoints."""
    assert len(plain[0]["loss"]) == STEPS and len(plain[0]["eval_loss"]) == 2
    assert_same(trained(line(model()), tmp_path), plain)


def test_a_run_resumes_from_its_checkpoint(plain, tmp_path):
    net = sk.apply(model(), sk.policies.MinCut())
    trained(net, tmp_path, steps=2)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(7.0)  # as in a process of its own, all weights come from the checkpoint
    assert_same(trained(net, tmp_path, resume=True), plain)


@pytest.mark.campaign
def test_activation_checkpointing_of_the_model_may_stay_on(plain, tmp_path):
    new, old = "activation_checkpointing", "gradient_checkpointing"  # the old name is deprecated in transformers 5.23
    option = new if hasattr(TrainingArguments, new) else old
    assert_same(trained(sk.apply(model(), "least"), tmp_path, **{option: True}), plain)
