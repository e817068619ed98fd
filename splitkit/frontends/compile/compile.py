"""Train under a policy with ``torch.compile``: a backend that divides every graph by a policy, and `apply`."""

from __future__ import annotations

import copy
import logging
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd  # 2.11, 2.13, 2.15
from torch._dynamo.backends.debugging import boxed_nop  # 2.11, 2.13, 2.15
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException  # 2.11, 2.13, 2.15
from torch.fx import Node
from torch.nn.parameter import is_lazy

from splitkit._torch import version_of
from splitkit.checks import shown
from splitkit.costs import Costs, default
from splitkit.costs.named import by_inductor
from splitkit.engine.pair import Pair
from splitkit.errors import CostError, PlanError, PolicyError, SplitError
from splitkit.frontends import aot
from splitkit.frontends.aot import PartitionFn, divide_joint, joint_flow, with_model_line
from splitkit.frontends.capture.ambient_autocast import refuse_kept_casts
from splitkit.frontends.capture.capture_errors import capture_error, failed_run_error, require_module
from splitkit.frontends.capture.first_call import call_once, tables_restored
from splitkit.frontends.compile.changing_sizes import CompileHistory, SizeWatch
from splitkit.frontends.input_copies import copy_inputs
from splitkit.frontends.module_state import buffers_kept
from splitkit.frontends.trace_settings import scalar_writes_kept, without_meta_errors
from splitkit.graph.storages import parameters_and_buffers, storages_shown
from splitkit.late_policies import LatePolicies
from splitkit.plans.policy import PolicyLike, require_policy
from splitkit.training.peaks import Peaks, eager_plan
from splitkit.units import size

# A budget such as ``"least"``, ``"2GiB"`` or 0.5 in the place of a policy.


BudgetLike = str | int | float
"""What `splitkit.policies.Budget` takes as its budget."""


def as_policy(policy: PolicyLike | BudgetLike, of: Literal["peak", "saved"] = "peak") -> PolicyLike:
    """Return the policy; for a budget, a policy that limits the peak, or the saved bytes, to it.

    Raises:
        PolicyError: SK301 if it is neither, SK302 for a bad budget.
    """
    if isinstance(policy, str | int | float) and not isinstance(policy, bool):
        made: PolicyLike = LatePolicies.budget()(policy, of=of)
        return made
    require_policy(policy)
    return cast(PolicyLike, policy)


# The backend that ``torch.compile(model, backend="splitkit")`` finds by its name.
#
# torch looks for the name in the entry points of installed packages (group ``torch_dynamo_backends``, see
# torch/_dynamo/backends/registry.py: 2.11, 2.13, 2.15), so nothing needs to be imported or registered.


def splitkit_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """Compile a graph with the lowest peak that is found, as ``splitkit.backend("least")`` does.

    Args:
        gm: a graph of Dynamo.
        example_inputs: its inputs.
        options: the options of ``torch.compile``: ``{"inner": "inductor"}`` chooses what runs the halves.
        others: other arguments of ``torch.compile``, such as its mode, which are refused.

    Raises:
        PolicyError: SK302 for an option that this backend does not have.
    """
    given = {**(options or {}), **others}
    unknown = [name for name in given if name != "inner"]
    if unknown:
        raise PolicyError(
            "SK302",
            f"the backend 'splitkit' has no option {unknown[0]!r} (it is {shown(given[unknown[0]])})",
            "Its only option is inner ('eager', 'aot_eager', 'inductor'). For another budget or policy, write "
            "backend=splitkit.backend('2GiB').",
        )
    return backend("least", given.get("inner", "eager"))(gm, example_inputs)


Inner = Literal["eager", "aot_eager", "inductor"]
_INNER = ("eager", "aot_eager", "inductor")
Module = TypeVar("Module", bound=nn.Module)
_log = logging.getLogger("splitkit.frontends.compile")


