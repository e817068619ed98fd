"""``splitkit run``: runs forward and backward of a plan, times them, and compares them with the unsplit model."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli.check_report import DIFFERENT, check_data, check_text
from splitkit.cli.common import is_step, plan_file, planned_by
from splitkit.cli.outcome import Outcome, seconds_text
from splitkit.cli.source import require_inputs
from splitkit.errors import listed
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.engine.split import Split

SHOWN = 8
"""The number of outputs that the text names."""


def run(args: Namespace) -> Outcome:
    """Run ``splitkit run``."""
    file = plan_file(args)
    if file is not None and is_step(file):
        from splitkit.cli.commands import run_training as trainrun

        return trainrun.run(args, file)
    work, plan, _ = planned_by(args, file)
    require_inputs(work.source, "run")
    from splitkit.testing.timing import best_step

    with work.clock.step("split", "splitting"):
        split = sk.split(work.gm, plan)
    with work.clock.step("run", f"running {len(split.parts)} parts"):
        timed = best_step(split.module, split.parts.values(), work.example, work.source.seed, args.repeat)
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
    from splitkit.cli.describe import tensor_text
    from splitkit.frontends.output_classes import named_leaves

    return [{"name": f"output{path}", "value": tensor_text(leaf)} for path, leaf in named_leaves(output)[0]]


def _parts(split: Split, times: Sequence[float]) -> list[dict[str, Any]]:
    from splitkit.cli.commands.split import part_module_names

    names = part_module_names(split)
    return [{"module": names[part], "forward": took} for part, took in zip(split.parts.values(), times, strict=True)]


def _text(data: dict[str, Any]) -> list[RenderableType]:
    loss = "none" if data["loss"] is None else f"{data['loss']:.6g}"
    backward = "nothing requires a gradient" if data["backward"] is None else seconds_text(data["backward"])
    rows = {
        "outputs": listed([f"{o['name']}: {o['value']}" for o in data["outputs"]], SHOWN),
        "loss": loss if data["loss_is_models"] or data["loss"] is None else f"{loss} (the sum of the outputs)",
        "forward": seconds_text(data["forward"]) + (f" (best of {data['repeat']})" if data["repeat"] > 1 else ""),
        "backward": backward,
    }
    times = [(p["module"], seconds_text(p["forward"])) for p in data["parts"]]
    text: list[RenderableType] = [facts(rows), "", table(("part", "forward"), times, ("forward",))]
    return [*text, "", *check_text(data["check"])] if data["check"] else text
