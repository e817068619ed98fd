"""``splitkit run``: run the parts forward and backward, and compare them with the whole."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli.outcome import Outcome, facts, seconds, table
from splitkit.cli.work import planned

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.compare import Comparison, Difference
    from splitkit.split import Split

DIFFERENT = 4
SHOWN = 8


def run(args: Namespace) -> Outcome:
    """See the module."""
    work, plan, _ = planned(args)
    from splitkit.cli.timing import best

    with work.clock.step("split", "splitting"):
        split = sk.split(work.gm, plan)
    with work.clock.step("run", f"running {len(split.parts)} parts"):
        timed = best(split, work.example, work.source.seed, args.repeat)
    data: dict[str, Any] = {
        "command": "run",
        "model": work.source.to_dict(),
        "note": plan.note,
        "outputs": _outputs(timed.output),
        "loss": timed.loss,
        "loss_is_models": timed.loss_is_models,
        "forward": timed.forward,
        "backward": timed.backward,
        "parts": _parts(split, timed.parts),
        "repeat": args.repeat,
        "check": None,
    }
    if args.check:
        with work.clock.step("check", "comparing with the unsplit model"):
            example = work.example
            found = sk.compare(example.model, split, *example.args, seed=work.source.seed, **example.kwargs)
        data["check"] = check_data(found)
    data["seconds"] = work.clock.seconds
    failed = args.check and not data["check"]["same"]
    return Outcome(data, _text(data), DIFFERENT if failed else 0)


def _outputs(output: Any) -> list[dict[str, str]]:
    from splitkit._torch import pytree
    from splitkit.cli.describe import value_text

    leaves = pytree.tree_flatten_with_path(output)[0]
    return [{"name": f"output{pytree.keystr(path)}", "value": value_text(leaf)} for path, leaf in leaves]


def _parts(split: Split, times: Sequence[float]) -> list[dict[str, Any]]:
    from splitkit.cli.commands.split import part_names

    names = part_names(split)
    return [{"module": names[part], "forward": took} for part, took in zip(split.parts.values(), times, strict=True)]


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


def _text(data: dict[str, Any]) -> list[RenderableType]:
    loss = "none" if data["loss"] is None else f"{data['loss']:.6g}"
    backward = "nothing takes a gradient" if data["backward"] is None else seconds(data["backward"])
    shown = ", ".join(f"{o['name']}: {o['value']}" for o in data["outputs"][:SHOWN])
    rows = {
        "outputs": shown + (f" and {len(data['outputs']) - SHOWN} more" if len(data["outputs"]) > SHOWN else ""),
        "loss": loss if data["loss_is_models"] or data["loss"] is None else f"{loss} (the sum of the outputs)",
        "forward": seconds(data["forward"]) + (f" (best of {data['repeat']})" if data["repeat"] > 1 else ""),
        "backward": backward,
    }
    times = [(p["module"], seconds(p["forward"])) for p in data["parts"]]
    text: list[RenderableType] = [facts(rows), "", table(("part", "forward"), times, ("forward",))]
    return [*text, "", *_check_text(data["check"])] if data["check"] else text


def _check_text(check: dict[str, Any]) -> list[RenderableType]:
    whole, parts = ("none" if value is None else repr(value) for value in check["loss"])
    rows = {which: _sentence(check[which]) for which in ("outputs", "gradients", "state")}
    lines: list[RenderableType] = [facts({"loss": f"{whole} whole, {parts} split", **rows})]
    lines += [
        f"differs: {bad['name']} by {bad['largest']:.3g} (scale {bad['scale']:.3g})"
        for bad in check["failures"][:SHOWN]
    ]
    if len(check["failures"]) > SHOWN:
        lines.append(f"and {len(check['failures']) - SHOWN} more")
    return [*lines, f"same: {'yes' if check['same'] else 'no'}"]


def _sentence(group: dict[str, Any]) -> str:
    worst = group["worst"]
    text = f"{group['bitwise']} of {group['count']} bitwise equal"
    if not worst:
        return text
    return f"{text}; largest difference {worst['largest']:.3g}, relative {worst['relative']:.3g}, of {worst['name']}"
