"""Does what several commands share: make the model, capture it, and plan it or read its plan."""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import factories, source
from splitkit.cli.mesh import joined_mesh, links_of_mesh, read_mesh
from splitkit.cli.source import Source
from splitkit.cli.syntax import policy_spec
from splitkit.cli.syntax.device_list import devices_in_file
from splitkit.errors import CaptureError, FileError, PipelineError, SplitError, UsageError, nearest
from splitkit.hardware.device_specs import find_device
from splitkit.testing import models
from splitkit.testing.config_files import is_config
from splitkit.testing.factory import is_program, with_loss
from splitkit.testing.models import Example
from splitkit.training.stage_parts import stage_part
from splitkit.view.console import show_spinner

if TYPE_CHECKING:
    from torch import fx

    from splitkit.costs import Costs, Device, Links
    from splitkit.engine.json_fields import JsonField
    from splitkit.engine.split import Split
    from splitkit.engine.staged_step import StagedStep
    from splitkit.frontends.joint_capture import Joint
    from splitkit.plans.record import Plan
    from splitkit.runtime.folder.load import StageFolder
    from splitkit.runtime.ranks.pipeline import Pipeline


PRICES = ("flops", "unit", "measured", "roofline", "fused")
TRAINING = "fwd-bwd"
"""The name, in plan files and for ``--what``, of a plan that divides a training step into forward and backward."""


