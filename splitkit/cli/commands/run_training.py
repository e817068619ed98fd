"""``splitkit run`` of a plan of forward and backward: runs one training step and compares it with the unsplit model."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import source
from splitkit.cli.check_report import DIFFERENT, check_data, check_text
from splitkit.cli.commands import plan_training as trainplan
from splitkit.cli.commands.plan_training import CapturedStep
from splitkit.cli.commands.profile import beside
from splitkit.cli.common import TRAINING, decoded
from splitkit.cli.mesh import require_one_rank
from splitkit.cli.outcome import Outcome, seconds_text
from splitkit.engine.pair import Pair
from splitkit.units import bounded, size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from splitkit.frontends.joint_capture import DividedStep
    from splitkit.memory.profile import MemoryProfile
    from splitkit.testing.compare import Comparison
    from splitkit.testing.differences import Difference


def run(args: Namespace, file: dict[str, Any]) -> Outcome:
    """Run the plan in the data of a plan file."""
    wanted = source.from_plan(args.target, file, args)
    require_one_rank(wanted.mesh, "run")
    work = trainplan.prepare_step(wanted)
    from splitkit.frontends.joint_capture import DividedStep
    from splitkit.testing import timing

    with work.clock.step("plan", "reading the plan"):
        plan = decoded(work.joint.graph_module.graph, args.target, file)
    with work.clock.step("split", "dividing the step"):
        step = DividedStep(work.joint, work.joint.split(plan))
    with work.clock.step("simulate", "simulating the memory"):
        shown = _halves(step) if isinstance(step.pair, Pair) else {"stages": len(step.pair.stages)}
    with work.clock.step("run", "running forward and backward"):
        timed = timing.best_step(step, (), work.example, work.source.seed, args.repeat)
    data: dict[str, Any] = {
        "command": "run",
        "what": TRAINING,
        "model": work.source.to_dict(),
        "note": plan.note,
        "loss": timed.loss,
        "forward": timed.forward,
        "backward": timed.backward,
        **shown,
        "repeat": args.repeat,
        "check": None,
    }
    if args.check:
        with work.clock.step("check", "comparing with the unsplit model"):
            data["check"] = _check(work, step)
        if isinstance(step.pair, Pair):
            with work.clock.step("measure", "measuring the memory of a step"):
                both = timing.TrainingRun(step.joint, step.pair)
                found = timing.measure_training(both, work.example, work.source.seed)
                data["peak"] |= beside(found, data["peak"]["predicted"])
    data["seconds"] = work.clock.seconds
    failed = args.check and not data["check"]["same"]
    return Outcome(data, _text(data), DIFFERENT if failed else 0)


def _halves(step: DividedStep) -> dict[str, Any]:
    """Return the simulated memory of forward and backward."""
    from splitkit.testing import timing

    assert isinstance(step.pair, Pair)
    profile = timing.TrainingRun(step.joint, step.pair).profile
    return {
        "halves": [_half(step, profile, which) for which in ("forward", "backward")],
        "saved": profile.saved + step.pair.host_bytes,
        "peak": {
            "predicted": profile.peak,
            "bounds": dict(profile.bounds),
            "unseen": sorted(profile.unseen),
            "measured": None,
            "error": None,
            "allocator": None,
        },
    }


def _half(step: DividedStep, profile: MemoryProfile, which: str) -> dict[str, Any]:
    assert step.pair.plan is not None
    ops = sum(which in step.pair.plan[node] for node in step.joint.flow.nodes)
    return {"half": which, "ops": ops, "peak": profile.peak_of(which)}


def _check(work: CapturedStep, step: DividedStep) -> dict[str, Any]:
    """Compare loss, gradients and buffers with those of the model in eager mode."""
    from splitkit.frontends.joint_capture import TrainingStep

    example = work.example
    whole = TrainingStep(example.model, None)
    found = _renamed(sk.compare(whole, step, *example.args, seed=work.source.seed, **example.kwargs))
    # A graph may run other kernels than eager mode, so the loss may differ by rounding: oneDNN's LSTM does that.
    wrong = tuple(d for d in found.outputs if d.relative > found.tolerance)
    return check_data(replace(found, outputs=wrong)) | {"outputs": check_data(found)["outputs"]}


def _renamed(found: Comparison) -> Comparison:
    """Return the comparison with the model's own names: both compared modules hold the model as ``model``."""
    outputs = tuple(replace(d, name="loss" if d.name == "output" else d.name) for d in found.outputs)
    return replace(found, outputs=outputs, gradients=_of_model(found.gradients), state=_of_model(found.state))


def _of_model(entries: tuple[Difference, ...]) -> tuple[Difference, ...]:
    return tuple(replace(d, name=d.name.replace(" of model.", " of ", 1)) for d in entries)


def _text(data: dict[str, Any]) -> list[RenderableType]:
    best = f" (best of {data['repeat']})" if data["repeat"] > 1 else ""
    if "stages" in data:
        times = {f"{half}{best}": seconds_text(data[half]) for half in ("forward", "backward")}
        rows = {"plan": data["note"].replace("; ", ";\n"), "loss": f"{data['loss']:.6g}", **times}
        text: list[RenderableType] = [facts(rows)]
    else:
        rows = {
            "plan": data["note"].replace("; ", ";\n"),
            "loss": f"{data['loss']:.6g}",
            "peak": _peak_text(data["peak"]),
            "saved for backward": size(data["saved"]),
        }
        halves = [(h["half"], h["ops"], seconds_text(data[h["half"]]), size(h["peak"])) for h in data["halves"]]
        titles = ("half", "ops", f"time{best}", "peak predicted")
        text = [facts(rows), "", table(titles, halves, titles[1:])]
    return [*text, "", *check_text(data["check"])] if data["check"] else text


def _peak_text(peak: dict[str, Any]) -> str:
    predicted = f"{bounded(peak['predicted'], peak['bounds'], peak['unseen'])} predicted"
    if peak["measured"] is None:
        return predicted
    error = "exact" if not peak["error"] else f"{100 * peak['error']:+.3f} %"
    return f"{predicted}, {size(peak['measured'])} measured ({error})"
