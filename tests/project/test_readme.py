"""What the README shows runs as shown."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import torch
from campaigns import these_first

from splitkit.cli.parser import make_parser
from splitkit.testing.models import build

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs" / "tour.md").read_text()


@pytest.mark.parametrize(("text", "count"), these_first([(README, 3)], [(TOUR, 6)]), ids=["README", "tour"])
def test_the_python_blocks_run_one_after_another(text, count, capsys):
    example = build("gpt2", layers=1, width=32, heads=2, vocab=96, seq=12)

    class WithLoss(type(example.model)):
        def forward(self, ids):
            return super().forward(input_ids=ids, labels=ids)

    example.model.__class__ = WithLoss  # as the training step of a user returns it
    scope = {"model": example.model, "inputs": (example.kwargs["input_ids"],)}
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(blocks) == count
    for block in blocks:
        exec(block, scope)
    assert "transformer.h.0" in capsys.readouterr().out
    if text is TOUR:
        assert ("attention", 1) in scope["split"].parts and scope["pair"].saved
    assert scope["trained"].lm_head.weight is example.model.lm_head.weight
    with torch.no_grad():
        scope["split"](*scope["inputs"])


@pytest.mark.parametrize("name", ["run", "test"])
def test_both_commands_set_everything_up_by_themselves(name):
    block = re.search(rf"<!-- {name} -->\n```\n(.*?)\n```\n<!-- end -->", README, re.S)
    assert block, f"the README has no {name} command"
    lines = block[1].splitlines()
    assert len(lines) == 1
    install = "python3.11 -m venv .venv && .venv/bin/pip install -q -c constraints.txt -e "
    assert lines[0].startswith(install)


def test_the_splitkit_commands_of_the_readme_are_understood():
    commands = re.findall(r"(?:\.venv/bin/|`)splitkit ((?:plan|run|split|capture|sweep) [^`&\n]*)", README + TOUR)
    assert len(commands) >= 8
    for command in commands:
        make_parser().parse_args(shlex.split(command))


def test_the_files_it_names_are_there():
    for name in re.findall(r"`((?:splitkit|docs|notebooks|tests|benchmarks)/[\w./-]*)`", README):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / name).exists(), name


def test_the_readme_stays_short():
    assert len(README.split()) < 960, "a third of what it was: details belong in docs/"


def test_the_changelog_is_kept():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "Keep a Changelog" in text and re.findall(r"^## (.*)$", text, re.M)[:2] == ["Since", "0.1.0, unreleased"]
    first = text.split("## 0.1.0, unreleased")[1].split("\n## ")[0]
    assert len(first.split()) < 1500, "what splitkit does, in users' words: history is in git"


def test_every_file_of_the_project_is_free_of_paths_of_one_machine():
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for path in (Path(folder) / name for name in files):
            if path.suffix in {".py", ".md", ".cfg", ".toml", ".ipynb", ".txt"}:
                text = path.read_text(errors="ignore")
                assert not re.search(r"(?<![\w.])/(?:work|root|farm)/\w", text), path
