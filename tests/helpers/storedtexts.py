"""Whole texts that the library writes, pictures and data of pages among them, beside the stored ones.

``SPLITKIT_STORE=1 python -m pytest FILE`` stores what a file of tests makes. Read the difference before you commit it.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

STORED = Path(__file__).parents[1] / "stored"


def assert_stored(name: str, text: str) -> None:
    """Assert that a text is the stored one, the file ``tests/stored/<name>``."""
    path = STORED / name
    if os.environ.get("SPLITKIT_STORE"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def as_lines(data: Any) -> str:
    """JSON with one line for each item of the outer two levels, and six digits of each number; no lines of Python."""
    rows = []
    for key, value in data.items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        inner = [(name, one) for name, one in inner if (key, name) != ("ops", "sources")]
        rows += [
            f"{key}.{name}: {json.dumps(_rounded(one), ensure_ascii=False, sort_keys=True)}" for name, one in inner
        ]
    return "\n".join(rows) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def assert_stored_row(name: str, key: str, row: Any) -> None:
    """Assert that a row of the table ``tests/stored/<name>`` is as it is stored, with six digits of each number."""
    path = STORED / name
    found = json.loads(json.dumps(_rounded(row)))
    if os.environ.get("SPLITKIT_STORE"):
        table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted((table | {key: found}).items())]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    assert found == _table(path, path.stat().st_mtime_ns)[key]


@cache
def _table(path: Path, written: int) -> dict[str, Any]:
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table
