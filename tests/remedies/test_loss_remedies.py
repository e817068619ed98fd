"""Remedies of ``--loss``, of the names of pictures, and of models of the Hub (SK402, SK403, SK601)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from carried import refusal
from test_command_remedies import printed
from transformers import GPT2Config

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(4, 4), form

    def forward(self, x):
        return self.form(self.layer(x))

def net(): return Net(lambda y: y), torch.ones(2, 4)
def two(): return Net(lambda y: (y, y)), torch.ones(2, 4)
def flat(): return Net(lambda y: y.sum(1)), torch.ones(2, 4)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(NETS)


def step(model, loss):
    printed(f'plan {model} --what fwd-bwd --policy "SaveAll()" --loss {loss}')


def write_losses():
    Path("losses.py").write_text("def first(output): return output[0].sum()\ndef loss(output): return output.sum()\n")


def test_losses_of_outputs():
    write_losses()
    with refusal("SK403", "Write your own: --loss FILE.py:FUNCTION, called with the output."):
        step("nets.py:two", "mse")
    step("nets.py:two", "losses.py:first")
    with refusal("SK403", "Use --loss mse, or write your own: --loss FILE.py:FUNCTION."):
        step("nets.py:flat", "cross_entropy")
    step("nets.py:flat", "mse")
    step("nets.py:flat", "losses.py:loss")
    with refusal("SK403", "Define it there: def loss(output): ..."):
        step("nets.py:net", "string:loss")
    step("nets.py:net", "losses.py:loss")


OWN = """
def one(output): return output.sum()
def both(output, target): return (output * target).sum()
"""


def test_what_an_own_loss_is_called_with():
    Path("losses.py").write_text(OWN)
    made = "net()[0], (torch.ones(2, 4),), {'target': torch.ones(2, 4)}"
    Path("more.py").write_text(f"{NETS}\ndef aims(): return {made}\n")
    with refusal(
        "SK403",
        'Return the target from the factory: module, args, {"target": target}; or take the output alone.',
    ) as error:
        step("nets.py:net", "losses.py:both")
    assert "called with the output alone: missing a required argument: 'target'" in error.value.reason
    step("more.py:aims", "losses.py:both")
    step("nets.py:net", "losses.py:one")
    with refusal("SK403", "Take both: def loss(output, target): ..."):
        step("more.py:aims", "losses.py:one")


def test_the_loss_of_a_graph():
    torch.export.save(torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),)), "net.pt2")
    with refusal("SK403", "Export the model with its loss, or name the function that makes it."):
        step("net.pt2", "mse")
    step("nets.py:net", "mse")


def test_the_code_of_a_loss_runs_only_if_it_is_named():
    write_losses()
    printed("plan nets.py:net --stages 1 --loss losses.py:loss -o plan.json")
    with refusal("SK601", "Pass --loss {...} to run that code."):
        printed("run plan.json --model nets.py:net")
    printed("run plan.json --model nets.py:net --loss losses.py:loss")


def test_pages_and_pictures():
    with refusal("SK601", "Name it page.html; or {...}."):
        printed("view nets.py:net --stages 1 -o page.png")
    for name in ("page.html", "page.svg"):
        printed(f"view nets.py:net --stages 1 -o {name}")


def test_a_model_of_the_hub():
    with refusal("SK402", "If it is one of the Hugging Face Hub: hf download {...} config.json --local-dir {...}"):
        printed("fit openai-community/gpt2-small --devices 24GiB")
    GPT2Config(n_layer=1, n_embd=8, n_head=2, architectures=["GPT2LMHeadModel"]).save_pretrained("gpt2-small")
    printed("fit gpt2-small --devices 24GiB")  # what the download would write
