"""``splitkit run``: run the parts, or the halves, of a plan forward and backward, and compare them with the whole."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli.checks import DIFFERENT, check_data, check_text
from splitkit.cli.outcome import Outcome, seconds
from splitkit.cli.work import TRAINING, plan_file, planned_by
from splitkit.errors import listed
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.engine.split import Split

SHOWN = 8


def run(args: Namespace) -> Outcome:
    """See the module."""
    file = plan_file(args)
    if file is not None and file.get("what") == TRAINING:
        from splitkit.cli.commands import run_training as trainrun

        return trainrun.run(args, file)
    work, plan, _ = planned_by(args, file)
    from splitkit.testing.timing import best

    with work.clock.step("split", "splitting"):
        split = sk.split(work.gm, plan)
    with work.clock.step("run", f"running {len(split.parts)} parts"):
        timed = best(split.module, split.parts.values(), work.example, work.source.seed, args.repeat)
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
    from splitkit.cli.describe import value_text
    from splitkit.frontends.outputs import named_leaves

    return [{"name": f"output{path}", "value": value_text(leaf)} for path, leaf in named_leaves(output)[0]]


def _parts(split: Split, times: Sequence[float]) -> list[dict[str, Any]]:
    from splitkit.cli.commands.split import part_names

    names = part_names(split)
    return [{"module": names[part], "forward": took} for part, took in zip(split.parts.values(), times, strict=True)]


def _text(data: dict[str, Any]) -> list[RenderableType]:
    loss = "none" if data["loss"] is None else f"{data['loss']:.6g}"
    backward = "nothing takes a gradient" if data["backward"] is None else seconds(data["backward"])
    rows = {
        "outputs": listed([f"{o['name']}: {o['value']}" for o in data["outputs"]], SHOWN),
        "loss": loss if data["loss_is_models"] or data["loss"] is None else f"{loss} (the sum of the outputs)",
        "forward": seconds(data["forward"]) + (f" (best of {data['repeat']})" if data["repeat"] > 1 else ""),
        "backward": backward,
    }
    times = [(p["module"], seconds(p["forward"])) for p in data["parts"]]
    text: list[RenderableType] = [facts(rows), "", table(("part", "forward"), times, ("forward",))]
    return [*text, "", *check_text(data["check"])] if data["check"] else text
