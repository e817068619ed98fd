"""Remedies that tests carry out: the situation, the refusal with the remedy as written, then the remedy itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from splitkit.errors import SplitError


@dataclass(frozen=True)
class Remedy:
    """A refusal that names a remedy, and that remedy carried out.

    Attributes:
        code: the code of the refusal.
        told: the remedy, or its first words, as the source has it, with ``{...}`` for what is only known at run time.
        fails: makes the situation, and is refused.
        works: the same with the remedy carried out; one function for each alternative that the remedy names. Returns
            ``False`` if the outcome is not the one promised.
    """

    code: str
    told: str
    fails: Callable[[], Any]
    works: Callable[[], Any] | tuple[Callable[[], Any], ...]

    def carry_out(self) -> None:
        with refusal(self.code, self.told):
            self.fails()
        for works in self.works if isinstance(self.works, tuple) else (self.works,):
            assert works() is not False, f"{self.told!r} was carried out, and the outcome is another than promised"


@contextmanager
def refusal(code: str, told: str) -> Iterator[pytest.ExceptionInfo[SplitError]]:
    """Expect a refusal whose remedy begins with ``told``."""
    with pytest.raises(SplitError) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    assert fits(told, caught.value.remedy), f"{caught.value.remedy!r} does not begin with {told!r}"


def fits(told: str, remedy: str) -> bool:
    """Return whether a remedy begins with these words, ``{...}`` standing for any."""
    return re.match(re.escape(told).replace(re.escape("{...}"), ".*?"), remedy, re.S) is not None


def carried_out(folder: Path = Path(__file__).parent) -> set[tuple[str, str]]:
    """Return (code, first words) of every `Remedy` and `refusal` in a folder's test files, without running them."""
    return {
        (call.args[0].value, call.args[1].value)
        for path in folder.glob("test_*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("Remedy", "refusal")
        and len(call.args) > 1
        and all(isinstance(argument, ast.Constant) for argument in call.args[:2])
    }
