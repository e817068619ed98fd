"""``splitkit view``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from splitkit.cli import main
from splitkit.units import duration, size

SMALL = ["--size", "layers=1,width=32,heads=2", "--size", "vocab=64,seq=8"]


def test_a_plan_is_written_as_a_page(tmp_path, capsys):
    page = tmp_path / "page.html"
    given = [
        *SMALL,
        "--stages",
        "2",
        "--costs",
        "roofline:h100",
        "--schedule",
        "1f1b",
        "--memory",
        "1GiB",
    ]
    assert main(["view", "gpt2", *given, "-o", str(page)]) == 0
    said = f"wrote {page} ({size(page.stat().st_size)}); open it in a browser\n"
    assert capsys.readouterr().out.endswith(said) and '"schema":"splitkit.ladder/2"' in page.read_text("utf-8")
    assert main(["view", "gpt2", *SMALL, "--stages", "2", "-o", str(page), "--memory", "much"]) == 2
    assert "SK302" in capsys.readouterr().err


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


def test_a_picture_is_written_as_one_by_its_name(tmp_path, call):
    plan, picture, still = tmp_path / "plan.json", tmp_path / "page.svg", tmp_path / "page.png"
    call("plan", "gpt2", *SMALL, "--stages", "2", "-o", plan)
    assert call("view", plan, "-o", picture)[0] == 0 and picture.read_text("utf-8").startswith("<svg ")
    call("plan", "gpt2", *SMALL, "--what", "fwd-bwd", "--memory", "50%", "-o", plan)
    assert call("view", plan, "-o", picture)[0] == 0 and "saved for backward" in picture.read_text("utf-8")
    code, _, error = call("view", plan, "-o", still)
    assert code == 2 and "Name it page.html; or page.svg for a still picture." in error and not still.exists()


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


def test_two_plans_of_a_model_are_drawn_beside_each_other(tmp_path, capsys):
    one, two, page = (str(tmp_path / name) for name in ("one.json", "two.json", "page.html"))
    for path, stages in ((one, "2"), (two, "3")):
        assert main(["plan", "gpt2", *SMALL, "--stages", stages, "-o", path]) == 0
    assert main(["view", one, "--beside", two, "-o", page]) == 0
    text = (tmp_path / "page.html").read_text("utf-8")
    data = json.loads(text.partition('id="splitkit-data">')[2].partition("</script>")[0])
    assert len(data["parts"]) == 2 and len(data["beside"][0]["parts"]) == 3
    assert main(["view", one, "--beside", two, "--beside", one, "-o", page]) == 0
    assert '"parts":["0","1"]' in (tmp_path / "page.html").read_text("utf-8").partition('"beside":[')[2]
    assert main(["view", one, "--beside", two, "--beside", one, "-o", two]) == 2  # it would overwrite an input
    (tmp_path / "page.html").unlink()
    capsys.readouterr()
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


def page_data(path):
    return json.loads(path.read_text("utf-8").partition('id="splitkit-data">')[2].partition("</script>")[0])


STEP = ["--schedule", "1f1b", "--microbatches", "8"]


def test_the_page_of_a_plan_file_shows_the_step_of_its_note(tmp_path, call):
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    assert call("plan", "gpt2", *SMALL, "--devices", "2xh100", *STEP, "-o", plan)[0] == 0
    assert call("view", plan, "-o", page, *STEP, "--memory", "80GiB")[0] == 0
    data = page_data(page)
    run = data["run"]
    assert f"step {duration(run['seconds'])}, bubble {run['bubble']:.1%}" in data["note"]
    assert (data["unit"], run["unit"]) == ("s", "s") and json.loads(plan.read_text())["request"]["links"] == "nvlink4"
    assert call("view", plan, "-o", page, *STEP, "--links", "none")[0] == 0
    assert page_data(page)["run"]["seconds"] < run["seconds"]


def test_a_schedule_of_a_plan_without_times_is_refused_until_prices_are_given(tmp_path, call):
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    assert call("plan", "gpt2", *SMALL, "--stages", "2", "-o", plan)[0] == 0
    for older in (False, True):
        if older:
            data = json.loads(plan.read_text())
            del data["prices"]
            plan.write_text(json.dumps(data))
        code, _, error = call("view", plan, "-o", page, *STEP)
        assert code == 1 and "SK903" in error and "--costs roofline:h100" in error and not page.exists()
    assert call("view", plan, "-o", page)[0] == 0 and page_data(page)["unit"] == "TFLOP"
    assert call("view", plan, "-o", page, *STEP, "--costs", "roofline:h100", "--training")[0] == 0
    assert page_data(page)["run"]["unit"] == "s" == page_data(page)["unit"]
    code, _, error = call("view", plan, "-o", page, "--costs", "roofline:h1000")
    assert code == 1 and "SK321" in error
    code, _, error = call("run", plan, "--costs", "roofline:h100")
    assert code == 2 and "SK601" in error


@pytest.mark.parametrize("costs", [[], ["--costs", "flops"], ["--costs", "unit"]])
def test_a_schedule_without_times_is_refused_before_the_model_is_made(tmp_path, call, costs, no_work):
    page = tmp_path / "page.html"
    words = ["gpt2", "--stages", "2", *STEP, *costs]
    for command in (["view", *words, "-o", page], ["plan", *words, "--view", page], ["plan", *words, "--trace", page]):
        code, _, error = call(*command)
        assert code == 1 and "SK903" in error and ("nodes" if "unit" in costs else "FLOPs") in error


def test_a_measured_plan_is_drawn_with_what_was_measured(tmp_path, call):
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    assert call("plan", "gpt2", *SMALL, "--stages", "2", "--costs", "measured", "--training", "-o", plan)[0] == 0
    prices = json.loads(plan.read_text())["prices"]
    assert prices["kind"] == "table" and prices["name"].startswith("measured on cpu")
    assert call("view", plan, "-o", page, *STEP)[0] == 0
    row = next(sort for sort in page_data(page)["ops"]["sorts"] if "linear" in sort[0] or "mm" in sort[0])
    assert any(abs(row[3] - seconds) <= 1e-6 * seconds for seconds in prices["table"].values() if seconds)


def test_a_joint_plan_keeps_its_prices_in_a_file(tmp_path, call):
    plan, page = tmp_path / "plan.json", tmp_path / "page.html"
    words = ["--what", "fwd-bwd", "--policy", "SaveAll()", "--costs", "roofline:h100", "-o", plan]
    assert call("plan", "gpt2", *SMALL, *words)[0] == 0
    assert call("view", plan, "-o", page)[0] == 0 and page_data(page)["unit"] == "s"
    code, _, error = call("view", plan, "-o", page, "--costs", "unit")
    assert code == 2 and "SK601" in error
