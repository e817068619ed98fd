"""A slow test needs an entry, and a machine that is slower than that of the file needs no other."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tiers import ENTRIES, MOST, function_of, judged, slow_tests

STAY = {"a.py::slow": 2.0, "b.py::slow[x]": 4.0}


def told(**seconds):
    """Reports of the tests that stay, and of tests of c.py."""
    return [
        *((name, False, took) for name, took in STAY.items()),
        *((f"c.py::{name}", False, took) for name, took in seconds.items()),
    ]


def test_a_slow_test_without_an_entry_is_named_with_its_seconds():
    assert judged(told(quick=0.7, late=1.7), STAY, set()) == [("c.py::late", 1.7)]


def test_noise_and_the_first_test_of_a_file_fail_nothing():
    assert judged([*told(near=1.5), ("d.py::first", True, 30.0)], STAY, set()) == []


def test_an_entry_of_a_function_stands_for_all_its_cases():
    measured = [*told(), ("c.py::late[1]", False, 9.0), ("c.py::late[2]", False, 9.0)]
    assert judged(measured, STAY, {"c.py::late"}) == []
    assert judged(measured, STAY, {"c.py::late[1]"}) == [("c.py::late[2]", 9.0)]


def test_a_machine_that_is_three_times_slower_judges_alike():
    slow = [(name, first, 3 * took) for name, first, took in told(quick=0.7, late=1.7)]
    assert judged(slow, STAY, set()) == [("c.py::late", pytest.approx(1.7))]


def test_each_test_that_stays_is_slow_and_has_a_reason():
    stay, campaigns = slow_tests()
    assert not stay.keys() & campaigns
    for group in tomllib.loads(ENTRIES.read_text())["stay"]:
        assert len(group["why"].split()) > 3, group
        assert all(seconds > MOST for seconds in group["tests"].values())


CONFTEST = """
from tiers import Tier

def pytest_addoption(parser):
    parser.addoption("--times")

def pytest_configure(config):
    config.pluginmanager.register(Tier(config))
"""

SKIPPED = """
import pytest

@pytest.mark.skipif(True, reason="there is no X: apt-get install x")
def test_x():
    pass
"""


def test_each_entry_names_a_test():
    stay, campaigns = slow_tests()
    root, words = Path(__file__).parents[2], {}
    for name in stay.keys() | campaigns:
        file, *_, function = function_of(name).split("::")
        assert (root / file).exists(), name
        folder = (root / file).parent  # a file may take tests from those beside it
        if folder not in words:
            words[folder] = {word for path in folder.glob("*.py") for word in re.findall(r"\w+", path.read_text())}
        assert function in words[folder], name


def test_what_was_not_tested_is_said_last(tmp_path):
    helpers = Path(__file__).parents[1] / "helpers"
    for name, text in {
        "conftest.py": CONFTEST, "test_it.py": SKIPPED, "pytest.ini": f"[pytest]\npythonpath = {helpers}\n"
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "    1 test   there is no X: apt-get install x" in said
