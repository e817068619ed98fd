"""``splitkit view``."""

from __future__ import annotations

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
    assert "wrote" in capsys.readouterr().out and '"schema":"splitkit.ladder/1"' in page.read_text("utf-8")
    assert main(["view", "bert", "--size", "layers=1", "--stages", "2", "-o", str(page), "--memory", "much"]) == 2
    assert "SK302" in capsys.readouterr().err
