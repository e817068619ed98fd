"""Writes a policy as an expression, such as ``Stages(4, schedule='1f1b')``, for plans and their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from splitkit.price_record import printable

MOST_TEXT = 2000
"""The length of the longest expression that is kept."""
_PLAIN = (int, float, str, bool, type(None))


def policy_text(policy: object) -> str:
    """Return the expression that makes a policy again; empty if a parameter is not a literal, as a function is not.

    Parameters that have their default are left out. A policy may give its expression itself, as an attribute
    ``expression``.
    """
    own = getattr(policy, "expression", None)
    text = own if isinstance(own, str) else _call(policy)
    return text if text is not None and text == printable(text, MOST_TEXT) else ""


def _call(policy: object) -> str | None:
    """Return the call of a policy's class; ``None`` if it cannot be written."""
    if not is_dataclass(policy) or isinstance(policy, type) or not hasattr(policy, "assign"):
        return None
    words: list[str] = []
    for number, field in enumerate(fields(policy)):
        value = getattr(policy, field.name)
        if not field.init or _is_default(field, value):
            continue
        text = _literal(value)
        if text is None:
            return None
        words.append(text if len(words) == number == 0 else f"{field.name}={text}")
    return f"{type(policy).__name__}({', '.join(words)})"


def _is_default(field: Field[Any], value: object) -> bool:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    return type(value) is type(default) and bool(value == default)


def _literal(value: object) -> str | None:
    """Return the text of a literal, or of a policy, device or link that is a parameter."""
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) in (list, tuple):
        texts = [_literal(item) for item in value]  # type: ignore[attr-defined]
        if None in texts:
            return None
        inner = ", ".join(filter(None, texts))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(texts) == 1 else ''})"
    if isinstance(value, Mapping):
        pairs = [(_literal(key), _literal(item)) for key, item in value.items()]
        if any(None in pair for pair in pairs):
            return None
        return f"{{{', '.join(f'{key}: {item}' for key, item in pairs)}}}"
    own = getattr(value, "expression", None)
    return own if isinstance(own, str) else _call(value)
