"""Reads the lists and dictionaries in texts of other tools, without running them."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from splitkit.errors import FileError


def no_such_text(tool: str, reason: str, example: str) -> FileError:
    """Return the refusal of a text that is not in a format (SK524)."""
    return FileError("SK524", f"this text is not for {tool}: {reason}", f"It looks like this: {example}")


def whole_numbers(text: str) -> tuple[int, ...] | None:
    """Return the numbers of ``"9, 8, 8"``; None if the text is anything else."""
    words = [word.strip() for word in text.strip().strip("\"'[]()").split(",")]
    if not all(re.fullmatch(r"[0-9]{1,6}", word) for word in words):
        return None
    return tuple(map(int, words))


def json_object(text: str) -> dict[str, Any] | None:
    """Return the object of a JSON text, or of a Python dictionary of constants; None if the text is neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            found = parse(text.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(found, dict) and all(isinstance(key, str) for key in found):
            return found
    return None


def json_list(text: str) -> list[Any] | None:
    """Return a list of constants, as Python or JSON writes it; None for any other text."""
    found = literal(text.strip())
    return found if isinstance(found, list) else None


def literal(text: str) -> Any:
    """Return the value of a Python text of constants; None for any other."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None


def python_values(text: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, expression) for each assignment and keyword argument of a Python text; nothing if it is none."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
                yield name, node.value
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value
