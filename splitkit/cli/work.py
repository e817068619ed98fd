"""What several commands do: make the model, capture it, plan it or read its plan."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import splitkit as sk
from splitkit.cli import factories, policyspec, source
from splitkit.cli.source import Source
from splitkit.errors import CaptureError, FileError, SplitError, UsageError, nearest
from splitkit.testing import models
from splitkit.testing.models import Example
from splitkit.view.console import busy

if TYPE_CHECKING:
    from torch import fx

    from splitkit.costs import Costs, Device
    from splitkit.plans.record import Plan


PRICES = ("flops", "unit", "measured", "roofline", "fused")
TRAINING = "fwd-bwd"
"""What a plan file, and ``--what``, call a plan that divides a training step into forward and backward."""


@dataclass
class Stopwatch:
    """Seconds that each step took.

    Attributes:
        seconds: step -> seconds.
    """

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str, what: str, policy: object = None) -> Iterator[None]:
        """Time a step, with a spinner on a terminal; with a bar for a ``policy`` that says how long it searches."""
        start = perf_counter()
        with busy(what, getattr(policy, "seconds", None)):
            yield
        self.seconds[name] = perf_counter() - start


@dataclass(frozen=True)
class Work:
    """A model and its graph.

    Attributes:
        source: where the model is from.
        example: the model and its inputs.
        gm: its graph.
        clock: what took how long.
    """

    source: Source
    example: Example
    gm: fx.GraphModule
    clock: Stopwatch


def prepare(wanted: Source) -> Work:
    """Make the model and capture it."""
    clock = Stopwatch()
    with clock.step("load", f"making {wanted.spec}"):
        example = example_of(wanted)
    with clock.step("capture", f"capturing {wanted.spec}"):
        gm = sk.capture(example.model, *example.args, how=wanted.how, dynamic=wanted.dynamic, **example.kwargs)
    made = replace(wanted, mode="train" if example.model.training else "eval")
    return Work(made, example, gm, clock)


def example_of(wanted: Source) -> Example:
    """The model that is wanted, in its mode, and its inputs."""
    example = _example(wanted)
    if wanted.mode == "eval":
        example.model.eval()
    return example


def _example(wanted: Source) -> Example:
    import torch

    if ":" not in wanted.spec:
        return models.build(wanted.spec, seed=wanted.seed, **wanted.sizes)
    place = Path(wanted.spec.rpartition(":")[0])
    for folder in (Path.cwd(), *([place.absolute().parent] if place.suffix == ".py" else [])):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))  # where a script would look; last, so that nothing is shadowed
    with torch.random.fork_rng():
        torch.manual_seed(wanted.seed)
        try:
            return models.load(wanted.spec, **wanted.sizes)
        except SystemExit as error:
            raise CaptureError("SK403", f"{wanted.spec} left with sys.exit({error.code})") from error


def policy_of(args: Namespace) -> policyspec.PolicySpec:
    """The policy that the command line names; found wrong before torch is imported."""
    return policyspec.parse(args.policy if args.policy is not None else f"Stages({args.stages})")


def prices(work: Work, kind: str | None, training: bool | None, device: str | Device | None = None) -> Costs:
    """``--costs`` and ``--training``. Unless said otherwise: the roofline of a device, or FLOPs where none is known, or
    a unit where the graph does not know its sizes."""
    from splitkit import costs
    from splitkit.prices import includes_backward

    if kind is not None:
        example = work.example
        made = kind_of_costs(work.gm, dict(example.kwargs) if example.kwargs else example.args, kind, bool(training))
    else:
        made = costs.default(work.gm) if device is None else costs.roofline(work.gm, device)
    return costs.training(made, work.gm) if training and not includes_backward(made) else made


def kind_of_costs(gm: fx.GraphModule, inputs: Any, kind: str, backward: bool = False) -> Costs:
    """The prices that a word of the command line names.

    Args:
        inputs: for those that are measured.
        backward: whether to measure backward too, where that can be measured.
    """
    from splitkit import costs

    name, _, device = kind.partition(":")
    if name in ("flops", "unit"):
        return costs.flops(gm) if name == "flops" else costs.unit(gm)
    if name == "measured":
        return costs.measured(gm, inputs, device or "cpu", backward=backward and (device or "cpu") == "cpu")
    return (costs.roofline if name == "roofline" else costs.fused)(gm, _device(device or "cpu"))


def check_costs(kind: str | None) -> None:
    """Refuse a word for prices that is not known, or is of a device that is not, before the model is made.

    Raises:
        UsageError: SK601 for the word.
        SplitError: for the device, or the file that describes it.
    """
    if kind is None:
        return
    name, colon, device = kind.partition(":")
    if name not in PRICES or (colon and name in ("flops", "unit")):
        uses = "Use flops, unit, measured, roofline:DEVICE or fused:DEVICE."
        raise UsageError("SK601", f"--costs {kind} is not known", nearest(name, PRICES, uses))
    if name in ("roofline", "fused"):
        _device(device or "cpu")


def _device(text: str) -> Any:
    """A known device, or ``NAME`` of ``path.toml:NAME``."""
    from splitkit import costs
    from splitkit.costs.devices import find_device

    path, colon, name = text.rpartition(":")
    if not colon:
        return find_device(text)
    described = costs.load_devices(path)
    if name not in described:
        raise UsageError("SK601", f"{path} describes no device {name!r}", f"It describes {', '.join(described)}.")
    return described[name]


def planned(args: Namespace) -> tuple[Work, Plan, Costs]:
    """For commands that cut a forward graph: the plan of ``PLAN.json``, or of MODEL and a policy."""
    return planned_by(args, plan_file(args))


def planned_by(args: Namespace, file: dict[str, Any] | None) -> tuple[Work, Plan, Costs]:
    """The same, of a plan file that was read with `plan_file`."""
    if file is not None:
        return _from_file(args, file)
    if args.model is not None:
        raise UsageError("SK601", "--model goes with a plan file", "Name the model, or a plan that ends in .json.")
    require_policy(args)
    return make_plan(args, args.target)


def require_policy(args: Namespace) -> None:
    """Refuse a model without a policy, before it is made.

    Raises:
        UsageError: SK601.
    """
    factories.check(args.target, plans=True)
    if args.stages is None and args.policy is None:
        raise UsageError("SK601", f"{args.target} needs a policy", "Add --stages N or --policy EXPR, or give a plan.")


def make_plan(args: Namespace, spec: str) -> tuple[Work, Plan, Costs]:
    """The plan that the policy of the command line makes for a model."""
    work, planned = planner(args, spec)
    return work, *planned()


def planner(args: Namespace, spec: str) -> tuple[Work, Callable[[], tuple[Plan, Costs]]]:
    """A model, and what makes its plan by the policy of the command line, whose options are checked first."""
    wanted, named = source.from_args(spec, args), policy_of(args)
    check_costs(args.costs)
    policy = named.build()
    work = prepare(wanted)

    def planned() -> tuple[Plan, Costs]:
        with work.clock.step("plan", f"planning {named.text}", policy):
            costs = prices(work, args.costs, args.training)
            return sk.plan(work.gm, policy, costs, on_cycle=args.on_cycle or "error"), costs

    return work, planned


def plan_file(args: Namespace) -> dict[str, Any] | None:
    """The data of the plan file that the command line names, ``None`` if it names a model. Makes no model yet.

    Raises:
        UsageError: SK601 for options that a plan file has decided.
        FileError: SK501 when it is no plan, SK504 when it cannot be read.
    """
    if not args.target.endswith(".json"):
        return None
    unfit = [name for name in ("stages", "policy", "costs", "training", "on_cycle") if getattr(args, name) is not None]
    if unfit:
        option = f"--{unfit[0].replace('_', '-')}"
        raise UsageError("SK601", f"{option} does not go with a plan file, which has decided", "Plan again with it.")
    return read_plan(args.target)


def read_plan(path: str) -> dict[str, Any]:
    """The data of a plan file; errors as of `plan_file`."""
    from splitkit.plans import file as planfile

    data = planfile.read(path)
    _require_plan(path, data)
    return data


def _from_file(args: Namespace, data: dict[str, Any]) -> tuple[Work, Plan, Costs]:
    if data.get("what") == TRAINING:
        raise UsageError(
            "SK601",
            f"{args.target} divides a training step into forward and backward, and this command cuts a forward",
            f"`splitkit run {args.target}` runs it. In Python: "
            "joint.split(splitkit.Plan.load(path, joint.graph_module.graph)).",
        )
    work = prepare(source.from_plan(args.target, data, args))
    with work.clock.step("plan", "reading the plan"):
        return work, decoded(work.gm.graph, args.target, data), prices(work, None, None)


def _require_plan(path: str, data: dict[str, Any]) -> None:
    """Refuse before the model is made."""
    if data.get("kind") != "splitkit plan":
        what = data.get("kind") or (f"what `splitkit {data['command']} --json` prints" if "command" in data else "")
        found = f": it is {what}" if isinstance(what, str) and what.isprintable() and what else ""
        raise FileError(
            "SK501", f"{path} is not a splitkit plan{found}", "Make one with `splitkit plan MODEL ... -o FILE`."
        )
    if not all(text.isprintable() for text in _strings(data)):  # they would reach the terminal
        raise FileError("SK501", f"{path} is damaged: it has control characters", "Plan again.")


def _strings(data: Any) -> Iterator[str]:
    """Every string in JSON data."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict | list):
        for item in (*data, *data.values()) if isinstance(data, dict) else data:
            yield from _strings(item)


def decoded(graph: fx.Graph, path: str, data: dict[str, Any]) -> Plan:
    """The plan in the data of a file, for the graph that it was made for.

    Raises:
        FileError: SK501 when the data is damaged, SK502 when the graph is another one, SK503 for another schema.
    """
    try:
        return sk.Plan.from_dict(graph, data)
    except SplitError:
        raise
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise FileError("SK501", f"{path} is damaged: {error}", "Plan again.") from error


def versions() -> dict[str, str]:
    """Who wrote a file."""
    import torch

    return {"splitkit": sk.__version__, "torch": torch.__version__}
