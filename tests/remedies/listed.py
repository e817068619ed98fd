"""Remedies that no test carries out, each with the reason."""

from __future__ import annotations

LISTED: dict[tuple[str, str], str] = {
    # runtime
    ("SK806", "{...} install torch 2.13."): "installs another version of torch",
    ("SK802", "pip install 'transformers>=5'"): "installs a package",
    ("SK902", "pip install anywidget"): "installs a package",
}
"""(code, first words of the remedy) -> why it cannot be carried out mechanically."""