@dataclass
class Stopwatch:
    """Times the steps of a command.

    Attributes:
        seconds: step -> seconds.
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str, what: str, policy: object = None) -> Iterator[None]:
        """Time a step and show a spinner, with the time limit of a ``policy`` that has one."""
        start = perf_counter()
        with show_spinner(what, getattr(policy, "seconds", None)):
            yield
        self.seconds[name] = perf_counter() - start


@dataclass(frozen=True)
class CapturedModel:
    """A model and its graph.

    Attributes:
        source: how the model was made.
        example: the model and its inputs.
        gm: the captured graph; of a training step, forward and backward as one graph.
        clock: the seconds that each step took.
        mesh: the mesh over which the model of a training step is sharded, if it is.
    """

    source: Source
    example: Example
    gm: fx.GraphModule
    clock: Stopwatch
    _joint: Joint | None = None
    mesh: Any = None

    @property
    def joint(self) -> Joint:
        """The joint graph of a training step."""
        assert self._joint is not None, "captured by `prepare_step`"
        return self._joint

    @property
    def trains(self) -> bool:
        """Whether it is a training step."""
        return self._joint is not None


def prepare(wanted: Source) -> CapturedModel:
    """Make the model and capture it."""
    clock = Stopwatch()
    with clock.step("load", f"making {wanted.spec}"):
        example = example_of(wanted)
    with clock.step("capture", f"capturing {wanted.spec}"):
        if wanted.how == "decoder":
            example = Example(_evaluated(example, wanted.spec).model, (), {})
            gm = sk.capture_decoder(example.model, **{k: n for k, n in wanted.sizes.items() if k == "batch"})
        else:
            gm = sk.capture(example.model, *example.args, how=wanted.how, dynamic=wanted.dynamic, **example.kwargs)
    made = replace(wanted, mode="train" if example.model.training else "eval")
    return CapturedModel(made, example, gm, clock)


def prepare_step(wanted: Source, replicas: int = 1) -> CapturedModel:
    """Make the model, and capture its forward and backward as one graph.

    Args:
        wanted: how to make the model.
        replicas: how many ranks run each stage, for a model that is sharded over others.
    """
    if wanted.how != "export" or wanted.dynamic:
        raise UsageError(
            "SK601", "there is only one way to capture forward and backward", "Leave out --how and --dynamic."
        )
    clock = Stopwatch()
    with joined_mesh(wanted.mesh, replicas) as mesh:
        own = mesh and mesh[tuple(one.name for one in read_mesh(wanted.mesh or ""))]
        with clock.step("load", f"making {wanted.spec}"):
            example = example_of(wanted, own)
        with clock.step("capture", f"capturing forward and backward of {wanted.spec}"):
            joint = sk.capture_joint(example.model, *example.args, **example.kwargs)
        return CapturedModel(wanted, example, joint.graph_module, clock, joint, mesh)


def is_step(file: Mapping[str, Any]) -> bool:
    """Return whether the data of a plan file are of a plan for a training step."""
    return file.get("what") == TRAINING or stages_of_file(file) > 0


def prepare_for(args: Namespace, file: Mapping[str, Any], replicas: int = 1) -> CapturedModel:
    """Make the model of a plan file, and capture it as the plan needs it; ``replicas`` as for `prepare_step`."""
    wanted = source.from_plan(args.target, file, args)
    return prepare_step(wanted, replicas) if is_step(file) else prepare(wanted)


def links_asked(args: Namespace, plan: Plan) -> Links | None:
    """Return the links that ``--links`` names, or where it is left out, the links that the plan was made for."""
    from splitkit.costs.links import as_links, links_of

    return (
        links_of(plan.request.links) if args.links is None else as_links(None if args.links == "none" else args.links)
    )


def example_of(wanted: Source, mesh: Any = None) -> Example:
    """Make the model, in training or evaluation mode, and its inputs; sharded over a mesh if there is one."""
    example = _example(wanted, mesh)
    if mesh is not None:
        from splitkit.frontends.sharded_step import has_shards
        from splitkit.testing.tensor_parallel import shard_model

        if not has_shards(example.model):
            shard_model(example.model, mesh)
    if wanted.loss is not None:
        find_own_code(wanted.loss)
        example = with_loss(example, wanted.loss)
    return _evaluated(example, wanted.spec) if wanted.mode == "eval" else example


def _evaluated(example: Example, spec: str) -> Example:
    try:
        example.model.eval()
    except NotImplementedError as error:  # the module of an exported program
        raise UsageError(
            "SK601", f"{spec} has the mode in which it was exported", "Leave out --eval and --how decoder."
        ) from error
    return example


def _example(wanted: Source, mesh: Any = None) -> Example:
    import torch

    from splitkit.testing.config_models import config_example

    if is_config(wanted.spec):
        return config_example(wanted.spec, wanted.seed, **wanted.sizes)
    if ":" not in wanted.spec and not is_program(wanted.spec):
        return models.build(wanted.spec, seed=wanted.seed, **wanted.sizes)
    find_own_code(wanted.spec)
    with torch.random.fork_rng():
        torch.manual_seed(wanted.seed)
        try:
            return models.load(wanted.spec, mesh, **wanted.sizes)
        except SystemExit as error:
            remedy = "Call sys.exit only under `if __name__ == '__main__'`, and return the model and its inputs."
            raise CaptureError("SK403", f"{wanted.spec} called sys.exit({error.code})", remedy) from error


def find_own_code(spec: str) -> None:
    """Let a factory import what a script in its place could; last, so that no installed module is shadowed."""
    place = Path(spec.rpartition(":")[0])
    for folder in (Path.cwd(), *([place.absolute().parent] if place.suffix == ".py" else [])):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


def policy_of(args: Namespace) -> policy_spec.PolicySpec:
    """Return the policy that the command line names; errors in it show before torch is imported."""
    return policy_spec.parse(args.policy if args.policy is not None else f"Stages({args.stages})")


def prices(work: CapturedModel, kind: str | None, training: bool | None, device: str | Device | None = None) -> Costs:
    """Return the prices that ``--costs`` and ``--training`` ask for.

    The default is the roofline of ``device``; without a device FLOPs, or 1 per node if the graph carries no sizes.
    """
    from splitkit.prices import includes_backward

    if kind is not None:
        example = work.example
        made = kind_of_costs(work.gm, dict(example.kwargs) if example.kwargs else example.args, kind, bool(training))
    else:
        made = sk.costs.default(work.gm) if device is None else sk.costs.roofline(work.gm, device)
    return sk.costs.training(made, work.gm) if training and not includes_backward(made) else made


def kind_of_costs(gm: fx.GraphModule, inputs: Any, kind: str, backward: bool = False, mesh: str | None = None) -> Costs:
    """Return the prices that a word of the command line names.

    Args:
        gm: the graph.
        inputs: the inputs to measure with.
        kind: the word, such as ``roofline:h100``.
        backward: whether to measure backward too, where that is possible.
        mesh: the ranks that share the model, and the links between them, as ``--mesh`` has them.
    """
    name, _, device = kind.partition(":")
    if name in ("flops", "unit"):
        return sk.costs.flops(gm) if name == "flops" else sk.costs.unit(gm)
    if name == "measured":
        return sk.costs.measured(gm, inputs, device or "cpu", backward=backward and (device or "cpu") == "cpu")
    found = _device(device or "cpu")
    return (sk.costs.roofline if name == "roofline" else sk.costs.fused)(gm, found, mesh=links_of_mesh(mesh, found))


def check_costs(kind: str | None) -> None:
    """Refuse unknown prices or an unknown device before the model is made.

    Raises:
        UsageError: SK601 for an unknown kind of prices.
        SplitError: for an unknown device, or a bad file of devices.
    """
    if kind is None:
        return
    name, colon, device = kind.partition(":")
    if name not in PRICES or (colon and name in ("flops", "unit")):
        uses = "Use flops, unit, measured, roofline:DEVICE or fused:DEVICE."
        raise UsageError("SK601", f"--costs {kind} is not known", nearest(name, PRICES, uses))
    if name in ("roofline", "fused"):
        _device(device or "cpu")


def check_drawn_schedule(args: Namespace, devices: str | None = None) -> None:
    """Refuse a page with a schedule by prices that are not times, before the model is made.

    Raises:
        ViewError: SK903.
    """
    untimed = args.costs in ("flops", "unit") or (args.costs is None and devices is None)
    if args.schedule is not None and untimed:
        from splitkit.prices import untimed_error

        raise untimed_error("nodes" if args.costs == "unit" else "FLOPs")


def _device(text: str) -> Any:
    """Return a device by its name, or the device ``NAME`` of ``path.toml:NAME``."""
    path, colon, name = text.rpartition(":")
    if not colon:
        return find_device(text)
    described = {device.name: device for device in devices_in_file(path).devices}
    if name not in described:
        raise UsageError("SK601", f"{path} describes no device {name!r}", f"It describes {', '.join(described)}.")
    return described[name]


def planned_by(args: Namespace, file: dict[str, Any] | None) -> tuple[CapturedModel, Plan, Costs]:
    """Return model, plan and prices for a command that splits a forward: by `plan_file`, or MODEL and a policy."""
    if file is not None:
        return _from_file(args, file)
    if args.model is not None:
        raise UsageError(
            "SK601",
            "--model can only be used with a plan file",
            "Name just the model, or a plan whose name ends in .json.",
        )
    require_policy_option(args)
    return make_plan(args, args.target)


def require_policy_option(args: Namespace) -> None:
    """Refuse a model without a policy before the model is made.

    Raises:
        UsageError: SK601.
    """
    factories.check_model_name(args.target, plans=True)
    if args.stages is None and args.policy is None:
        raise UsageError("SK601", f"{args.target} needs a policy", "Add --stages N or --policy EXPR, or give a plan.")


def make_plan(args: Namespace, spec: str) -> tuple[CapturedModel, Plan, Costs]:
    """Make a model, and its plan by the policy of the command line."""
    work, planned = planner(args, spec)
    return work, *planned()


def planner(args: Namespace, spec: str) -> tuple[CapturedModel, Callable[[], tuple[Plan, Costs]]]:
    """Check the policy, make a model, and return it with a function that makes its plan and prices."""
    wanted, named = source.from_args(spec, args), policy_of(args)
    check_costs(args.costs)
    policy = named.build()
    work = prepare(wanted)

    def planned() -> tuple[Plan, Costs]:
        with work.clock.step("plan", f"planning {named.text}", policy):
            costs = prices(work, args.costs, args.training)
            return sk.plan(work.gm, policy, costs, on_cycle=getattr(args, "on_cycle", None) or "error"), costs

    return work, planned


def plan_file(args: Namespace, takes: Collection[str] = ()) -> dict[str, Any] | None:
    """Return the data of the plan file that the command line names, or ``None`` if it names a model.

    ``takes`` names the options that replace what the plan file has decided.

    Raises:
        UsageError: SK601 for options that the plan file has already decided.
        FileError: SK501 if the file is not a plan, SK504 if it cannot be read.
    """
    if not args.target.endswith(".json"):
        return None
    decided = (name for name in ("stages", "policy", "costs", "training") if name not in takes)
    unfit = [name for name in decided if getattr(args, name) is not None]
    if unfit:
        option = f"--{unfit[0].replace('_', '-')}"
        raise UsageError(
            "SK601",
            f"{option} cannot be combined with a plan file, which has already decided it",
            "Plan again with it.",
        )
    return read_plan(args.target)


def read_plan(path: str) -> dict[str, Any]:
    """Return the data of a plan file, before the model is made; raise the errors of `plan_file`."""
    from splitkit.plans import plan_file

    data = plan_file.read_json(path)
    if data.get("kind") != "splitkit plan":
        what = data.get("kind") or (f"what `splitkit {data['command']} --json` prints" if "command" in data else "")
        found = f": it is {what}" if isinstance(what, str) and what.isprintable() and what else ""
        raise FileError(
            "SK501", f"{path} is not a splitkit plan{found}", "Make one with `splitkit plan MODEL ... -o FILE`."
        )
    # names are printed: escape codes in a plan must not reach the terminal
    if not all(text.isprintable() for text in _strings(data)):
        raise FileError("SK501", f"{path} is damaged: it has control characters", "Plan again.")
    return data


def _from_file(args: Namespace, data: dict[str, Any]) -> tuple[CapturedModel, Plan, Costs]:
    if is_step(data):
        if stages_of_file(data):
            raise UsageError(
                "SK601",
                f"{args.target} has the stages of a training step, and this command splits a forward graph",
                f"`splitkit train {args.target} --nproc N --schedule S` trains with it, "
                f"`splitkit run {args.target}` runs it in one process, and "
                f"`splitkit view {args.target} -o page.html` draws it.",
            )
        raise UsageError(
            "SK601",
            f"{args.target} divides a training step into forward and backward, and this command splits a forward graph",
            f"`splitkit run {args.target}` runs it. In Python: "
            "joint.split(splitkit.Plan.load(path, joint.graph_module.graph)).",
        )
    from splitkit.costs.training import with_backward
    from splitkit.pipeline.placed_prices import costs_of_plan

    check_costs(args.costs)
    work = prepare(source.from_plan(args.target, data, args))
    with work.clock.step("plan", "reading the plan"):
        plan = decoded(work.gm.graph, args.target, data)
        if args.costs is not None:
            return work, plan, prices(work, args.costs, args.training)
        costs = costs_of_plan(plan, work.gm)
        return work, plan, with_backward(costs, sk.analyze(work.gm)) if args.training else costs


def _strings(data: Any) -> Iterator[str]:
    """Yield every string in JSON data."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list):
        for item in (*data, *data.values()) if isinstance(data, dict) else data:
            yield from _strings(item)


