"""``splitkit view``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitkit.cli import main


def test_a_plan_is_written_as_a_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    given = [
        "--size",
        "layers=1",
        "--stages",
        "2",
        "--costs",
        "roofline:h100",
        "--schedule",
        "1f1b",
        "--memory",
        "1GiB",
    ]
    assert main(["view", "bert", *given, "-o", str(page)]) == 0
    assert "wrote" in capsys.readouterr().out and '"schema":"splitkit.ladder/2"' in page.read_text("utf-8")
    assert main(["view", "bert", "--size", "layers=1", "--stages", "2", "-o", str(page), "--memory", "much"]) == 2
    assert "SK302" in capsys.readouterr().err


SMALL = ["--size", "layers=1,width=32,heads=2"]


@pytest.mark.parametrize(
    "words, inside",
    [
        (["plan", "gpt2", "--stages", "2"], '"schema":"splitkit.ladder/2"'),
        (["plan", "gpt2", "--devices", "2xh100", "--schedule", "1f1b"], '"microbatches":4'),
        (["plan", "gpt2", "--what", "fwd-bwd", "--policy", "SaveAll()"], "saved for backward"),
        (["sweep", "gpt2", "--points", "3"], "frontier of gpt2"),
        (["sweep", "gpt2", "--stages", "2", "--microbatches", "2", "--schedules", "gpipe"], "peak of the fullest rank"),
        (["profile", "gpt2", "--predict", "--forward-only"], "bytes alive"),
    ],
)
def test_other_commands_write_pages_too(tmp_path, data, words, inside):
    page = tmp_path / "page.html"
    code, found = data(*words, *SMALL, "--view", page)
    assert code == 0 and found["command"] == words[0]
    text = page.read_text("utf-8")
    assert text.startswith("<!doctype html>") and inside in text


def test_a_page_and_a_plan_in_one_file_are_refused(tmp_path, call):
    one = tmp_path / "one.json"
    code, _, error = call("plan", "gpt2", "--stages", "2", "-o", one, "--view", one)
    assert code == 2 and "SK603" in error and not one.exists()
    code, _, error = call("sweep", "gpt2", "--view", tmp_path / "none" / "page.html")
    assert code == 1 and "SK504" in error
    code, _, error = call("profile", "gpt2", "--stages", "2", "--ranks", "2", "--view", tmp_path / "page.html")
    assert code == 2 and "SK601" in error and "splitkit view" in error


def test_a_plan_that_is_no_ladder_is_a_still_page_that_says_why(tmp_path, call):
    page, plan = tmp_path / "page.html", tmp_path / "plan.json"
    words = ["--policy", "ByName({'transformer.h.*': 0})", "-o", plan, "--view", page]
    code, out, _ = call("plan", "gpt2", *SMALL, *words)
    assert code == 0 and f"wrote {page}" in out and json.loads(plan.read_text())
    assert "No picture" in page.read_text("utf-8")


SMALL = ["--size", "layers=1,width=32,heads=2", "--size", "vocab=64,seq=8"]


def test_two_plans_of_a_model_are_drawn_beside_each_other(tmp_path, capsys):
    one, two, page = (str(tmp_path / name) for name in ("one.json", "two.json", "page.html"))
    for path, stages in ((one, "2"), (two, "3")):
        assert main(["plan", "gpt2", *SMALL, "--stages", stages, "-o", path]) == 0
    assert main(["view", one, "--beside", two, "-o", page]) == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    data = json.loads(text.partition('id="splitkit-data">')[2].partition("</script>")[0])
    assert len(data["parts"]) == 2 and len(data["beside"]["parts"]) == 3
    (tmp_path / "page.html").unlink()
    assert main(["view", one, "--beside", str(tmp_path / "none.json"), "-o", page]) == 1
    assert "SK504" in capsys.readouterr().err and not (tmp_path / "page.html").exists()


def test_a_plan_of_forward_and_backward_is_drawn(tmp_path, capsys):
    plan, first, again = (str(tmp_path / name) for name in ("plan.json", "first.html", "again.html"))
    words = ["plan", "gpt2", *SMALL, "--what", "fwd-bwd", "--policy", "SaveAll()", "-o", plan, "--view", first]
    assert main(words) == 0
    assert main(["view", plan, "-o", again, "--memory", "1GiB"]) == 0
    for name in (first, again):
        assert '"schema":"splitkit.halves/1"' in Path(name).read_text("utf-8")
    assert main(["view", plan, "-o", again, "--beside", plan]) == 2
    assert "--beside is for plans in stages" in capsys.readouterr().err
