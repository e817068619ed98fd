"""The pages of docs/ are in the site, name what exists, and show commands that the command line understands."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from splitkit import policies
from splitkit.cli.parser import make_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))


def commands(text):
    """The ``splitkit`` commands of the code blocks of a page, without comments; ``...`` stands for more words."""
    for language, block in re.findall(r"^```(\S*).*?\n(.*?)^```", text, re.S | re.M):
        for line in [] if language not in ("", "sh", "bash") else block.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                if re.match(r"(?:\S*/)?splitkit \w", command):
                    yield [word for word in shlex.split(command, comments=True)[1:] if word != "..."]


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "../CONTRIBUTING.md"])
def test_every_command_is_understood(page):
    for words in commands((DOCS / page).read_text()):
        if "--help" not in words:
            make_parser().parse_args(words)


def test_pages_have_commands_and_a_wrong_one_is_noticed():
    found = [words for page in PAGES for words in commands((DOCS / page).read_text())]
    assert len(found) >= 25 and len({words[0] for words in found}) >= 8
    assert list(commands("```\na && splitkit plan x --stages 4  # four\n```")) == [["plan", "x", "--stages", "4"]]


def test_every_page_is_in_the_index_and_says_first_what_it_is_good_for():
    index = (DOCS / "index.md").read_text()
    listed = re.findall(r"^([\w./]+)$", index, re.M)
    assert {name.removesuffix(".md") for name in PAGES} - {"index"} <= {*listed}
    for page in {*PAGES} - {"index.md"}:
        first = re.match(r"# .*\n\n(.*)\n\n", (DOCS / page).read_text())
        assert first and re.fullmatch(r"(?!For )[A-Z][^.]*(\.\w[^.]*)*\.", first[1]), (page, first and first[1])


def test_the_table_of_policies_has_all_of_them():
    text = (DOCS / "policies.md").read_text()
    missing = {name for name in policies.__all__ if f"`{name}(" not in text and f"`{name}`" not in text}
    assert missing == {"Random", "RoundRobin", "ByDevice", "ByParameterBytes", "Precompute"}, (
        "which are for tests, or rare"
    )


def test_the_gallery_is_what_the_policies_draw(tmp_path):
    spec = importlib.util.spec_from_file_location("gallery", DOCS / "gallery.py")
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    pictures = {path.stem for path in gallery.FOLDER.glob("*.svg")}
    assert pictures == {*gallery.FORWARD, *gallery.TRAINING}
    shown = re.findall(r"\(gallery/(\w+)\.svg\)", (DOCS / "policies.md").read_text())
    assert sorted(shown) == sorted(pictures)
    for name, plan in gallery.plans(frozenset({"expert", "around_ops"})):
        plan.to_svg(tmp_path / "drawn.svg")
        assert (tmp_path / "drawn.svg").read_text() == (gallery.FOLDER / f"{name}.svg").read_text(), name