def decoded(graph: fx.Graph, path: str, data: dict[str, Any]) -> Plan:
    """Return the plan in a file's data for the graph that it was made for.

    Raises:
        FileError: SK501 if the data is damaged, SK502 if the graph is another one, SK503 for another schema.
    """
    try:
        return sk.Plan.from_dict(graph, data)
    except SplitError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise FileError("SK501", f"{path} is damaged: {error}", "Plan again.") from error


def versions() -> dict[str, str]:
    """Return the versions that a file records of the program that wrote it."""
    import torch

    return {"splitkit": sk.__version__, "torch": torch.__version__}


# What a plan file of a training step in stages says without its graph, and which option it does not accept.


def stages_of_file(file: Mapping[str, Any]) -> int:
    """Return the number of stages of a plan of a training step; 0 if it is not in stages."""
    parts = file.get("parts")
    keys = [part.get("key") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    found = [part.stage for key in keys if isinstance(key, list) and (part := stage_part(tuple(key))) is not None]
    return max(found, default=-1) + 1


def require_own_recompute(args: Namespace) -> None:
    """Refuse ``--recompute`` for a plan of a training step.

    Raises:
        UsageError: SK601.
    """
    if args.recompute:
        raise UsageError(
            "SK601",
            f"--recompute cannot be combined with {args.target}, a plan of a training step, which says what is "
            "recomputed",
            "Leave it out; for less memory, plan with a limit: --policy \"Pipeline(2, memory='1GiB')\".",
        )


# Applies the flags of commands to the parts of a plan and to their modules.


def with_part_flags(plan: Plan, args: Namespace) -> Plan:
    """Return the plan with the replicas of ``--dp``, and with checkpointed parts for ``--recompute``."""
    if args.dp is not None:
        plan = replace(plan, parts={key: replace(part, replicas=args.dp) for key, part in plan.parts.items()})
    return with_recompute(plan, args)


def with_recompute(plan: Plan, args: Namespace, gm: fx.GraphModule | None = None) -> Plan:
    """Return the plan, with checkpointed parts for ``--recompute``.

    Args:
        plan: the plan.
        args: the arguments of the command.
        gm: the graph; without it nothing is checked, as before a split, which checks itself.

    Raises:
        PlanError: SK207 for parts with effects, which cannot run again.
    """
    if not args.recompute:
        return plan
    from splitkit.plans.record import check_checkpoints, checkpointed

    made = checkpointed(plan)
    if gm is not None:
        check_checkpoints(sk.analyze(gm), made)
    return made


def require_compiler(args: Namespace) -> None:
    """Refuse ``--compile`` without a C++ compiler, before the model is made.

    Raises:
        UsageError: SK601.
    """
    compiler = os.environ.get("CXX", "g++")
    if args.compile == "inductor" and shutil.which(compiler) is None:
        raise UsageError(
            "SK601", f"--compile needs a C++ compiler, and {compiler} is not found", "Install it, set CXX, or use "
            "--compile=aot_eager.",
        )  # fmt: skip


def compile_parts(pipe: Pipeline, backend: str | None) -> None:
    """Let each part of this rank be compiled at its first microbatch, with the random numbers of eager mode."""
    options = {"options": {"fallback_random": True}} if backend == "inductor" else {}
    for part in pipe.modules if backend else ():
        part.compile(backend=backend, **options)


# Writes the folders of stages of ``splitkit split -o``, and opens them for ``splitkit train``.


_MANIFEST = "manifest.json"
_DECIDED = ("stages", "policy", "costs", "training", "size", "how", "dynamic", "eval", "recompute")


def save_stage_folder(folder: Path, split: Split | StagedStep, work: CapturedModel) -> str | None:
    """Write the stages of a split into a folder; return the reason if there are none: no pipeline, or no data."""
    example = work.example
    record = {"model": source.source_record(work.source, folder), **versions()}
    inputs: Any = (tuple(example.args), dict(example.kwargs))
    if work.source.how == "decoder":
        inputs, record = None, record | {"generation": generation_record(example.model)}
    try:
        sk.runtime.save_stages(split, folder, inputs=inputs, record=record)
    except SplitError as error:
        if not isinstance(error, PipelineError) and error.code != "SK506":
            raise
        return f"{error.code}: {error.reason}"
    return None


def generation_record(model: Any) -> dict[str, Any]:
    """Return what generation needs of a model of transformers besides its stages.

    Returns:
        ``eos_token_id``, the tokens that end a sequence; ``pad_token_id``, or ``None``; and ``positions``, the most
        tokens of a sequence, or ``None``.
    """
    from splitkit.runtime.generation.before_stages import ModelTokens

    known = ModelTokens.of(model)
    ends = list(known.eos_token_id)
    return {"eos_token_id": ends, "pad_token_id": known.pad_token_id, "positions": known.positions}


def checked_generation_record(data: JsonField) -> dict[str, Any]:
    """Return the record of `generation_record` that a manifest holds.

    Raises:
        FileError: SK505 if it is damaged.
    """
    pad, positions = data["pad_token_id"], data["positions"]
    return {
        "eos_token_id": [token.whole() for token in data["eos_token_id"].items()],
        "pad_token_id": None if pad.value is None else pad.whole(),
        "positions": None if positions.value is None else positions.whole(),
    }


def is_folder(target: str) -> bool:
    """Return whether the target of a command is a folder of stages."""
    return (Path(target) / _MANIFEST).is_file()


def require_fitting_options(args: Namespace) -> None:
    """Refuse options that a folder of stages has already decided, and ``--weights`` for another target.

    Raises:
        UsageError: SK601.
    """
    if not is_folder(args.target):
        if args.weights is not None:
            raise UsageError("SK601", "--weights needs a folder of stages", "Write one: splitkit split PLAN -o FOLDER.")
        return
    if decided := [name for name in _DECIDED if getattr(args, name, None) is not None]:
        reason = f"--{decided[0].replace('_', '-')} cannot be combined with a folder of stages"
        raise UsageError("SK601", reason, "Plan and split again with it.")


def open_folder(args: Namespace) -> tuple[CapturedModel, StageFolder]:
    """Open the stages in a folder; make the unsplit model only on rank 0 with ``--check``."""
    held = sk.runtime.open_stages(args.target, args.weights)
    held = replace(held, plan=with_part_flags(held.plan, args))
    inputs, named = held.example()
    example = Example(held.module, inputs, named)
    if not args.check or int(os.environ["RANK"]):
        return CapturedModel(_source_of_folder(args, held.manifest.value), example, held.module, Stopwatch()), held
    whole = prepare(source.from_plan(args.target, held.manifest.value, args))
    held.fill(whole.gm)
    return replace(whole, example=example), held


def _source_of_folder(args: Namespace, manifest: dict[str, Any]) -> Source:
    record = manifest.get("model")
    found = Source(args.target, {}) if record is None else source.recorded(args.target, record)
    if args.loss is not None:
        source.require_loss_of_plan(found, args)
    return found if args.seed is None else replace(found, seed=args.seed)
