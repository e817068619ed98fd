"""What commands say, from data made by hand."""

from __future__ import annotations

from argparse import Namespace

import pytest

from splitkit.cli.commands.run import check_data, check_text
from splitkit.cli.placement import _microbatches
from splitkit.cli.source import Source, next_command
from splitkit.testing.compare import Comparison
from splitkit.testing.differences import Difference
from splitkit.view.console import to_text


def told(*differences, loss=(2.5, None), **options):
    exact = Difference("output", 0.0, 1.0, True)
    found = Comparison((exact, *differences), (), (exact,), loss, **options)
    return [line if isinstance(line, str) else to_text(line) for line in check_text(check_data(found))]


def test_a_check_that_holds_says_so():
    facts, same = told()
    assert same == "same: yes" and "2.5 whole, none split" in facts
    assert "1 of 1 bitwise equal" in facts and "largest" not in facts


def test_a_check_that_fails_names_what_differs_and_the_step():
    wrong = [Difference(f"output[{i}]", 0.5 * (i + 1), 2.0, False) for i in range(12)]
    step = {"model": Comparison((), (), (), (None, None)), "capture": Comparison((wrong[0],), (), (), (None, None))}
    facts, *lines, where, same = told(*wrong, loss=(None, 1.0), steps=step)
    assert same == "same: no" and "none whole, 1.0 split" in facts and "1 of 13 bitwise equal" in facts
    assert "largest difference 6, relative 3, of output[11]" in " ".join(facts.split())
    assert lines[0] == "differs: output[0] by 0.5 (scale 2)" and where.startswith("first wrong step: ")
    assert lines[-1] == f"and {12 - len(lines) + 1} more"


@pytest.mark.parametrize(
    ("spec", "plan", "more", "expected"),
    [
        ("gpt2", "a plan.json", {}, "splitkit run 'a plan.json' --check"),
        ("net.py:make", "p.json", {}, "splitkit run p.json --model net.py:make --check"),
        ("gpt2", "p", {"ranks": 4, "schedule": "1f1b"}, "splitkit train p --nproc 4 --schedule 1f1b --check"),
        ("gpt2", None, {}, None),
        ("gpt2", "/dev/stdout", {}, None),
    ],
)
def test_the_command_that_runs_a_plan(spec, plan, more, expected):
    assert next_command(Source(spec, {}), plan, **more) == expected


@pytest.mark.parametrize(
    ("given", "stages", "expected"),
    [((None, "1,2", "1f1b"), 4, 8), ((3, "1,2", "1f1b"), 4, 3), ((None, None, "1f1b"), 4, None),
     ((None, "1,2", None), 4, None), ((None, "1,2", "1f1b"), None, None)],
)  # fmt: skip
def test_with_replicas_there_are_two_microbatches_a_device(given, stages, expected):
    args = Namespace(**dict(zip(("microbatches", "replicas", "schedule"), given, strict=True)))
    assert _microbatches(args, stages) == expected