class Backend:
    """A backend for ``torch.compile``; make one with `backend`.

    ``print(backend)`` shows, for each graph that takes gradients, its peak under the policy and in eager mode, as
    simulated, and the note of its plan. The logger ``splitkit.frontends.compile`` reports the same at the level INFO
    when a graph is compiled.

    Attributes:
        pairs: the pairs made so far, one for each graph that takes gradients. A model with more than one has graph
            breaks, or was compiled again for other inputs.
        written: number of a graph -> what is written to after it ran.
        watch: records these writes; ``None`` where they are not recorded.
    """

    def __init__(
        self, policy: PolicyLike, inner: Inner, costs: Callable[[fx.GraphModule], Costs] | None = None
    ) -> None:
        self.policy, self.inner = policy, inner
        self.costs = costs or (by_inductor if inner == "inductor" else default)
        self.pairs: list[Pair] = []
        self.written: Mapping[int, LaterWrites] = {}
        self.watch: WriteWatch | None = None
        self._names: list[list[str]] = []
        self._joints: dict[int, tuple[fx.Graph, Pair]] = {}
        self._history = CompileHistory()
        self._sizes: dict[int, SizeWatch] = {}
        self._fixed: set[str] = set()
        self.__name__ = "splitkit"  # the name of the backend in Dynamo's messages

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile one Dynamo graph."""
        refuse_kept_casts(gm)
        number = len(self._names)
        self._names.append([str(n.target) for n in gm.graph.find_nodes(op="placeholder")])
        with scalar_writes_kept(gm.graph, self._fixed):
            compiled = self._compiled(gm, example_inputs, partial(self.partition, number=number))
        if number in self._sizes:
            compiled = self._sizes[number].watching(gm, compiled)
        watch = self.watch
        if watch is None:
            return compiled

        def watched(*args: Any) -> Any:
            outputs = compiled(*args)
            watch.saw(number, args, outputs)
            return outputs

        return watched

    def _compiled(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], partition: PartitionFn
    ) -> Callable[..., Any]:
        if self.inner == "inductor":
            from splitkit.frontends.compile.inductor import compile_with

            return compile_with(gm, example_inputs, partition)
        # keep_inference_input_mutations: as in torch's own aot_eager (2.11, 2.13, 2.15)
        compiler = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
        return compiler(gm, example_inputs)

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, number: int = -1, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Divide the joint graph with this number, as AOTAutograd's ``partition_fn``."""
        known = self.written.get(number)
        policy = self._history.policy(self.policy)
        costs = partial(policy.costs, self.costs)
        pair = divide_joint(joint, inputs, num_fwd_outputs, policy, costs, known.nodes if known else lambda graph: ())
        self.pairs.append(pair)
        if (watch := policy.guard(pair)) is not None:
            self._sizes[number] = watch
        self._joints[number] = joint.graph, pair
        if _log.isEnabledFor(logging.INFO):
            _log.info("graph %d: %s", number, _told(pair))
        return pair.forward, pair.backward

    def __str__(self) -> str:
        lines = [f"graph {number}: {_told(pair)}" for number, (_, pair) in self._joints.items()]
        return "\n".join([f"splitkit backend, {len(self.pairs)} graphs with gradients", *lines])

    def overwritten_later(self, written: Mapping[int, LaterWrites]) -> list[str]:
        """Return the names of values that backward needs and that were written to after their graph had run."""
        found: list[str] = []
        for number, later in written.items():
            if number in self._joints:
                joint, pair = self._joints[number]
                found += overwritten_saves(pair, later.nodes(joint), self._names[number])
        return found


def _told(pair: Pair) -> str:
    """Return the peaks of a graph in eager mode and as divided, and the note of its plan."""
    assert pair.plan is not None
    planned = next(
        iter(pair.plan.places)
    ).graph.owning_module  # AOTAutograd's joint graph may have nodes more than once
    assert planned is not None
    flow = joint_flow(planned, pair.outputs)
    peaks = Peaks(flow)  # not of the halves: Inductor takes the values off their nodes
    eager, here = peaks.trace(eager_plan(flow)).peak, peaks.trace(pair.plan).peak
    note = f"; {pair.plan.note}" if pair.plan.note else ""
    return f"peak {size(here)} instead of {size(eager)} in eager mode{note}"


def backend(
    policy: PolicyLike | BudgetLike, inner: Inner = "eager", *, costs: Callable[[fx.GraphModule], Costs] | None = None
) -> Backend:
    """Return a backend for ``torch.compile(model, backend=splitkit.backend(policy))`` that divides training graphs.

    Each graph that Dynamo captures is divided separately; graphs without gradients are not divided.

    Args:
        policy: places nodes in ``"forward"`` and ``"backward"``, such as `splitkit.policies.SaveAll`; or a budget as
            for `splitkit.policies.Budget`: ``"least"`` for the lowest peak that is found, bytes (``"2GiB"``), or a
            share (0.5) of the range from there to eager mode's peak.
        inner: runs the halves. ``"eager"`` and ``"aot_eager"`` (torch's name for the same) run them op by op;
            ``"inductor"`` compiles them, after its own passes over the joint graph.
        costs: returns the costs of a joint graph. The default is FLOPs, and for ``"inductor"`` the time of the
            generated kernels on the device of the graph (`splitkit.costs.fused`).

    Raises:
        PolicyError: SK301 if ``policy`` is not a policy, SK302 for a bad ``inner`` or budget. A policy's refusal
            arrives as the ``inner_exception`` of Dynamo's ``BackendCompilerFailed``.
        CostError: SK323 if ``costs`` is not a function.
    """
    if inner not in _INNER:
        raise PolicyError("SK302", f"there is no inner compiler {inner!r}", f"Choose one of {', '.join(_INNER)}.")
    policy = as_policy(policy)
    if costs is not None and not callable(costs):
        raise CostError(
            "SK323",
            f"costs is a {type(costs).__name__}, but the graphs to price are made later",
            "Give a function of a graph: costs=lambda gm: splitkit.costs.roofline(gm, 'h200').",
        )
    return Backend(policy, inner, costs)


