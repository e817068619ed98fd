"""``--loss``, for a model that returns predictions: what is computed, what is refused, and when."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from launch import command
from torch import nn
from torch.nn import functional

from splitkit.cli import launcher
from splitkit.errors import CaptureError
from splitkit.testing.factory import Example, with_loss

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def make():
    return Net(), torch.randn(4, 8)

def labelled():
    return Net(), (torch.randn(4, 8),), {"target": torch.tensor([0, 4, 2, 1])}

def judge(output, target):
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)
"""


class Gives(nn.Module):
    """Returns its input times a weight, in one of several forms."""

    def __init__(self, form=lambda y: y):
        super().__init__()
        self.weight, self.form = nn.Parameter(torch.tensor(2.0)), form

    def forward(self, x):
        return self.form(self.weight * x)


@pytest.fixture
def nets(tmp_path):
    (tmp_path / "nets.py").write_text(NETS)
    return tmp_path / "nets.py"


def value(form, x, loss, **target):
    torch.manual_seed(0)
    return with_loss(Example(Gives(form), (x,), target), loss).model(x, **target).item()


FORMS = {"tensor": lambda y: y, "logits": lambda y: {"logits": y, "hidden": y + 1}, "ids": lambda y: (y, y.long())}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_loss_is_that_of_torch(form):
    for shape, classes in (((4, 3), 1), ((2, 5, 3), 2), ((2, 3, 4, 4), 1)):
        x = torch.randn(shape)
        of_torch = 2 * x.movedim(classes, 1)
        count = of_torch[:, 0].numel()
        target = (torch.arange(count) % 3).reshape(of_torch[:, 0].shape)
        expected = functional.cross_entropy(of_torch, target).item()
        assert value(form, x, "cross_entropy") == pytest.approx(expected)
        other = torch.randint(3, target.shape)
        expected = functional.cross_entropy(of_torch, other).item()
        assert value(form, x, "cross_entropy", target=other) == pytest.approx(expected)
        assert value(form, x, "mse") == pytest.approx((2 * x).pow(2).mean().item())
        assert value(form, x, "mse", target=2 * x) == 0


def test_the_model_keeps_its_class_and_names_and_can_be_copied():
    model = Gives()
    one = with_loss(Example(model, (torch.ones(2, 3),), {}), "mse").model
    assert one is model and isinstance(one, Gives) and [*dict(one.named_parameters())] == ["weight"]
    copied = copy.deepcopy(one)
    with torch.no_grad():
        copied.weight.zero_()
    assert copied(torch.ones(2, 3)).item() == 0 and one(torch.ones(2, 3)).item() == 4
    again = with_loss(Example(model, (torch.ones(2, 3),), {}), "mse").model  # of a factory that makes one module
    assert again(torch.ones(2, 3)).item() == 4


@pytest.mark.parametrize(
    "form, loss, says",
    [
        (lambda y: (y, y), "mse", "the model returns 2 tensors of floating point"),
        (lambda y: y.long(), "mse", "the model returns 0 tensors of floating point"),
        (lambda y: y.sum(1), "cross_entropy", r"needs \[batch, classes\], and the model returns \[2\]"),
    ],
)
def test_outputs_of_which_no_loss_can_be_made(form, loss, says):
    with pytest.raises(CaptureError, match=f"SK403: .*{says}"):
        value(form, torch.ones(2, 3), loss)


def test_a_training_step_is_planned_and_run_with_it(nets, tmp_path, call, data):
    step = tmp_path / "step.json"
    words = ["plan", f"{nets}:labelled", "--what", "fwd-bwd", "--memory", "least"]
    assert "--loss cross_entropy" in call("plan", f"{nets}:make", *words[2:])[2]
    code, found = data(*words, "--loss", f"{nets}:judge", "-o", step)
    assert code == 0 and f"--loss {nets}:judge" in found["next"]
    code, _, said = call("run", step, "--model", f"{nets}:labelled")
    assert code == 2 and f"Pass --loss {nets}:judge to run that code." in said, "a plan file alone runs no code"
    code, _, said = call("run", step, "--model", f"{nets}:labelled", "--loss", "mse")
    assert code == 2 and "its graph has no other" in said
    code, found = data("run", step, "--model", f"{nets}:labelled", "--loss", f"{nets}:judge", "--check")
    assert code == 0 and found["check"]["same"] and found["loss"] > 0


@pytest.mark.parametrize(
    "words, says",
    [
        (["--loss", "cros_entropy"], "Did you mean cross_entropy?"),
        (["--loss", "none.py:judge"], "SK403: there is no file none.py"),
        (["--loss", "{nets}:juge"], "nets.py:judge? "),
        (["--loss", "mse", "--how", "symbolic_trace"], "--loss does not work with --how symbolic_trace"),
    ],
)
@pytest.mark.parametrize("name", ["train", "profile", "plan", "sweep"])
def test_a_bad_loss_is_refused_before_any_rank_starts_or_any_code_runs(nets, call, monkeypatch, words, says, name):
    monkeypatch.setattr(launcher, "answer", lambda *given: pytest.fail("ranks were started"))
    nets.write_text(NETS + "\nraise SystemExit\n")
    more = {"train": ["--nproc", "2"], "profile": ["--ranks", "2"], "sweep": []}.get(name, ["--what", "fwd-bwd"])
    given = [word.format(nets=nets) for word in words]
    stages = ["--policy", "SaveAll()"] if name == "plan" else ["--stages", "2"]
    code, _, said = call(name, f"{nets}:make", *stages, *more, *given)
    assert code in (1, 2) and says in said


@pytest.mark.campaign
@pytest.mark.parametrize("words", [["train", "--nproc", "2", "--check"], ["profile", "--ranks", "2", "--repeat", "1"]])
def test_ranks_run_it(nets, words):
    given = ["--stages", "2", "--microbatches", "4", "--loss", "cross_entropy", "--json"]
    done = command(words[0], f"{nets}:make", *words[1:], *given)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["check"]["same"] if words[0] == "train" else found["schedules"]
