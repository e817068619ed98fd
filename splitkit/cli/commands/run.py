"""``splitkit run``: runs forward and backward of a plan, times them, and compares them with the unsplit model."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import DIFFERENT, source
from splitkit.cli.common import TRAINING, CapturedModel, decoded, is_step, plan_file, planned_by, prepare_step
from splitkit.cli.mesh import require_one_rank
from splitkit.cli.outcome import Lines, Outcome, seconds_text
from splitkit.cli.source import require_inputs
from splitkit.errors import listed
from splitkit.units import bounded, size
from splitkit.view.tables import facts, table

if TYPE_CHECKING:
    from splitkit.frontends.joint_capture import DividedStep
    from splitkit.testing.compare import Comparison
    from splitkit.testing.differences import Difference


SHOWN = 8
"""The number of outputs that the text names."""


def run(args: Namespace) -> Outcome:
    """Run ``splitkit run``."""
    file = plan_file(args)
    if file is not None and is_step(file):
        return run_step(args, file)
    work, plan, _ = planned_by(args, file)
    require_inputs(work.source, "run")
    from splitkit.cli.commands.split import part_module_names, tensor_text
    from splitkit.frontends.output_classes import named_leaves
    from splitkit.testing.timing import best_step

    with work.clock.step("split", "splitting"):
        split = sk.split(work.gm, plan)
        names = part_module_names(split)
    with work.clock.step("run", f"running {len(split.parts)} parts"):
        timed = best_step(split.module, split.parts.values(), work.example, work.source.seed, args.repeat)
    data: dict[str, Any] = {
        "model": work.source.to_dict(),
        "note": plan.note,
        "outputs": [
            {"name": f"output{path}", "value": tensor_text(leaf)} for path, leaf in named_leaves(timed.output)[0]
        ],
        "loss": timed.loss,
        "loss_is_models": timed.loss_is_models,
        "forward": timed.forward,
        "backward": timed.backward,
        "parts": [
            {"module": names[part], "forward": took}
            for part, took in zip(split.parts.values(), timed.parts, strict=True)
        ],
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


def _text(data: dict[str, Any]) -> Lines:
    loss = "none" if data["loss"] is None else f"{data['loss']:.6g}"
    backward = "nothing requires a gradient" if data["backward"] is None else seconds_text(data["backward"])
    rows = {
        "outputs": listed([f"{o['name']}: {o['value']}" for o in data["outputs"]], SHOWN),
        "loss": loss if data["loss_is_models"] or data["loss"] is None else f"{loss} (the sum of the outputs)",
        "forward": seconds_text(data["forward"]) + (f" (best of {data['repeat']})" if data["repeat"] > 1 else ""),
        "backward": backward,
    }
    times = [(p["module"], seconds_text(p["forward"])) for p in data["parts"]]
    text: Lines = [facts(rows), "", table(("part", "forward"), times, ("forward",))]
    return [*text, "", *check_text(data["check"])] if data["check"] else text


# ``splitkit run`` of a plan of forward and backward: runs one training step and compares it with the unsplit model.


def run_step(args: Namespace, file: dict[str, Any]) -> Outcome:
    """Run the plan in the data of a plan file."""
    wanted = source.from_plan(args.target, file, args)
    require_one_rank(wanted.mesh, "run")
    work = prepare_step(wanted)
    from splitkit.engine.pair import Pair
    from splitkit.frontends.joint_capture import DividedStep
    from splitkit.testing import timing

    with work.clock.step("plan", "reading the plan"):
        plan = decoded(work.gm.graph, args.target, file)
    with work.clock.step("split", "dividing the step"):
        step = DividedStep(work.joint, work.joint.split(plan))
    with work.clock.step("simulate", "simulating the memory"):
        shown = _halves(step) if isinstance(step.pair, Pair) else {"stages": len(step.pair.stages)}
    with work.clock.step("run", "running forward and backward"):
        timed = timing.best_step(step, (), work.example, work.source.seed, args.repeat)
    data: dict[str, Any] = {
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
        from splitkit.cli.commands.profile import beside

        with work.clock.step("check", "comparing with the unsplit model"):
            data["check"] = _check(work, step)
        if isinstance(step.pair, Pair):
            with work.clock.step("measure", "measuring the memory of a step"):
                both = timing.TrainingRun(step.joint, step.pair)
                found = timing.measure_training(both, work.example, work.source.seed)
                data["peak"] |= beside(found, data["peak"]["predicted"])
    data["seconds"] = work.clock.seconds
    failed = args.check and not data["check"]["same"]
    return Outcome(data, _step_text(data), DIFFERENT if failed else 0)


def _halves(step: DividedStep) -> dict[str, Any]:
    """Return the simulated memory of forward and backward."""
    from splitkit.engine.pair import Pair
    from splitkit.testing import timing

    assert isinstance(step.pair, Pair) and step.pair.plan is not None
    profile, plan = timing.TrainingRun(step.joint, step.pair).profile, step.pair.plan
    ops = {half: sum(half in plan[node] for node in step.joint.flow.nodes) for half in ("forward", "backward")}
    return {
        "halves": [{"half": half, "ops": count, "peak": profile.peak_of(half)} for half, count in ops.items()],
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


def _check(work: CapturedModel, step: DividedStep) -> dict[str, Any]:
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


def _step_text(data: dict[str, Any]) -> Lines:
    best = f" (best of {data['repeat']})" if data["repeat"] > 1 else ""
    if "stages" in data:
        times = {f"{half}{best}": seconds_text(data[half]) for half in ("forward", "backward")}
        rows = {"plan": data["note"].replace("; ", ";\n"), "loss": f"{data['loss']:.6g}", **times}
        text: Lines = [facts(rows)]
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


# What ``--check`` found, as data and as text.


_DIFFERENCES = 8
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


def check_text(check: dict[str, Any]) -> Lines:
    """Return the data of `check_data` as text."""
    whole, parts = ("none" if value is None else repr(value) for value in check["loss"])
    rows = {which: _sentence(check[which]) for which in ("outputs", "gradients", "state")}
    lines: Lines = [facts({"loss": f"{whole} whole, {parts} split", **rows})]
    lines += [
        f"differs: {bad['name']} by {bad['largest']:.3g} (scale {bad['scale']:.3g})"
        for bad in check["failures"][:_DIFFERENCES]
    ]
    if len(check["failures"]) > _DIFFERENCES:
        lines.append(f"and {len(check['failures']) - _DIFFERENCES} more")
    if step := check["wrong_step"]:
        lines.append(f"first wrong step: {_STEPS[step]}")
    return [*lines, f"same: {'yes' if check['same'] else 'no'}"]


def _sentence(group: dict[str, Any]) -> str:
    worst = group["worst"]
    text = f"{group['bitwise']} of {group['count']} bitwise equal"
    if not worst:
        return text
    return f"{text}; largest difference {worst['largest']:.3g}, relative {worst['relative']:.3g}, of {worst['name']}"
