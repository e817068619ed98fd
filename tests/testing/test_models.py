"""The examples are captured whole, equal themselves, and load from names, modules and files."""

import subprocess
import sys

import pytest
import torch
from campaigns import these_first
from torch import nn

from splitkit.errors import CaptureError
from splitkit.frontends.joint_capture import capture
from splitkit.testing import models

leaves = torch.utils._pytree.tree_leaves

TEXT = {"layers": 2, "width": 32, "heads": 4, "vocab": 64, "batch": 2, "seq": 8}
IMAGE = {"layers": 2, "width": 32, "heads": 4, "image": 16, "patch": 8, "classes": 5, "batch": 2}


def tiny(name, **more):
    return models.build(name, **(IMAGE if name == "vit" else TEXT), **more)


def step(module, example):
    torch.manual_seed(3)
    example.model.zero_grad()
    out = module(*example.args, **example.kwargs)
    out.loss.backward()
    return out, {k: p.grad.clone() for k, p in example.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "name", these_first(["gpt2", "vit"], [name for name in models.NAMES if name not in ("gpt2", "vit")])
)
def test_capture_equals_the_model(name, capfd, recwarn):
    example = tiny(name)
    assert example.model.training
    gm = capture(example.model, *example.args, **example.kwargs)
    (want, want_grads), (got, got_grads) = step(example.model, example), step(gm, example)
    assert type(got) is type(want)
    for a, b in zip(leaves(want), leaves(got), strict=True):
        assert torch.equal(a, b)
    assert want_grads.keys() == got_grads.keys() and want_grads
    for key, grad in want_grads.items():
        torch.testing.assert_close(got_grads[key], grad, msg=key)
    out, err = capfd.readouterr()
    assert not out and "[transformers]" not in err


def test_seeds_and_the_callers_random_state():
    state = torch.get_rng_state()
    one, same, other = tiny("llama"), tiny("llama"), tiny("llama", seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(one.kwargs["input_ids"], same.kwargs["input_ids"])
    assert torch.equal(next(one.model.parameters()), next(same.model.parameters()))
    assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))


def test_gpt2_default_is_gpt2_small():
    assert dict(models.SIZES["gpt2"]) == {
        "layers": 12, "width": 768, "heads": 12, "vocab": 50257, "batch": 2, "seq": 64,
    }  # fmt: skip


def test_names_and_sizes_are_checked():
    with pytest.raises(CaptureError, match=r"(?s)SK402.*'gpt5'.*gpt2, llama, bert, t5, vit, mixtral"):
        models.load("gpt5")
    with pytest.raises(CaptureError, match=r"(?s)SK403.*gpt2 has no size experts.*layers, width, heads"):
        models.build("gpt2", experts=3)
    with pytest.raises(CaptureError, match="width 30 is not a multiple of heads 4"):
        models.build("bert", **{**TEXT, "width": 30})


def test_transformers_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CaptureError, match=r"(?s)SK402.*pip install 'transformers>=5'"):
        models.build("gpt2")


FACTORIES = """
from dataclasses import dataclass
import torch
from torch import nn
from splitkit.testing.models import Example

def positional(width=4): return nn.Linear(width, 2), (torch.ones(3, width),)
def tensor(): return nn.Linear(4, 2), torch.ones(3, 4)
def both(): return nn.Linear(4, 2), (torch.ones(3, 4),), {}
def keyword(): return nn.Linear(4, 2), {"input": torch.ones(3, 4)}
def example(): return Example(nn.Linear(4, 2), (torch.ones(3, 4),), {})
def wrong(): return nn.Linear(4, 2), 3
def module_only(): return nn.Linear(4, 2)
number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return path


@pytest.mark.parametrize("name", ["positional", "tensor", "both", "keyword", "example"])
def test_factories_in_a_file(file, name):
    example = models.load(f"{file}:{name}")
    assert isinstance(example.model, nn.Linear)
    assert example.model(*example.args, **example.kwargs).shape == (3, 2)


def test_factories_of_a_module_and_sizes(file, monkeypatch):
    monkeypatch.syspath_prepend(str(file.parent))
    assert models.load("factories:positional", width=6).args[0].shape == (3, 6)


@pytest.mark.parametrize(
    "name, words",
    [
        ("wrong", r"returned a tuple of \(Linear, int\)"),
        ("module_only", "returned a Linear"),
        ("nowhere", "does not exist"),
        ("number", "is a int, not a function"),
    ],
)
def test_wrong_factories(file, name, words):
    with pytest.raises(CaptureError, match=f"SK403.*{words}"):
        models.load(f"{file}:{name}")


def test_factories_that_do_not_take_the_sizes_and_places_that_do_not_exist(file):
    with pytest.raises(CaptureError, match=r"SK403.*cannot be called"):
        models.load(f"{file}:both", width=3)
    with pytest.raises(CaptureError, match="SK403: there is no file"):
        models.load("/nowhere/at_all.py:factory")
    with pytest.raises(CaptureError, match=r"SK402.*no_such_package"):
        models.load("no_such_package.module:factory")


def test_import_is_cheap():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "import splitkit.testing.models as m; assert m.NAMES[0] == 'gpt2'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
