"""Reports what ``--check`` found, as data and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from splitkit.view.tables import facts

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.testing.compare import Comparison
    from splitkit.testing.differences import Difference

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


_REFERENCES = {
    "module": "the module that the factory makes",
    "graph": "the captured graph, since the module has other inputs or parameters than the graph",
}


def pipeline_check_rows(check: dict[str, Any]) -> dict[str, str]:
    """Return what ``splitkit train --check`` found, as rows of a table: title -> text."""
    differ = f"loss {check['loss']:.1e}, gradients {check['gradient']:.1e}, weights {check['weight']:.1e}"
    rows = {
        "same": f"{'yes' if check['same'] else 'NO'} (largest relative differences: {differ})",
        "compared with": _REFERENCES[check["reference"]],
    }
    return rows if check["same"] else rows | {"furthest": _furthest(check)}


def _furthest(check: dict[str, Any]) -> str:
    """Return where pipeline and model differ by more than the tolerance, and why, or how to tell rounding from it."""
    where = [words for what, words in check["furthest"].items() if not check[what] <= check["tolerance"]]
    found = check["burnt_in"]
    if found is None:
        return "\n".join([*where, "try the model in float64: if there is no difference then, this is rounding"])
    named = f"output{found['output']} of microbatch {found['microbatch']}"
    first = "its gradients" if found["output"] is None else named
    return "\n".join(
        [
            *where,
            "the capture burnt in what Python code decided: the captured graph does what the pipeline does, and the "
            f"module does not; the first difference is {first} in step {found['step']}",
        ]
    )