def apply(
    model: Module,
    policy: PolicyLike | BudgetLike,
    *args: Any,
    inner: Inner = "eager",
    costs: Callable[[fx.GraphModule], Costs] | None = None,
    fullgraph: bool = False,
    **kwargs: Any,
) -> Module:
    """Return the model, ready to train under a policy, with the same parameters, buffers and submodules.

    The result is a shallow copy whose calls are compiled with `backend`; its ``state_dict`` names, hooks, methods and
    attributes are the model's (``train()`` and ``eval()`` set the top-level flag only on the copy).
    ``copy.deepcopy`` and pickle give a plain model, as for any compiled module.

    Backward recomputes from the parameters and inputs as they are then, so do not write to them between forward and
    backward. Autograd raises an error for an in-place write, as in eager mode. A write to ``weight.data`` cannot be
    detected: backward then recomputes with the new weight, and uses either weight where it does not recompute.

    With example inputs, forward runs once immediately, so that capture and planning errors are raised here and not in
    the first step. Buffers, inputs and RNG state are restored; writes of the model to its parameters or Python
    attributes are not, and lazy modules are initialised. Example inputs that share memory keep sharing it. Other sizes
    are planned when they first occur, and never refused: a budget that cannot be kept is exceeded, with a warning that
    says by how many bytes.

    A model with graph breaks works, with a warning, and each of its graphs is divided separately. Backward then does
    not recompute from anything that a later graph writes to (such as a buffer that is updated after a graph break);
    this requires example inputs.

    Args:
        model: the model, in the mode (train or eval) in which it will run.
        policy: places nodes in ``"forward"`` and ``"backward"``; or a budget, as in `backend`.
        args: example inputs; optional.
        inner: runs the halves, as in `backend`.
        costs: returns the costs of a joint graph, as in `backend`.
        fullgraph: refuses a model with graph breaks.
        kwargs: example keyword inputs.

    Raises:
        CaptureError: SK401 if the model does not run on the example inputs, or Dynamo cannot capture it.
        SplitError: the policy or the engine refuses a graph of the example inputs; SK215 if backward needs a value that
            a later graph writes to, for which autograd would raise an error in backward.
    """
    require_module(model)
    divided = backend(policy, inner, costs=costs)
    applied = copy.copy(model)
    _compile(applied, divided, fullgraph)
    if not args and not kwargs:
        return applied
    written = _try(applied, divided, fullgraph, args, kwargs)
    # A later graph overwrites what a plan reads again in backward: plan once more, without those values.
    if divided.overwritten_later(written):
        divided = backend(policy, inner, costs=costs)
        divided.written = written
        _compile(applied, divided, fullgraph)
        if names := divided.overwritten_later(_try(applied, divided, fullgraph, args, kwargs)):
            raise PlanError(
                "SK215",
                f"backward needs {', '.join(names)}, which the model writes to in a later graph, after forward has "
                "saved it",
                "Read a copy (buffer.clone()), or write to it after backward.",
                names,
            )
    if len(divided.pairs) > 1:
        warnings.warn(
            f"{type(applied).__name__} has graph breaks: its {len(divided.pairs)} graphs are divided one by one; "
            "TORCH_LOGS=graph_breaks shows where",
            stacklevel=2,
        )
    return applied


def _compile(applied: nn.Module, divided: Backend, fullgraph: bool) -> None:
    # the attribute that nn.Module.compile sets: 2.11, 2.13, 2.15
    applied._compiled_call_impl = torch.compile(own_code(applied), backend=divided, fullgraph=fullgraph)


def _uncompiled(applied: nn.Module) -> nn.Module:
    model = copy.copy(applied)
    model._compiled_call_impl = None  # what nn.Module.compile sets: 2.11, 2.13, 2.15
    return model


