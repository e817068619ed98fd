"""Policies for ``torch.compile``: a backend that divides every graph by a policy, and models that train under one."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd  # 2.11, 2.13, 2.15
from torch._dynamo.backends.debugging import boxed_nop  # 2.11, 2.13, 2.15
from torch._dynamo.exc import BackendCompilerFailed  # 2.11, 2.13, 2.15

from splitkit.costs import Costs, default
from splitkit.costs.named import by_inductor
from splitkit.engine.pair import Pair
from splitkit.errors import CostError, PolicyError, SplitError
from splitkit.frontends.afterwards import WriteWatch, Written, needed, refused
from splitkit.frontends.aot import PartitionFn, divide_joint
from splitkit.frontends.capture import put_back
from splitkit.frontends.capture_errors import require_module
from splitkit.frontends.changingsizes import Recompiled, SizeWatch
from splitkit.frontends.firstcall import call_once
from splitkit.frontends.freshinputs import fresh
from splitkit.frontends.modulestate import buffers_kept, is_uninitialised, owned_dicts
from splitkit.plans.policy import PolicyLike, require_policy

Inner = Literal["eager", "aot_eager", "inductor"]
_INNER = ("eager", "aot_eager", "inductor")
Module = TypeVar("Module", bound=nn.Module)


class Backend:
    """What `backend` makes.

    Attributes:
        pairs: what it made so far: one a graph that takes gradients. More than one a model means graph breaks, or
            inputs for which the model was compiled again.
        written: number of a graph -> what of it is written to after it has run (`splitkit.frontends.afterwards`).
        watch: what learns that; ``None`` if nobody asks.
    """

    def __init__(
        self, policy: PolicyLike, inner: Inner, costs: Callable[[fx.GraphModule], Costs] | None = None
    ) -> None:
        self.policy, self.inner = policy, inner
        self.costs = costs or (by_inductor if inner == "inductor" else default)
        self.pairs: list[Pair] = []
        self.written: Mapping[int, Written] = {}
        self.watch: WriteWatch | None = None
        self._names: list[list[str]] = []
        self._joints: dict[int, tuple[fx.Graph, Pair]] = {}
        self._recompiled = Recompiled()
        self._sizes: dict[int, SizeWatch] = {}
        self.__name__ = "splitkit"  # by which Dynamo names it in messages

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        """Compile one graph of Dynamo's."""
        number = len(self._names)
        self._names.append([str(n.target) for n in gm.graph.find_nodes(op="placeholder")])
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
            from splitkit.frontends.inductor import compile_with

            return compile_with(gm, example_inputs, partition)
        # keep_inference_input_mutations: as torch's own aot_eager has it (2.11, 2.13, 2.15)
        compiler = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
        return compiler(gm, example_inputs)

    def partition(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, number: int = -1, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's ``partition_fn``, for the graph of that number."""
        known = self.written.get(number)
        policy = self._recompiled.policy(self.policy)
        costs = partial(policy.costs, self.costs)
        pair = divide_joint(joint, inputs, num_fwd_outputs, policy, costs, known.nodes if known else lambda graph: ())
        self.pairs.append(pair)
        if (watch := policy.guard(pair)) is not None:
            self._sizes[number] = watch
        self._joints[number] = joint.graph, pair
        return pair.forward, pair.backward

    def needed_later(self, written: Mapping[int, Written]) -> list[str]:
        """What backward takes of what was written to after the graph had run."""
        found: list[str] = []
        for number, later in written.items():
            if number in self._joints:
                joint, pair = self._joints[number]
                found += needed(pair, later.nodes(joint), self._names[number])
        return found


def backend(
    policy: PolicyLike, inner: Inner = "eager", *, costs: Callable[[fx.GraphModule], Costs] | None = None
) -> Backend:
    """A backend for ``torch.compile(model, backend=splitkit.backend(policy))`` that divides forward from backward.

    Each graph that Dynamo captures is divided on its own; graphs that take no gradient are not divided.

    Args:
        policy: places nodes in ``"forward"`` and ``"backward"``, such as `splitkit.policies.SaveAll`.
        inner: what runs the halves: ``"eager"`` runs them operator by operator, and ``"aot_eager"``, torch's name for
            that, does the same; ``"inductor"`` compiles them, after its own passes over the joint graph.
        costs: makes prices for a joint graph. By default FLOPs, and for ``"inductor"`` what the generated kernels take
            on the device of the graph (`splitkit.costs.fused`).

    Raises:
        PolicyError: SK301 for what is no policy, SK302 for another ``inner``. What the policy refuses arrives as the
            ``inner_exception`` of Dynamo's ``BackendCompilerFailed``.
        CostError: SK323 for costs that were made already.
    """
    if inner not in _INNER:
        raise PolicyError("SK302", f"there is no inner compiler {inner!r}", f"Choose one of {', '.join(_INNER)}.")
    require_policy(policy)
    if costs is not None and not callable(costs):
        raise CostError(
            "SK323",
            f"costs is a {type(costs).__name__}; the graphs to price are made later",
            "Give a function of a graph: costs=lambda gm: splitkit.costs.roofline(gm, 'h200').",
        )
    return Backend(policy, inner, costs)


def apply(
    model: Module,
    policy: PolicyLike,
    *args: Any,
    inner: Inner = "eager",
    costs: Callable[[fx.GraphModule], Costs] | None = None,
    fullgraph: bool = False,
    **kwargs: Any,
) -> Module:
    """The model, ready to train under a policy: called like it, with the very same parameters, buffers and submodules.

    A shallow copy whose calls are compiled with `backend`; names in ``state_dict``, hooks, methods and attributes are
    the model's (``train()`` and ``eval()`` set the flag of the whole on the copy only). ``copy.deepcopy`` and pickle
    give a plain model, as of any compiled module.

    What backward computes again it computes from parameters and inputs as they are then: write to none of them between
    forward and backward. In place, autograd refuses it, as in eager mode. A write to ``weight.data`` nobody can see:
    the gradients are then those of the new weight where backward computes again, and of either where it does not.

    With example inputs, forward runs once now, so that what cannot be captured or planned is refused here rather than
    in the first step; buffers, inputs and random state are put back (what a model writes to its parameters or Python
    attributes while it runs is not, and lazy modules are made). Examples that share memory stay so. Other sizes are
    planned when they come, and then nothing is refused: a budget that cannot be kept is exceeded, with one warning that
    says by how many bytes. A model that falls into several graphs works, with a warning, and each of them is
    divided on its own; what a later graph writes to (a buffer that is updated after a graph break) is then not read
    again in backward. That is only known with example inputs.

    Args:
        model: the model, in the mode (train or eval) that is meant.
        policy: places nodes in ``"forward"`` and ``"backward"``.
        args: example inputs, or none.
        inner: as in `backend`.
        costs: as in `backend`.
        fullgraph: refuse a model that falls into several graphs.
        kwargs: example keyword inputs.

    Raises:
        SplitError: what the policy or the engine refuses on the graph of the example inputs; SK215 where backward
            needs what a later graph writes to, as autograd would refuse in backward.
    """
    require_module(model)
    divided = backend(policy, inner, costs=costs)
    applied = copy.copy(model)
    _compile(applied, divided, fullgraph)
    if not args and not kwargs:
        return applied
    written = _try(applied, divided, args, kwargs)
    if divided.needed_later(written):
        divided = backend(policy, inner, costs=costs)
        divided.written = written
        _compile(applied, divided, fullgraph)
        if names := divided.needed_later(_try(applied, divided, args, kwargs)):
            raise refused(names)
    if len(divided.pairs) > 1:
        warnings.warn(
            f"{type(applied).__name__} falls into {len(divided.pairs)} graphs, each divided on its own: "
            "TORCH_LOGS=graph_breaks says where",
            stacklevel=2,
        )
    return applied


def _compile(applied: nn.Module, divided: Backend, fullgraph: bool) -> None:
    # What nn.Module.compile sets (2.11, 2.13, 2.15).
    applied._compiled_call_impl = torch.compile(_own_code(applied), backend=divided, fullgraph=fullgraph)


def _uncompiled(applied: nn.Module) -> nn.Module:
    model = copy.copy(applied)
    model._compiled_call_impl = None  # what nn.Module.compile sets: 2.11, 2.13, 2.15
    return model


def _own_code(self: nn.Module) -> Callable[..., Any]:
    """A function with code of its own: Dynamo keeps what it compiled by code, and gives up after eight.

    The module is called ``self`` in it, from which Dynamo makes the module paths of nodes.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return self._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    return types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)


def _try(applied: nn.Module, divided: Backend, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[int, Written]:
    """Run forward once and leave no trace; what was written to after a graph had run that had to do with it."""
    divided.watch = watch = WriteWatch()
    if is_uninitialised(applied):  # as eager mode makes its parameters; Dynamo goes past the hooks that would show it
        with buffers_kept(applied):
            call_once(_uncompiled(applied), args, kwargs)
    args, kwargs = fresh((args, kwargs))
    try:
        with buffers_kept(applied), put_back(owned_dicts(applied)), torch.random.fork_rng(), torch.enable_grad():
            applied(*args, **kwargs)
            written = watch.stop()
    except BackendCompilerFailed as failed:
        if isinstance(failed.inner_exception, SplitError):
            raise failed.inner_exception from None
        raise
    finally:
        divided.watch = None
    return written
