"""Remedies of errors about models named on the command line, and functions that make them (SK402, SK403, SK602)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from carried import refusal
from commandlines import printed
from torch import nn

import splitkit as sk
from splitkit.testing import models

FACTORY = """
import torch
from torch import nn

def net(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.Tanh()), torch.ones(2, width)

def needs(width):
    return nn.Linear(width, 2), torch.randn(2, width)

def alone():
    return nn.Linear(2, 2)

model = nn.Linear(2, 2)
"""
TINY = "--size layers=1,width=32,heads=2 --size vocab=64,seq=8"


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(FACTORY)


def captured(words):
    """Capture a model of the command line; raises the error that the command prints."""
    return printed(f"capture {words}")


def told(error):
    """The model that a remedy names, as ``my.py:net``."""
    return next(name for name in re.findall(r"[\w./]+\.py:\w+", error.value.remedy) if "FUNCTION" not in name)


def test_names_that_are_near():
    with refusal("SK402", "Did you mean {...}?") as error:
        captured(f"gtp2 {TINY}")
    near = re.search(r"Did you mean (\w+)\?", error.value.remedy)[1]
    assert captured(f"{near} {TINY}") and captured("my.py:net")
    with refusal("SK402", "Did you mean {...}?") as error:
        models.build("gtp2")
    assert "gpt2" in error.value.remedy
    with refusal("SK402", "Choose one of {...}.") as error:
        models.build("qqqqqq")
    assert "gpt2" in error.value.remedy.removeprefix("Choose one of ").split(", ")
    with refusal("SK402", "Choose one of {...}; or name {...}, or a folder with the config.json of transformers."):
        captured("qqqqqq")
    with refusal("SK403", "Its sizes are {...}.") as error:
        models.build("gpt2", layerz=1)
    assert {"layers", "width", "heads"} <= set(re.findall(r"\w+", error.value.remedy))
    with refusal("SK601", "Its sizes are {...}.") as error:
        captured(f"gpt2 {TINY} --size qqqqqq=1")
    assert {"layers", "width", "heads"} <= set(re.findall(r"\w+", error.value.remedy))
    with refusal("SK403", "Choose heads that divide the width."):
        models.build("gpt2", layers=1, width=32, heads=3)
    assert models.build("gpt2", layers=1, width=32, heads=2, vocab=64, seq=8)
    with refusal("SK403", "Did you mean {...}:{...}? "):
        captured("my.py:nett")
    assert captured("my.py:net")


@pytest.mark.parametrize("words", ["my.py", "my.py:"])
def test_half_a_name(words):
    with refusal("SK602", "Write {...}:FUNCTION, such as {...}:{...}; {...}.") as error:
        captured(words)
    assert captured(told(error))


def test_a_name_without_a_file():
    with refusal("SK602", "Write {...}:{...}.") as error:
        captured(":net")
    assert error.value.remedy == "Write my_model.py:net."
    Path("my_model.py").write_text(FACTORY)
    assert captured(told(error))


def test_files_without_a_function():
    Path("broken.py").write_text("def net(:\n")
    with refusal("SK602", "Write {...}:FUNCTION, and fix the file: {...}."):
        captured("broken.py")
    Path("broken.py").write_text(FACTORY)
    assert captured("broken.py:net")
    Path("empty.py").write_text("x = 3\n")
    with refusal("SK602", "Define a function in it that returns (module, inputs), such as make, and write {...}:make."):
        captured("empty.py")
    Path("empty.py").write_text(FACTORY.replace("def net", "def make"))
    assert captured("empty.py:make")
    Path("notes.txt").write_text("x")
    with refusal("SK602", "A model is a function in a file that ends in .py: {...}{...}."):
        captured("notes.txt")
    with refusal("SK602", "Did you mean {...}?") as error:
        captured("mi.py")
    assert captured(told(error).replace("FUNCTION", "net"))
    with refusal("SK602", "Name a file that exists: {...}."):
        captured("nothing_like_it.py")


def test_folders_of_files():
    Path("mine").mkdir()
    with refusal("SK602", "Name a Python file and a function: {...}."):
        captured("mine")
    Path("mine/my.py").write_text(FACTORY)
    assert captured("mine/my.py:net")


def test_files_that_are_not_there():
    with refusal("SK403", "Did you mean {...}?") as error:
        captured("mi.py:net")
    assert captured(told(error))
    with refusal("SK403", "Name a file that exists: {...}."):
        captured("nothing_like_it.py:net")
    with refusal("SK403", "Give the path of a Python file."):
        models.load("nowhere.py:net")
    Path("text.txt").write_text("x")
    with refusal("SK602", "Name a file that ends in .py: {...}."):
        captured("text.txt:net")
    with refusal("SK403", "Name a file of torch.export.save."):
        captured("nothing.pt2")
    Path("broken.pt2").write_text("x")
    with refusal("SK403", "Write the file with torch.export.save(program, path)."):
        captured("broken.pt2")
    model = nn.Linear(2, 2)
    torch.export.save(torch.export.export(model, (torch.ones(2, 2),)), "program.pt2")
    assert captured("program.pt2")
    with refusal("SK403", "Leave the sizes out, or export it with other inputs."):
        captured("program.pt2 --size width=8")
    torch.export.save(torch.export.export(model, (torch.ones(5, 2),)), "program.pt2")
    assert captured("program.pt2")


def test_a_folder_of_stages():
    """The commands are carried out in test_launch_remedies.py."""
    Path("stages").mkdir()
    for name in ("parent.py", "manifest.json", "stage-0.json", "stage-1.json"):
        (Path("stages") / name).write_text("")
    with refusal(
        "SK602", "It holds the stages of a split: train them with `{...}`, or, for a step of generation, `{...}`."
    ) as error:
        captured("stages")
    assert "splitkit train stages --nproc 2" in error.value.remedy


def test_functions_that_are_not_there():
    Path("empty.py").write_text("x = 3\n")
    with refusal("SK403", "Define a function of that name there; "):
        captured("empty.py:other")
    Path("empty.py").write_text(FACTORY.replace("def net", "def other"))
    assert captured("empty.py:other")


def test_functions_that_return_something_else():
    returned = "Return (module, args), (module, args, kwargs), (module, kwargs) or a splitkit.testing.models.Example."
    for name in ("alone", "model"):
        with refusal(
            "SK403",
            "Return (module, args), (module, args, kwargs), (module, kwargs) or a splitkit.testing.models.Example.",
        ) as error:
            captured(f"my.py:{name}")
        assert error.value.remedy == returned
    Path("four.py").write_text(
        "import torch\nfrom torch import nn\nfrom splitkit.testing.models import Example\nX = torch.ones(2, 2)\n"
        "def a(): return nn.Linear(2, 2), (X,)\ndef b(): return nn.Linear(2, 2), (), {'input': X}\n"
        "def c(): return nn.Linear(2, 2), {'input': X}\ndef d(): return Example(nn.Linear(2, 2), (X,), {})\n"
    )
    for name in "abcd":
        assert captured(f"four.py:{name}")


def test_sizes_that_a_function_needs():
    with refusal("SK403", "Its signature is {...}{...}: give sizes that it takes ({...}) or defaults.") as error:
        captured("my.py:needs")
    assert captured(f"my.py:needs {re.search(r'--size [^)]*', error.value.remedy)[0]}")
    assert captured("my.py:net")  # has a default


def test_modules_that_cannot_be_imported():
    with refusal(
        "SK402", "Run from a directory where it can be imported, install it, or give a file: path/file.py:make."
    ):
        models.load("nowhere_at_all:net")
    assert captured("my.py:net")
    Path("lacks.py").write_text("import nowhere_at_all\n" + FACTORY)
    with refusal("SK402", "Install the package that provides it."):
        captured("lacks.py:net")
    Path("nowhere_at_all.py").write_text("")
    assert captured("lacks.py:net")


def test_a_program_in_the_place_of_its_module():
    program = torch.export.export(nn.Linear(2, 2), (torch.ones(2, 2),))
    with refusal("SK101", "Give its module: program.module()."):
        sk.split(program, sk.policies.Stages(1))
    x = torch.ones(2, 2)
    assert torch.equal(sk.split(program.module(), sk.policies.Stages(1))(x), program.module()(x))
    with refusal("SK401", "Give its module: program.module()."):
        sk.capture_joint(program, x, loss=torch.sum)
    assert sk.capture_joint(program.module(), x, loss=torch.sum).run(x).loss is not None


def same(plan):
    """Whether the parts of a plan compute what the model computes, by the check of the command."""
    return printed(f"run {plan} --model my.py:net --check")["check"]["same"]


def test_plans_whose_names_do_not_end_in_json():
    printed("plan my.py:net --stages 2 -o plan.json")
    with refusal("SK402", "Did you mean {...}.json? {...}") as error:
        printed("run plan")
    assert same(re.search(r"mean (.*?)[?]", error.value.remedy)[1])
    Path("plan.json").rename("text")
    with refusal("SK402", "The name of a plan file must end in .json: rename it to {...}.json. {...}") as error:
        printed("run text")
    name = re.search(r"rename it to (.*?json)[.] ", error.value.remedy)[1]
    Path("text").rename(name)
    assert same(name)


SCRIPT = "import sys\n" + FACTORY + "\n{guard}sys.exit(print('a script'))\n"


def test_a_script_that_ends_itself():
    Path("script.py").write_text(SCRIPT.format(guard=""))
    with refusal("SK403", "Call sys.exit only under `if __name__ == '__main__'`, and return the model and its inputs."):
        captured("script.py:net")
    Path("script.py").write_text(SCRIPT.format(guard="if __name__ == '__main__': "))
    assert captured("script.py:net")
    Path("script.py").write_text("import sys\n" + FACTORY.replace("return nn.Seq", "sys.exit(3) or nn.Seq", 1))
    with refusal("SK403", "Call sys.exit only under `if __name__ == '__main__'`, and return the model and its inputs."):
        captured("script.py:net")
    Path("script.py").write_text(FACTORY)
    assert captured("script.py:net")


def test_a_file_that_is_no_python():
    Path("broken.py").write_text(FACTORY + "def (:\n")
    with refusal("SK403", "Correct the file."):
        printed("train broken.py:net --stages 2 --nproc 2")
    Path("broken.py").write_text(FACTORY)
    assert captured("broken.py:net")
