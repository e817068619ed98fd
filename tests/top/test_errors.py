from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

import splitkit
from splitkit import errors
from splitkit.errors import CheckError, CycleError, PlanError, SplitError, listed, message_line, near, nearest

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text()
CODES = re.findall(r"^\| (SK\d{3}) \|", PAGE, re.M)
SOURCE = "\n".join(p.read_text() for p in Path(splitkit.__file__).parent.rglob("*.py") if p.name != "errors.py")


def test_one_family_with_reason_remedy_and_nodes():
    error = CycleError("SK203", "a cycle", "cut it", ["a", "b"])
    assert isinstance(error, PlanError) and isinstance(error, SplitError) and isinstance(error, ValueError)
    assert str(error) == "SK203: a cycle\n  cut it"
    assert (error.code, error.reason, error.remedy, error.nodes) == ("SK203", "a cycle", "cut it", ("a", "b"))


def test_errors_survive_a_process_border():
    error = pickle.loads(pickle.dumps(CheckError("SK701", "differs", nodes=["x"])))
    assert isinstance(error, AssertionError) and error.nodes == ("x",)


@pytest.mark.parametrize("code", CODES)
def test_every_code_is_raised_somewhere(code):
    assert f'"{code}"' in SOURCE


def test_every_code_that_is_raised_is_listed():
    assert set(re.findall(r'"(SK\d{3})"', SOURCE)) <= set(CODES)


def test_the_page_of_the_docs_lists_each_once():
    assert sorted(set(CODES)) == CODES
    classes = {name for name in vars(errors) if name.endswith(("Error", "Warning"))} - {"SplitError"}
    assert set(re.findall(r"^\| SK\d{3} \| `(\w+)`", PAGE, re.M)) == classes | {"CycleError"}


def test_names_that_are_near_whatever_their_case():
    assert near("GTP2", ["bert", "gpt2"]) == ["gpt2"] and near("zzz", ["bert"]) == []
    assert near("stage", ["Stages", "Store", "Devices"], most=3, cutoff=0.5)[0] == "Stages"
    assert nearest("gtp2", ["bert", "gpt2"]) == "Did you mean gpt2?"
    assert nearest("gtp2", ["bert", "gpt2"], "See --help.") == "Did you mean gpt2? See --help."
    assert nearest("zzz", ["bert"], "See --help.") == "See --help." and nearest("zzz", ["bert"]) == ""


def test_a_list_says_how_many_more_there_are():
    assert listed(["a", "b"], 2) == "a, b" and listed([], 2) == ""
    assert listed(["a", "b", 3], 2) == "a, b and 1 more"


def test_the_first_line_of_a_message_or_the_name_of_the_type():
    assert message_line(ValueError("\n a b\nc")) == "a b"
    assert message_line(AssertionError()) == message_line(AssertionError(" \n")) == "AssertionError"
