"""One plan file, read by every command: the same seconds, bytes and devices as in the plan and its table."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout

import pytest
from campaigns import these_first

from splitkit import cli

MODEL = ["llama", "--size", "layers=3,width=64,heads=2", "--size", "vocab=512,seq=16,batch=2"]
PLANS = {
    "devices that differ": ["--devices", "h100,l4", "--links", "pcie4"],
    "training on devices that differ": ["--devices", "h100,l4", "--optimizer", "adam"],
    "inference": ["--devices", "2xh100"],
    "training": ["--devices", "3xl4", "--schedule", "1f1b", "--microbatches", "6"],
    "training again": ["--devices", "3xl4", "--schedule", "1f1b", "--microbatches", "6", "--recompute"],
}


FIRST = ["devices that differ", "training"]


def told(*words):
    with redirect_stdout(io.StringIO()) as out:
        assert cli.main([*words, "--json"]) == 0
    return json.loads(out.getvalue())


@pytest.mark.parametrize("name", these_first(FIRST, [name for name in PLANS if name not in FIRST]))
def test_commands_that_read_a_plan_say_what_it_says(name, tmp_path):
    options = PLANS[name]
    file = str(tmp_path / "p.json")
    plan = told("plan", *MODEL, *options, "-o", file, "--view", str(tmp_path / "a.html"))
    ranks, step = plan["ranks"], plan["step"]
    figures = told("explain", file)["explanation"]["figures"]
    form = "torchtitan" if "--recompute" in options else "torch"  # which says what is computed again
    exported = told("export", file, "--to", form, *(["--schedule", "1f1b", "--microbatches", "6"] if step else []))
    told("view", file, "-o", str(tmp_path / "b.html"))
    kept = json.loads((tmp_path / "p.json").read_text())
    purpose = "training" if plan["placement"]["optimizer"] else "inference"
    assert kept["policy"] and kept["request"]["purpose"] == purpose
    assert sorted(figures["peaks"]) == sorted(rank["memory"]["peak"] for rank in ranks)
    if step is None:
        assert sorted(figures["loads"].values()) == sorted(rank["load"] for rank in ranks)
        assert exported["rounding"]["before"]["load"] == pytest.approx(figures["bottleneck"])
        busy = {str(rank["stages"][0]): rank["busy"] for rank in ranks}
        shares = {row["part"]: row["share"] for row in plan["report"]["parts"]}
        assert {key: seconds / sum(busy.values()) for key, seconds in busy.items()} == pytest.approx(shares)
    else:
        assert figures["step"] == step["seconds"] == pytest.approx(exported["rounding"]["before"]["step"])
        (row,) = told("sweep", file, "--microbatches", "6", "--schedules", "1f1b")["rows"]
        assert (row["seconds"], row["peak"]) == (step["seconds"], max(figures["peaks"]))
    texts = ((tmp_path / name).read_text("utf-8") for name in ("a.html", "b.html"))
    first, second = (json.loads(re.search(r'id="splitkit-data">(.*?)</script>', text, re.S)[1]) for text in texts)
    assert {name for name in first if first[name] != second[name]} == {"plan"}  # the file names its model
