"""Tables that truncate nothing, also on a narrow terminal; and the table of ranks."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from splitkit import simulate_schedule
from splitkit.errors import PolicyError
from splitkit.pipeline.run import rows_of_parts
from splitkit.pipeline.stage_costs import StageCosts
from splitkit.view.console import to_text
from splitkit.view.data.report import rank_table
from splitkit.view.tables import facts, table

STAGE = StageCosts(1.0, 1.0, 1.0, saved_bytes=2**20, temporary_bytes=2**10, parameter_bytes=2**30)


def titles(made):
    return [column.header for column in made.columns]


def test_nothing_is_truncated_on_a_narrow_terminal():
    name, number = "transformer_block_of_the_encoder", "123456789"
    made = table(("name", "bytes"), [(name, number)], ["bytes"], "all", total=("sum", number))
    out = io.StringIO()
    Console(file=out, width=24).print(made)
    letters = "".join(c for c in out.getvalue() if c.isalnum() or c == "_")
    assert "…" not in out.getvalue() and all(c in letters for c in name) and len(letters) >= len(name) + 2 * len(number)
    assert to_text(made).splitlines()[-1].split() == ["sum", number]
    assert to_text(facts({"a": 1, "long name": 2})).splitlines()[1].split() == ["long", "name", "2"]


def test_text_has_no_escapes_where_jupyter_forces_colour(monkeypatch):
    made = table(("name", "bytes"), [("part", "12")], ["bytes"], "all")
    expected = to_text(made)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert to_text(made) == expected and "\x1b" not in expected


@pytest.mark.parametrize("width", [80, 100, 120])
def test_columns_that_matter_less_go_where_a_terminal_is_narrow(width):
    titles = ("part", "modules", *(f"bytes of kind {i}" for i in range(8)), "share")
    rows = [(str(k), "transformer.h.0-3, transformer.h.4 (12 of 37)", *["123.45 MiB"] * 8, "12.5%") for k in range(3)]
    spare = [f"bytes of kind {i}" for i in range(8)]
    made = table(titles, rows, titles[2:], "a note", least={"modules": 24}, total=rows[0], spare=spare)
    out = io.StringIO()
    Console(file=out, width=width).print(made)
    lines = out.getvalue().splitlines()
    head = next(line for line in lines if "part" in line)
    shown = [name for name in spare if name in head]
    assert max(map(len, lines)) <= width and "…" not in out.getvalue() and "share" in head
    assert shown == spare[len(spare) - len(shown) :] and 0 < len(shown) < len(spare)  # the first went first
    said = f"(too narrow for: {', '.join(spare[: len(spare) - len(shown)])})"
    assert " ".join(out.getvalue().split()).endswith(said)
    assert out.getvalue().count("123.45 MiB") == len(shown) * 4 and out.getvalue().count("12.5%") == 4
    assert all(name in to_text(made) for name in titles)  # off a terminal all are there


def test_ranks_of_a_simulated_step():
    run = simulate_schedule([STAGE, STAGE], "1f1b", 4)
    assert titles(rank_table(run)) == [
        "rank", "stages", "busy", "bubble", "in flight", "fixed", "saved", "temporary", "peak",
    ]  # fmt: skip
    made = rank_table(run, devices=["h200", "l4"], memory=["80GiB", "24GiB"])
    assert titles(made)[1] == "device" and titles(made)[-1] == "memory"
    assert "l4" in to_text(made) and "24.00 GiB" in to_text(made)
    assert "memory" not in titles(rank_table(run, memory="80GiB"))  # the same of all
    for wrong in ("much", ["1GiB"] * 3):
        with pytest.raises(PolicyError, match="SK302: rank_table"):
            rank_table(run, memory=wrong)
    peaks = [row.cells(rank)["peak"] for rank, row in enumerate(run.rows())]
    assert all(peak in line for peak, line in zip(peaks, str(run).splitlines()[2:], strict=True))


def test_ranks_of_parts_without_a_schedule():
    first, second = rows_of_parts(["a", "b"], [2**31, None], {(0, 0): STAGE, (0, 1): STAGE})
    assert (first.stages, first.busy, first.nbytes) == (("0 0", "0 1"), 6.0, (2**31, 2**21, 0, 2**10))
    assert first.used > 1 and second.stages == () and second.nbytes == (0, 0, 0, 0)
    text = to_text(rank_table([first, second]))
    assert "none" in text and "no limit" in text and "bubble" not in text


def test_names_stay_where_nobody_said_what_a_narrow_terminal_leaves_out():
    """A column of text may be folded, but not to nothing; numbers leave from the right instead, and are listed."""
    numbers = [f"number {i}" for i in range(6)]
    made = table(("name", *numbers), [("transformer", *["123456789"] * 6)], numbers)
    Console(file=(out := io.StringIO()), width=50).print(made)
    assert "transformer" in out.getvalue() and "(too narrow for: number 5, number 4" in out.getvalue()
    assert "number 0" in out.getvalue() and "…" not in out.getvalue()
