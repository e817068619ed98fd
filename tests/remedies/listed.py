"""Remedies that no test carries out, each with the reason."""

from __future__ import annotations

LISTED: dict[tuple[str, str], str] = {
    ("SK902", "pip install anywidget"): "installs a package",
}
"""(code, first words of the remedy) -> why it cannot be carried out mechanically."""
