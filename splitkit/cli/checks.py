"""What ``--check`` found, as data and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitkit.view.tables import facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.testing.compare import Comparison, Difference

DIFFERENT = 4
"""The exit code when the two are not the same."""
SHOWN = 8


_STEPS = {
    "model": "the model, which differs from itself when it runs again from the same seed and state",
    "capture": "the capture: the graph that was split differs from the model already",
    "split": "the split: the graph that was split gives what the model gives",
}


def check_data(found: Comparison) -> dict[str, Any]:
    """A comparison as data: counts, the worst of each kind, and what failed."""
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
    """The data of `check_data` for people."""
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
        lines.append(f"which step: {_STEPS[step]}")
    return [*lines, f"same: {'yes' if check['same'] else 'no'}"]


def _sentence(group: dict[str, Any]) -> str:
    worst = group["worst"]
    text = f"{group['bitwise']} of {group['count']} bitwise equal"
    if not worst:
        return text
    return f"{text}; largest difference {worst['largest']:.3g}, relative {worst['relative']:.3g}, of {worst['name']}"
