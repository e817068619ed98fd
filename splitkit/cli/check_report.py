"""Reports what ``--check`` found, as data and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitkit.view.console.tables import facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.testing.compare import Comparison, Difference

DIFFERENT = 4
"""The exit code if the split differs from the unsplit model."""
SHOWN = 8
"""The number of differences that the text lists."""

_STEPS = {
    "model": "the model: run again from the same seed and state, it differs from itself",
    "capture": "the capture: the graph already differs from the model",
    "split": "the split: the graph gives what the model gives, but the parts do not",
}


def check_data(found: Comparison) -> dict[str, Any]:
    """Return a comparison as data: counts, the largest difference of each kind, and the failures."""
    return {
        "same": found.same,
        "loss": list(found.loss),
        "tolerance": found.tolerance,
        "outputs": _group(found.outputs),
        "gradients": _group(found.gradients),
        "state": _group(found.state),
        "failures": [_difference(d) for d in found.failures],
        "wrong_step": found.wrong_step or None,
    }


def _group(entries: tuple[Difference, ...]) -> dict[str, Any]:
    differ = [d for d in entries if not d.bitwise]
    worst = max(differ, key=lambda d: d.relative, default=None)
    return {
        "count": len(entries),
        "bitwise": len(entries) - len(differ),
        "worst": _difference(worst) if worst else None,
    }


def _difference(entry: Difference) -> dict[str, Any]:
    return {"name": entry.name, "largest": entry.largest, "relative": entry.relative, "scale": entry.scale}


def check_text(check: dict[str, Any]) -> list[RenderableType]:
    """Return the data of `check_data` as text."""
    whole, parts = ("none" if value is None else repr(value) for value in check["loss"])
    rows = {which: _sentence(check[which]) for which in ("outputs", "gradients", "state")}
    lines: list[RenderableType] = [facts({"loss": f"{whole} whole, {parts} split", **rows})]
    lines += [
        f"differs: {bad['name']} by {bad['largest']:.3g} (scale {bad['scale']:.3g})"
        for bad in check["failures"][:SHOWN]
    ]
    if len(check["failures"]) > SHOWN:
        lines.append(f"and {len(check['failures']) - SHOWN} more")
    if step := check["wrong_step"]:
        lines.append(f"first wrong step: {_STEPS[step]}")
    return [*lines, f"same: {'yes' if check['same'] else 'no'}"]


def _sentence(group: dict[str, Any]) -> str:
    worst = group["worst"]
    text = f"{group['bitwise']} of {group['count']} bitwise equal"
    if not worst:
        return text
    return f"{text}; largest difference {worst['largest']:.3g}, relative {worst['relative']:.3g}, of {worst['name']}"
