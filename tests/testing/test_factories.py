"""Models that files make: what is imported, what a factory may return, losses, and the texts of what is wrong."""

from __future__ import annotations

import inspect
import pickle
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from splitkit.errors import CaptureError, FileError
from splitkit.testing import factory
from splitkit.testing.config_files import checkpoint_beside, is_config, read_config
from splitkit.testing.models import Example

FILE = """
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Sizes:
    wide: int = 4

def make(wide, deep=1):
    return nn.Linear(wide, deep), (torch.ones(2, wide),)

def alone(): return nn.ReLU()
def other(): return 3
def _hidden(): return nn.ReLU(), ()
MODULE = nn.ReLU()
NUMBER = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(FILE)
    return str(path)


def test_a_file_is_imported_under_a_name_by_which_its_classes_are_found(file):
    module = factory.module_at(file)
    assert sys.modules[module.__name__] is module
    assert pickle.loads(pickle.dumps(module.Sizes(3))) == module.Sizes(3)


def test_a_file_that_fails_is_not_left_imported(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("x = 1\n1 / 0\n")
    with pytest.raises(ZeroDivisionError) as caught:
        factory.module_at(str(path))
    assert caught.value.__notes__ == [f"It was raised at {path}:2, which was imported for what it defines"]
    assert "splitkit_model_wrong" not in sys.modules


def test_the_functions_of_a_file_are_those_that_return_a_model_with_inputs(file, tmp_path):
    path = tmp_path / "plain.py"
    path.write_text("def one(): return 3\ndef none(): pass\n")
    assert [factory.functions_in(p) for p in (path.with_name("nets.py"), path)] == [["make"], ["one"]]
    assert factory.functions_listed(["a", "b"]) == "its functions: a, b"
    assert factory.functions_listed([]) == "it has no function that returns something"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mke", "the factory 'mke' in {} does not exist\n  Did you mean {}:make? Its functions: make."),
        ("zzz", "the factory 'zzz' in {} does not exist\n  Define a function of that name there; its functions: make."),
        ("NUMBER", "the factory 'NUMBER' in {} is a int, not a function\n  Define a function of that name there; its "
         "functions: make."),
    ],
)  # fmt: skip
def test_a_factory_that_is_missing(file, name, text):
    with pytest.raises(CaptureError) as caught:
        factory._factory(factory.module_at(file), file, name)
    assert str(caught.value) == "SK403: " + text.replace("{}", file)


def test_a_module_is_no_factory_and_sizes_must_fit(file):
    module = factory.module_at(file)
    with pytest.raises(CaptureError, match=r"^SK403: .*:MODULE is a module, not a function that makes one\n"):
        factory._factory(module, file, "MODULE")
    factory._require_fit("f:make", module.make, {"wide": 3})
    for sizes, example in (
        ({}, "--size wide=8"),
        ({"deep": 2}, "--size wide=8"),
        ({"wide": 1, "x": 2}, "--size NAME=N"),
    ):
        with pytest.raises(CaptureError) as caught:
            factory._require_fit("f:make", module.make, sizes)
        remedy = f"Its signature is make(wide, deep=1): give sizes that it takes ({example}) or defaults."
        assert caught.value.code == "SK403" and caught.value.remedy == remedy
        assert caught.value.reason.startswith("f:make cannot be called: ")


def test_what_a_factory_may_return():
    model, x = nn.ReLU(), torch.ones(1)
    for made, args, kwargs in (
        ((model, x), (x,), {}),
        ((model, {"x": x}), (), {"x": x}),
        ((model, [x, 3]), (x, 3), {}),
        ((model, (x,), {"y": 2}), (x,), {"y": 2}),
        (Example(model, (x,), {}), (x,), {}),
    ):
        found = factory._example("f", made)
        assert (found.model, found.args, found.kwargs) == (model, args, kwargs)
    for made, text in (
        (model, "f returned a ReLU without inputs"),
        (None, "f returned nothing"),
        ((1, x), "f returned a tuple of (int, Tensor)"),
        ([model], "f returned a list of (ReLU)"),
        ("x", "f returned a str"),
    ):
        with pytest.raises(CaptureError) as caught:
            factory._example("f", made)
        assert (caught.value.code, caught.value.reason, caught.value.remedy) == ("SK403", text, factory.RETURN)


class Net(nn.Module):
    def __init__(self, wrap=lambda y: y):
        super().__init__()
        self.inner, self.wrap = nn.Linear(3, 4), wrap

    def forward(self, x, **more):
        return self.wrap(self.inner(x))


class Taking(Net):
    def forward(self, x, target):
        return self.inner(x) + target


X = torch.randn(5, 3)


def test_a_model_gets_a_loss_of_its_predictions():
    target = torch.tensor([0, 3, 1, 2, 0])
    for wrap in (
        lambda y: y,
        lambda y: {"logits": y, "more": y},
        lambda y: (y, 3),
        lambda y: SimpleNamespace(logits=y),
    ):
        made = factory.with_loss(Example(Net(wrap), (X,), {}), "cross_entropy")
        y = made.model.inner(X)
        assert torch.equal(made.model(X), functional.cross_entropy(y, torch.arange(5) % 4))
        assert torch.equal(made.model(X, target=target), functional.cross_entropy(y, target))
        squared = factory.with_loss(Example(made.model, (X,), {"target": y + 1}), "mse").model  # the same module again
        assert torch.equal(squared(X), y.square().mean()) and torch.equal(squared(X, target=y + 1), torch.ones(()))
        assert list(inspect.signature(squared.forward).parameters) == ["x", "target", "more"]
        assert type(squared).__qualname__ == "Net" and isinstance(squared, Net)


def test_a_target_that_the_model_takes_is_its_own():
    model = factory.with_loss(Example(Taking(), (X, torch.ones(4)), {}), "mse").model
    assert torch.equal(model(X, torch.ones(4)), (model.inner(X) + 1).square().mean())


def test_classes_are_the_last_dimension_but_in_pictures_the_second():
    y = torch.randn(2, 3, 4)
    assert torch.equal(
        factory._loss_of("cross_entropy", y, None), functional.cross_entropy(y.reshape(6, 4), torch.arange(6) % 4)
    )
    z = torch.randn(2, 3, 4, 5)
    expected = functional.cross_entropy(z.movedim(1, -1).reshape(-1, 3), torch.arange(40) % 3)
    assert torch.equal(factory._loss_of("cross_entropy", z, None), expected)


def test_predictions_that_are_missing_are_refused(file):
    for wrap, count in ((lambda y: (y, y), 2), (lambda y: 3, 0)):
        with pytest.raises(CaptureError) as caught:
            factory.with_loss(Example(Net(wrap), (X,), {}), "mse").model(X)
        assert str(caught.value) == (
            f"SK403: --loss mse needs predictions, and the model returns {count} tensors of floating point\n"
            "  Write your own: --loss FILE.py:FUNCTION, called with the output."
        )
    with pytest.raises(CaptureError, match=r"^SK403: --loss cross_entropy needs \[batch, classes\], and .* \[5\]\n"):
        factory.with_loss(Example(Net(lambda y: y[:, 0]), (X,), {}), "cross_entropy").model(X)
    with pytest.raises(CaptureError, match=r"^SK403: .* has no function 'nothing'\n  Define it there: def loss"):
        factory.with_loss(Example(Net(), (X,), {}), f"{file}:nothing")


def test_which_files_are_configurations(tmp_path):
    (tmp_path / "plan.json").write_text('{"model_type": 3}')
    (tmp_path / "own.json").write_text('{"model_type": "gpt2", "limit": {"__float__": "Infinity"}, "other": {"a": 1}}')
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "text.txt").write_text('{"model_type": "gpt2"}')
    folder = tmp_path / "folder"
    folder.mkdir()
    names = ("own.json", "plan.json", "broken.json", "text.txt", "none.json", "folder", "config.json")
    assert [is_config(str(tmp_path / name)) for name in names] == [True, *[False] * 5, True]
    assert checkpoint_beside(str(folder)) == ""
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    assert is_config(str(folder)) and checkpoint_beside(str(folder)) == ""
    (folder / "model.safetensors").touch()
    assert checkpoint_beside(str(folder)) == checkpoint_beside(str(folder / "config.json")) == str(folder)
    read = read_config(str(tmp_path / "own.json"))
    assert read == {"model_type": "gpt2", "limit": float("inf"), "other": {"a": 1}}
    for name, text in (
        (
            "plan.json",
            f"SK504: {tmp_path / 'plan.json'} is not a configuration: it has no model_type\n",
        ),
        ("broken.json", f"SK504: {tmp_path / 'broken.json'} cannot be read: "),
    ):
        with pytest.raises(FileError) as caught:
            read_config(str(tmp_path / name))
        assert str(caught.value).startswith(text)
