"""Two tiers of tests, and what was not tested. Hooks for ``conftest.py``.

The default tier is what runs without ``-m``; campaigns run with ``-m campaign``. A test whose setup or call takes more
than `MOST` seconds of processor time, its ranks included, stands in ``tests/slow_tests.toml``: with a reason if it
stays in the default tier, else as a campaign. A whole run of the default tier names slow tests without an entry, and
fails where one is very slow.

Seconds are those of the machine on which the file was written: the tests that stay tell how much slower this one is.
The first test of a file, or the first after another file, is not judged: it pays for what the tests of the file share.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import pytest

MOST = 0.8
"""Seconds of processor time."""

TOLD, FAILS = 2, 10
"""Times `MOST`: a test without an entry is named from twice as much on, and fails the run from ten times on. Which of
several tests makes what they share depends on the order and on the number of processes, and must fail none of them.
"""

ENTRIES = Path(__file__).parents[1] / "slow_tests.toml"
ON_RANKS = [0.0]
"""Seconds of processes that this one does not wait for itself: `launch` adds what its ranks took."""


def slow_tests():
    """``({test: its seconds} of those that stay, campaigns)``; a name without ``[`` stands for all its cases."""
    found = tomllib.loads(ENTRIES.read_text())
    stay = {name: seconds for group in found["stay"] for name, seconds in group["tests"].items()}
    return stay, {f"{file}::{test}" for file, tests in found["campaigns"].items() for test in tests}


def function_of(test):
    return test.split("[")[0]


def judged(measured, stay, campaigns):
    """``[(test, its seconds as on the machine of the file)]`` of tests that take too long and have no entry.

    Args:
        measured: ``[(test, whether it is the first of its file in its process, seconds)]``.
    """
    slowest = defaultdict(float)
    for test, first, seconds in measured:
        slowest[test] = max(slowest[test], 0.0 if first else seconds)
    slower = max(1.0, median([slowest[name] / seconds for name, seconds in stay.items() if slowest.get(name)] or [1.0]))
    known = stay.keys() | campaigns
    return sorted(
        (test, seconds / slower)
        for test, seconds in slowest.items()
        if seconds / slower > TOLD * MOST and not {test, function_of(test)} & known
    )


class Tier:
    """A plugin that measures tests where they run, and judges them where their reports arrive."""

    def __init__(self, config):
        self.config = config
        self.collects_all = config.args_source is config.ArgsSource.TESTPATHS and not config.option.keyword
        self.file: Path | None = None
        self.measured, self.skipped = [], Counter()

    @property
    def whole(self):
        """Whether this is the default tier, all of it, in the process that receives the reports."""
        tier = self.config.option.markexpr == "not campaign" and not hasattr(self.config, "workerinput")
        return self.collects_all and tier

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        _, campaigns = slow_tests()
        for item in items:
            if {item.nodeid, function_of(item.nodeid)} & campaigns:
                item.add_marker(pytest.mark.campaign)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        item.first_of_file, self.file = item.path != self.file, item.path
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        return (yield from self._measured(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        return (yield from self._measured(item))

    @staticmethod
    def _measured(item):
        began = _seconds()
        try:
            return (yield)
        finally:
            item.seconds = _seconds() - began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item):
        report = yield
        report.seconds = 0.0 if report.when == "teardown" else getattr(item, "seconds", 0.0)
        report.first_of_file = item.first_of_file
        return report

    def pytest_runtest_logreport(self, report):
        self.measured.append((report.nodeid, report.first_of_file, report.seconds))
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, session):
        if hasattr(self.config, "workerinput"):
            return
        if self.config.option.times:
            Path(self.config.option.times).write_text("".join(json.dumps(one) + "\n" for one in self.measured))
        late = judged(self.measured, *slow_tests()) if self.whole and session.exitstatus == 0 else []
        if any(seconds > FAILS * MOST for _, seconds in late):
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter):
        if self.whole and (found := judged(self.measured, *slow_tests())):
            terminalreporter.section("too slow for the default tier", red=True)
            for name, seconds in found:
                terminalreporter.write_line(f"{name} takes {seconds:.1f} s of processor time")
            terminalreporter.write_line(f"Make it faster, or give it an entry in tests/{ENTRIES.name}.")
        if self.skipped:
            terminalreporter.section("not tested here")
            for reason, count in self.skipped.most_common():
                terminalreporter.write_line(f"{count:>5} {'test ' if count == 1 else 'tests'}  {reason}")


def _seconds():
    """Of this process, of those that it waited for, and of its ranks."""
    return sum(os.times()[:4]) + ON_RANKS[0]
