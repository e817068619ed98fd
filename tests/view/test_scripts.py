"""The scripts of the page: joined without a bundler they are one script, in which no name means two things."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import splitkit
from splitkit.view.page.bundle import SCRIPTS, script, source, spaceless

FOLDER = Path(splitkit.__file__).parent / "view" / "page" / "scripts"
ALL = (*SCRIPTS, "widget")
IMPORT = re.compile(r"^import\b.*$", re.MULTILINE)
PLAIN_IMPORT = re.compile(r'^import \{([\w, ]+)\} from "\./(\w+)\.js";$')
DECLARED = re.compile(r"^(?:export )?(?:function|class|const|let) +(\w+)", re.MULTILINE)


def declared(code):
    """The names that a script declares at its top, those of ``const A = 1, B = 2`` included."""
    lists = re.findall(r"^(?:export )?const (\w+ ?= ?\d+(?:, ?\w+ ?= ?\d+)+);", code, re.MULTILINE)
    more = [word.split("=")[0].strip() for each in lists for word in each.split(",")]
    return {*DECLARED.findall(code), *more}


def exported(code):
    return {name for name in declared(code) if re.search(rf"^export .*\b{name}\b", code, re.MULTILINE)}


def test_every_script_is_joined_once():
    assert {path.stem for path in FOLDER.glob("*.js")} == {*ALL}
    assert len(set(ALL)) == len(ALL)


def test_no_two_scripts_declare_the_same_name():
    seen = {"COLOURS": "Python"}
    for name in ALL:
        for word in declared(source(name)):
            assert seen.setdefault(word, name) == name, f"{word} is declared in {seen[word]} and in {name}"


@pytest.mark.parametrize("name", ALL)
def test_a_script_imports_what_scripts_before_it_export(name):
    """In the form that is taken out when they are joined: one line, no other names."""
    for line in IMPORT.findall(source(name)):
        found = PLAIN_IMPORT.match(line)
        assert found, line
        words, other = found.groups()
        assert ALL.index(other) < ALL.index(name), line
        assert {*words.split(", ")} <= exported(source(other)), line


@pytest.mark.parametrize("name", ALL)
def test_a_script_is_checked_small_and_says_what_it_is(name):
    lines = source(name).splitlines()
    assert lines[0] == "// @ts-check" and lines[1].startswith("// ") and lines[1].endswith(".")
    assert len(lines) <= 500


@pytest.mark.parametrize("widget", [False, True])
def test_what_is_joined_has_neither_imports_nor_comments(widget):
    code = script(widget=widget)
    assert not re.search(r"^import\b|/\*\*|^//|@type|^\s", code, re.MULTILINE)
    assert re.findall(r"^export default\{|^export\b", code, re.MULTILINE) == (["export default{"] if widget else [])
    assert {name for each in SCRIPTS for name in declared(source(each))} <= declared(code)


def test_a_comment_is_told_from_code():
    """Texts of the scripts have nothing that looks like the comments that are taken out."""
    for name in ALL:
        outside = re.sub(r"/\*\*.*?\*/", "", source(name), flags=re.DOTALL)
        assert "/*" not in outside and "*/" not in outside, name
        lines = outside.splitlines()
        assert not [line for line in lines if "//" in line.lstrip().lstrip("/")], name
        assert not [line for line in lines if line.count("`") % 2 and not line.lstrip().startswith("//")], name


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("const a = b ? [1, 2] : {c: d};", "const a=b?[1,2]:{c:d};"),
        ('f("a, b = c", d) ;', 'f("a, b = c",d);'),
        ('f("a \\" , b", c)', 'f("a \\" , b",c)'),
        ("f('d ; e') ;", "f('d ; e') ;"),
        ("f(`a, ${b ? c : d} , e`, g)", "f(`a, ${b ? c : d} , e`, g)"),
        ("const a = b / c, d = e / f;", "const a = b / c, d = e / f;"),
        ("a + +b - -c", "a + +b - -c"),
    ],
)
def test_only_spaces_that_mean_nothing_are_taken_out(code, expected):
    assert spaceless(code) == expected and spaceless(expected) == expected


@pytest.mark.parametrize("name", ALL)
def test_what_a_script_quotes_stays_as_it_is(name):
    for line in source(name).splitlines():
        assert re.findall(r'"(?:\\.|[^"\\])*"', spaceless(line)) == re.findall(r'"(?:\\.|[^"\\])*"', line)
