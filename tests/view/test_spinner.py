"""What is shown on a terminal while something takes long."""

from __future__ import annotations

import io
import sys

import pytest

from splitkit.view.console import show_spinner


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("seconds", [None, 10.0])
def test_a_terminal_shows_what_is_done(seconds, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    with show_spinner("planning [4] stages", seconds):
        pass
    shown = sys.stderr.getvalue()
    assert "planning [4] stages" in shown and ("(at most 10 s)" in shown) == (seconds is not None)


def test_nothing_off_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with show_spinner("planning", 10.0):
        pass
    assert sys.stderr.getvalue() == ""