def own_code(self: nn.Module) -> Callable[..., Any]:
    """Return a call of the module with a code object of its own.

    Dynamo caches what it compiled by code object, and gives up after eight entries (``recompile_limit``), which models
    of one class would otherwise share. The module is called ``self``, which Dynamo turns into module paths of nodes.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)


def _try(
    applied: nn.Module, divided: Backend, fullgraph: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Mapping[int, LaterWrites]:
    """Run forward once and restore the state; return what was written to after each graph had run."""
    divided.watch = watch = WriteWatch()
    try:
        # Dynamo does not run the hooks that make the parameters of lazy modules
        if any(map(is_lazy, parameters_and_buffers(applied).values())):
            with buffers_kept(applied):
                call_once(_uncompiled(applied), args, kwargs)
        inputs, named = copy_inputs((args, kwargs))
        with (
            buffers_kept(applied),
            tables_restored(applied),
            torch.random.fork_rng(),
            torch.enable_grad(),
            without_meta_errors(),
        ):
            applied(*inputs, **named)
            written = watch.stop()
    except BackendCompilerFailed as failed:
        if isinstance(failed.inner_exception, SplitError):
            raise failed.inner_exception from None
        raise
    except SplitError:
        raise
    except Exception as error:
        if (refusal := failed_run_error(_uncompiled(applied), args, kwargs)) is not None:
            raise refusal from refusal.__cause__
        if isinstance(error, TorchDynamoException):
            helps = "Leave out fullgraph=True: a model may have graph breaks." if fullgraph else ""
            raise with_model_line(capture_error(applied, "dynamo", error, helps, runs=False), error) from error
        raise
    finally:
        divided.watch = None
    return written


# Detect later graphs that overwrite what the backward of an earlier graph needs (SK215).
#
# Between two Dynamo graphs, or in the second, a model may write to a buffer, an input or an activation that the first
# one read. Eager autograd has saved what it needs by then; a plan that recomputes from that tensor would read the new
# value, which autograd refuses in backward::
#
#     h = linear(x) * buffer.exp()        graph 0: eager saves exp(buffer); a plan may save nothing, and take exp again
#     print("step")                       graph break
#     buffer.add_(1)                      graph 1


@dataclass(frozen=True)
class LaterWrites:
    """Positions of the inputs and outputs of a graph that were written to after it had run."""

    inputs: frozenset[int]
    outputs: frozenset[int]

    def nodes(self, joint: fx.Graph) -> list[Node]:
        """Return the nodes in that memory; all inputs or outputs, if AOTAutograd does not tell where one is."""
        given = joint.find_nodes(op="placeholder")
        by_position = {aot.input_position(n): n for n in given}
        outputs: Any = joint.output_node().args[0]
        found = [by_position.get(i) for i in self.inputs]
        places = [aot.position_of_output(joint, i) for i in self.outputs]
        nodes = {n for n in found if n is not None} | {outputs[i] for i in places if i is not None}
        if None in found:
            nodes |= {n for n in given if not aot.is_tangent(n)}
        if None in places:
            nodes |= {n for n in outputs[: aot.count_forward_outputs(joint)] if isinstance(n, Node)}
        memory = storages_shown(nodes)
        return [n for n in joint.nodes if n.op != "output" and not memory.isdisjoint(storages_shown([n]))]


@dataclass
class WriteWatch:
    """Records the versions of inputs and outputs of compiled graphs, by number of graph, until `stop`."""

    _runs: list[tuple[int, list[tuple[Any, ...]], list[list[int]]]] = field(default_factory=list)
    _on: bool = True

    def saw(self, number: int, inputs: Sequence[Any], outputs: Any) -> None:
        """Record the inputs and outputs of a graph that has run."""
        if self._on:
            values = [
                tuple(inputs),
                tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,),
            ]
            self._runs.append((number, values, [*map(_versions, values)]))

    def stop(self) -> Mapping[int, LaterWrites]:
        """Return number of graph -> its inputs and outputs that were written to after it had run."""
        self._on = False
        found: dict[int, LaterWrites] = {}
        for number, values, before in self._runs:
            changed = LaterWrites(*map(_changed, values, before))
            if changed.inputs or changed.outputs:
                known = found.get(number, LaterWrites(frozenset(), frozenset()))
                found[number] = LaterWrites(known.inputs | changed.inputs, known.outputs | changed.outputs)
        self._runs.clear()
        return found


def overwritten_saves(pair: Pair, written: Collection[Node], names: Sequence[str]) -> list[str]:
    """Return the saved values of a pair that share memory with ``written``; inputs go by ``names``."""
    nodes, memory = {n.name: n for n in pair.forward.graph.nodes}, storages_shown(written)
    found = [nodes[name] for name in pair.saved if not memory.isdisjoint(storages_shown([nodes[name]]))]
    positions = {n.name: aot.input_position(n) for n in found if n.op == "placeholder"}
    return [n.name if (i := positions.get(n.name)) is None or i >= len(names) else names[i] for n in found]


def _versions(values: Iterable[Any]) -> list[int]:
    return [version_of(v) if isinstance(v, Tensor) else 0 for v in values]


def _changed(values: Sequence[Any], before: list[int]) -> frozenset[int]:
    return frozenset(i for i, (now, then) in enumerate(zip(_versions(values), before, strict=True)) if now != then)
