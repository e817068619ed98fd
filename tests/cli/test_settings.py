"""Defaults of options: ``splitkit.toml`` < ``SPLITKIT_...`` < the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitkit import cli
from splitkit.cli.parser import make_parser
from splitkit.cli.settings import apply_settings
from splitkit.errors import UsageError


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Write a file and variables, and parse a command below the file's folder."""
    below = tmp_path / "some" / "where"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)

    def run(words, toml="", **variables):
        (tmp_path / "splitkit.toml").write_text(toml)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        parser = make_parser()
        used = apply_settings(parser, words.split())
        return parser.parse_args(words.split()), used

    return run


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(read):
    toml = 'links = "nvlink4"\nmicrobatches = 4\n[plan]\nstages = 3\ncosts = "roofline:h100"\n[view]\nlinks = "pcie5"'
    args, used = read("plan gpt2", toml)
    assert (args.links, args.microbatches, args.stages, args.costs) == ("nvlink4", 4, 3, "roofline:h100")
    assert len(used) == 4 and all("splitkit.toml" in text for text in used)
    args, _ = read("view plan.json -o page.html", toml)
    assert args.links == "pcie5", "what is said of one command counts more"
    args, used = read("plan gpt2 --links pcie4", toml, SPLITKIT_LINKS="nvlink3", SPLITKIT_PLAN_STAGES="5")
    assert (args.links, args.microbatches, args.stages) == ("pcie4", 4, 5)
    assert "stages = 5 (SPLITKIT_PLAN_STAGES)" in used and not any("links" in text for text in used)
    args, _ = read("view plan.json -o page.html", toml)
    assert args.links == "nvlink3", "the variable wins over the file, also over its table"
    assert read("view plan.json -o page.html", toml, SPLITKIT_VIEW_LINKS="none")[0].links == "none"
    assert read("run plan.json", toml)[0].stages is None, "[plan] is for plan only"


def test_what_is_nearer_or_of_one_command_counts_more(read):
    assert read("plan gpt2", SPLITKIT_PLAN_STAGES="5", SPLITKIT_STAGES="3")[0].stages == 5
    args, used = read("plan gpt2 --links=pcie4", "links = 'nvlink4'")
    assert (args.links, [text for text in used if "links" in text]) == ("pcie4", [])
    Path("splitkit.toml").write_text("microbatches = 7")
    assert read("plan gpt2", "microbatches = 3")[0].microbatches == 7


def test_a_variable_may_have_the_name_of_an_option_and_of_a_command(read):
    assert read("plan gpt2", SPLITKIT_VIEW="page.html")[0].view == "page.html"


def test_a_default_stands_for_an_option_that_must_be_given(read):
    assert read("export plan.json", SPLITKIT_TO="torch")[0].to == "torch"


def test_flags_lists_and_several_values(read):
    toml = 'recompute = true\n[plan]\nreplicas = [1, 2]\nsize = "layers=4"'
    args, _ = read("plan gpt2", toml, SPLITKIT_TRAINING="1")
    assert args.recompute is True and args.replicas == (1, 2) and args.training is True and args.size == [{"layers": 4}]
    assert not read("plan gpt2", "", SPLITKIT_TRAINING="false")[0].training


def test_an_empty_value_removes_a_default_and_other_variables_are_left_alone(read):
    args, used = read("plan gpt2", "links = 'nvlink4'", SPLITKIT_LINKS="", SPLITKIT_STORE="file:///x")
    assert args.links is None and used == []


def test_a_default_gives_way_to_an_option_that_excludes_it(read):
    args, used = read("plan gpt2 --policy RoundRobin(2)", "stages = 4")
    assert (args.stages, args.policy, used) == (None, "RoundRobin(2)", [])


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("link = 'nvlink4'", "link is not an option of any command"),
        ("[plan]\nnproc = 2", "nproc is not an option of splitkit plan"),
        ("[plam]\nstages = 2", "is not a command"),
        ("stages = 'many'", "stages = 'many'"),
        ("recompute = 'maybe'", "recompute = 'maybe'"),
        ("[plan]\nwhat = 'all'", "what = 'all'"),
        ("[plan]\nsize = {layers = 4}", "size = "),
        ("links", "cannot be read"),
        ("json = true", "json is not an option"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(read, toml, text):
    with pytest.raises(UsageError, match="SK604") as error:
        read("plan gpt2", toml)
    assert text in error.value.reason and "splitkit.toml" in error.value.reason and error.value.remedy


def test_a_wrong_call_names_the_defaults_that_were_in_effect(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "splitkit.toml").write_text('tokens = 4\n[plan]\npolicy = "RoundRobin(2)"')
    assert cli.main(["plan", "gpt2", "--size", "layers=1,width=16,heads=2", "--size", "vocab=20,seq=8", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert "tokens = 4" in error["remedy"] and str(tmp_path) in error["remedy"]
