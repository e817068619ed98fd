"""Capture a module and example inputs as a graph in which every value has ``meta["val"]``."""

from __future__ import annotations

import copy
import inspect
import logging
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.fx import _pytree as fx_pytree  # 2.11, 2.13, 2.15

from splitkit import _torch
from splitkit._torch import FakeTensor, attributes_of, pytree
from splitkit.engine.codegen.part_modules import pickle_by_nodes
from splitkit.engine.codegen.restore_modes import restore_modes_on_error
from splitkit.errors import CaptureError, SplitError
from splitkit.frontends.capture.ambient_autocast import autocast_recorded, refuse_autocast, refuse_kept_casts
from splitkit.frontends.capture.autograd_functions import (
    functions_as_nodes,
    refuse_lost_functions,
    refuse_module_hooks,
)
from splitkit.frontends.capture.capture_errors import (
    AS_MODULES,
    GradFlags,
    blocks_as_nodes,
    capture_error,
    describe_failure,
    quantized_part,
    require_module,
    restore_callers_grad,
    source_of,
)
from splitkit.frontends.capture.first_call import (
    are_real,
    attributes_restored,
    call_once,
    in_eval_mode,
    parameters_and_names,
    retry_after_call,
    warn_of_forward_hooks,
)
from splitkit.frontends.capture.symbolic_trace import refuse_seeding, trace
from splitkit.frontends.capture.unfold_regions import inline_regions, inlined, restore_by_value
from splitkit.frontends.output_classes import is_cache, outputs_opened, register_caches_among, state_tensors
from splitkit.frontends.sharded_step import has_shards, refuse_fsdp, refuse_sharded_inputs
from splitkit.frontends.trace_settings import with_attention_on_meta, without_meta_errors, without_partial_graph
from splitkit.graph.storages import keep_values, mark_repeated_inputs

# Checks that export adds to the graph. They hold by construction, and would fail in a part on another device.
_EXPORT_CHECKS: frozenset[Any] = frozenset({torch.ops.aten._assert_tensor_metadata.default})


def capture_forward(
    model: nn.Module | ExportedProgram, args: tuple[Any, ...], kwargs: dict[str, Any], how: str, dynamic: bool
) -> fx.GraphModule:
    """Return the graph of a forward; see `splitkit.capture`."""
    if isinstance(model, ExportedProgram):
        refuse_lost_functions(model)
        return _from_exported(model)
    if isinstance(model, fx.GraphModule) and not args and not kwargs:
        return inlined(model)
    ways: dict[str, Callable[[], fx.GraphModule]] = {
        "export": lambda: _exported(model, args, kwargs, dynamic),
        "symbolic_trace": lambda: trace(model, args, kwargs),
    }
    if how not in ways:
        raise CaptureError("SK401", f"there is no capture method named {how!r}", f"Choose one of {', '.join(ways)}.")
    require_module(model)
    if sharded := has_shards(model):
        _refuse_shards(model, args, kwargs, how, dynamic)
        ways["export"] = lambda: _of_shards(model, args, kwargs)
    given = args, kwargs
    register_caches_among(given)
    args, kwargs = inputs_on_meta(model, copy_repeated(given))
    refuse_module_hooks(model)
    warn_of_forward_hooks(model, how)
    if how != "export":
        refuse_autocast("symbolic_trace loses it", 'Use how="export", which records it, or leave the block.')
    with autocast_recorded(model), capture_conditions(), buffers_on_meta(model) as values:
        try:
            gm = retry_after_call(model, args, kwargs, ways[how])
            keep_values(gm, values)
            pickle_by_nodes(gm)
            _note_repeated(gm, how, model, *given)
            return gm
        except CaptureError as refusal:
            note_reached(refusal, refusal)
            raise
        except Exception as error:
            # of shards none is looked for: trials would meet in collectives that the other ranks do not run
            helps = "" if sharded else _find_remedy(model, args, kwargs, dynamic, how)
            why = capture_error(model, "AOTAutograd" if sharded else how, error, helps, not helps.startswith(RAISES))
            if sharded:
                from splitkit.frontends import aot  # it loads AOTAutograd

                why = aot.with_model_line(why, error)
            note_reached(why, error)
            raise why from error


def _refuse_shards(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], how: str, dynamic: bool) -> None:
    if how != "export" or dynamic:
        raise CaptureError(
            "SK401",
            f"{type(model).__name__} has parameters that are sharded over ranks: there is one way, with fixed sizes",
            "Leave out how= and dynamic=.",
        )
    refuse_fsdp(model)
    refuse_sharded_inputs((args, kwargs))


def _of_shards(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Return the graph of one rank's forward of a model with sharded parameters."""
    from splitkit.frontends import sharded_forward  # it loads AOTAutograd

    with outputs_opened(model):
        return _finished(sharded_forward.forward_of_shards(model, args, kwargs))


def _find_remedy(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool, how: str) -> str:
    """Return a remedy that was tried and works, or the error that the model raises without capture, or ``""``."""
    if not are_real(model, (args, kwargs)):
        return ""
    with attributes_restored(model), silenced():
        try:
            copied = copy.deepcopy(model)
        except Exception:
            return ""  # a model that holds results of autograd cannot be copied, and trials might change the original
        try:
            call_once(copied, args, kwargs)
        except Exception as error:
            raised = f"{RAISES} {describe_failure(copied, error, args, kwargs)}."
            plain = succeeds(lambda: _exported(copied.requires_grad_(False), args, kwargs, dynamic))
            return f"{raised} It runs without gradients: call model.requires_grad_(False) first." if plain else raised
        if how != "export":
            return 'Use how="export".' if succeeds(lambda: _exported(model, args, kwargs, False)) else ""
        if dynamic and succeeds(lambda: _exported(model, args, kwargs, False)):
            return "Capture with dynamic=False."
        if model.training and succeeds(lambda: _exported(model, args, kwargs, dynamic), in_eval_mode(model)):
            return IN_EVAL_MODE
        if succeeds(lambda: _from_exported(torch.export.export(model, args, kwargs, strict=False))):
            return "Use splitkit.capture(torch.export.export(model, args, kwargs))."
        ids = kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and kwargs.get("attention_mask") is None:
            masked = {**kwargs, "attention_mask": torch.ones_like(ids)}
            if succeeds(lambda: _exported(model, args, masked, dynamic)):
                return "Pass attention_mask, too: torch.ones_like(input_ids) if nothing is padding."
        if quantized_part(model) is not None and succeeds(lambda: trace(model, args, kwargs)):
            return AS_MODULES
    return ""


RAISES = "Called without capture, the model raises"
"""The beginning of the remedy for a model that does not run."""
IN_EVAL_MODE = "Call model.eval() first: in eval mode the model is captured."
"""The remedy where eval mode was tried and captures the model."""


@contextmanager
def silenced() -> Iterator[None]:
    """Silence logs, warnings and output of trials that may fail."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def succeeds(capture: Callable[[], object], within: AbstractContextManager[None] | None = None) -> bool:
    """Return whether a capture succeeds; it is tried silently."""
    try:
        with silenced(), within or nullcontext():
            capture()
    except Exception:
        return False
    return True


def capture_by_export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """Return what `capture` returns, or raise what it raises, without looking for a remedy."""
    refuse_module_hooks(model)
    with capture_conditions():
        return retry_after_call(model, args, kwargs, lambda: _exported(model, args, kwargs, False))


def copy_repeated(inputs: Any) -> Any:
    """Copy the second use of a tensor among inputs: export would make one input of both, whatever is passed later."""
    seen: set[int] = set()

    def copy_of_known(leaf: torch.Tensor) -> torch.Tensor:
        known = id(leaf) in seen
        seen.add(id(leaf))
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if known else leaf

    return pytree.tree_map_only(torch.Tensor, copy_of_known, inputs)


def _note_repeated(
    gm: fx.GraphModule, how: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Mark inputs that were one tensor: export has a placeholder for each leaf, ``symbolic_trace`` for each name."""
    inputs, leaves = gm.graph.find_nodes(op="placeholder"), pytree.tree_leaves((args, kwargs))
    if len(inputs) == len(leaves) and isinstance(getattr(gm, "_in_spec", None), pytree.TreeSpec):
        mark_repeated_inputs(zip(inputs, leaves, strict=True))
    elif how == "symbolic_trace":
        named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        mark_repeated_inputs((node, named.get(str(node.target))) for node in inputs)


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: bool) -> fx.GraphModule:
    shapes = _all_dynamic(model, args, kwargs) if dynamic else None
    flags, owned = GradFlags(model), parameters_and_names(model)
    with (
        _marks_removed((args, kwargs)),
        without_partial_graph(),
        refuse_seeding(),
        blocks_as_nodes(flags),
        functions_as_nodes() as put_functions_in,
        outputs_opened(model),
    ):
        program = torch.export.export(model, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
    if parameters_and_names(model) != owned:
        raise CaptureError("SK401", "the model creates parameters or buffers in forward", "Create them in __init__.")
    gm = _from_exported(program)
    put_functions_in(gm)
    flags.check(gm)
    refuse_kept_casts(gm)
    return gm


@contextmanager
def _marks_removed(inputs: Any) -> Iterator[None]:
    """Take from inputs what torch notes on them: if an export fails, their sizes would vary in each later one."""
    with ExitStack() as notes:
        for leaf in (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)):
            notes.enter_context(patch.dict(leaf.__dict__))
        yield


def _all_dynamic(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return dynamic shapes with ``Dim.AUTO`` for every size of every tensor among the inputs.

    Of a cache only sequences and positions, ``[sequences, heads, positions, head_dim]``; a single head is not a
    variable, nor of a mask ``[sequences, 1, query, positions]``. Of states of constant size only the sequences.
    """
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf in pytree.tree_leaves((args, kwargs), is_leaf=is_cache):
        cached, states = is_cache(leaf), {id(state) for state in state_tensors(leaf)}
        for tensor in pytree.tree_leaves(leaf):
            if isinstance(tensor, torch.Tensor):
                dims = [*range(1 if id(tensor) in states else tensor.ndim)]
                if tensor.ndim == 4:
                    dims = [d for d in dims if (d in (0, 2) if cached else d == 0 or tensor.shape[d] != 1)]
                shapes[tensor] = dict.fromkeys(dims, torch.export.Dim.AUTO)
    return shapes.dynamic_shapes(model, args, dict(kwargs))  # type: ignore[no-untyped-call]


def _from_exported(program: ExportedProgram) -> fx.GraphModule:
    gm = program.module(check_guards=False)  # 2.11, 2.13, 2.15
    inline_regions(gm)
    restore_callers_grad(gm.graph)
    for body in gm.modules():  # branches of control flow, which Dynamo traced
        if isinstance(body, fx.GraphModule) and body is not gm:
            restore_by_value(body.graph)
            restore_modes_on_error(body.graph)
            body.recompile()
    _drop_checks(gm)
    return _finished(gm)


def _finished(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a captured graph that restores modes, checks its inputs and can be pickled."""
    restore_modes_on_error(gm.graph)
    gm.recompile()
    _keep_input_check(gm)
    # Export sets methods and a tracer that cannot be pickled.
    gm.__dict__.update(train=_refuse_mode, eval=_refuse_mode, _tracer_cls=None)
    gm.graph._tracer_cls = None
    return gm


def _refuse_mode(mode: bool = True) -> None:
    """Refuse ``train()`` and ``eval()``: the graph holds what dropout and BatchNorm did at capture."""
    raise NotImplementedError("The mode is fixed at capture: call model.train() or model.eval(), and capture again.")


def _drop_checks(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.target in _EXPORT_CHECKS or (node.op == "call_module" and node.target == "_guards_fn"):
            gm.graph.erase_node(node)
    if hasattr(gm, "_guards_fn"):
        del gm._guards_fn


def _keep_input_check(gm: fx.GraphModule) -> None:
    """Replace export's hooks by one that refuses inputs of other sizes and survives copies.

    Export's hooks are closures, which cannot be pickled and which ``copy.deepcopy`` loses.
    """
    gm._forward_pre_hooks.clear()
    gm._forward_pre_hooks_with_kwargs.clear()
    gm._forward_hooks.clear()
    gm._forward_hooks_always_called.clear()
    check = InputCheck(gm)
    check.watch(gm)
    # Copies are made by GraphModule.__deepcopy__, which calls these: 2.11, 2.13, 2.15.
    gm._register_deepcopy_hook(check.watch)


@contextmanager
def capture_conditions() -> Iterator[None]:
    """Turn grad mode on and autocast off, as every capture has them, and restore the RNG state and levels of vmap.

    On ``meta``, integers are counted as floats, as CPUs need: transformers does so for its experts where it sees a CPU.
    """
    state = torch.get_rng_state()
    try:
        with (
            _torch.levels_closed(),
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            warnings.catch_warnings(),
            without_meta_errors(),
            with_attention_on_meta(),
            patch.object(torch, "histc", _countable(torch.histc)),
        ):
            # silence torch's own deprecations, and that recurrent layers list their weights anew: the graph reads the
            # parameters themselves (2.13); warnings about the model still come through
            warnings.filterwarnings("ignore", r"The tensor attributes? .*\._flat_weights\[", UserWarning)
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        torch.set_rng_state(state)


def _countable(histc: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def counted(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if values.device.type != "meta" or values.is_floating_point():
            return histc(values, *args, **kwargs)
        return histc(values.float(), *args, **kwargs).to(values.dtype)

    return counted


# Recovers the partial graph of a failed capture for its error: what the tracer had recorded so far.


_ROOT = "_export_root"
"""The name of the model inside the wrapper that torch.export traces (2.11, 2.13, 2.15); a test fails if it changes."""


def note_reached(refusal: SplitError, cause: BaseException) -> None:
    """Set ``reached`` and ``stopped_at`` of a `CaptureError`, as far as the traceback of ``cause`` tells.

    Nothing here may hide why the capture failed, so a graph that cannot be copied is left out.
    """
    if not isinstance(refusal, CaptureError):
        return
    graphs = [tracer for tracer in _tracers(cause) if any(n.op.startswith("call") for n in tracer.graph.nodes)]
    if not graphs:
        return
    try:
        tracer = max(graphs, key=lambda tracer: len(tracer.graph.nodes))
        refusal.reached = _copied(tracer)
        refusal.stopped_at = source_of(cause)
    except Exception:
        refusal.reached = None


def _tracers(error: BaseException) -> Iterator[fx.Tracer]:
    """Yield the tracers in the frames of an error and of what caused it."""
    current: BaseException | None = error
    while current is not None:
        for frame, _ in traceback.walk_tb(current.__traceback__):
            for value in list(frame.f_locals.values()):
                if isinstance(value, fx.Tracer) and isinstance(getattr(value, "graph", None), fx.Graph):
                    yield value
        current = current.__cause__ or current.__context__


def _copied(tracer: fx.Tracer) -> fx.GraphModule:
    """Return the graph of a tracer without the nodes at its end that make no tensor: the value that stopped it."""
    graph = fx.Graph()
    kept = list(tracer.graph.nodes)
    while kept and not isinstance(kept[-1].meta.get("val", torch.Tensor()), torch.Tensor):
        kept.pop()
    made: dict[fx.Node, fx.Node] = {}
    for node in kept:
        copy = made[node] = graph.node_copy(node, made.__getitem__)
        if stack := copy.meta.get("nn_module_stack"):
            copy.meta["nn_module_stack"] = OrderedDict(
                (key, (path.removeprefix(_ROOT).removeprefix("."), kind)) for key, (path, kind) in stack.items() if path
            )
    graph.output(made[kept[-1]] if kept else ())
    root = tracer.root if isinstance(tracer.root, nn.Module) else nn.Module()
    return fx.GraphModule(root, graph)


# Captures a model whose parameters are on ``meta``: inputs and buffers go there too, and buffers keep their values.
#
# A checkpoint has no buffers that are in no state dict, such as the ``inv_freq`` of rotary embeddings, so their values
# must be known when weights are loaded. A buffer that is still real when the model is captured keeps its value; the
# models of transformers compute theirs again (``_init_weights``).


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model has parameters, all on ``meta``."""
    found = list(model.parameters())
    return bool(found) and all(p.is_meta and not isinstance(p, FakeTensor) for p in found)


def inputs_on_meta(model: nn.Module, inputs: Any) -> Any:
    """Return inputs for a model, moved to ``meta`` if its parameters are there."""
    if not is_on_meta(model) or any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(inputs)):
        return inputs
    return pytree.tree_map_only(torch.Tensor, _on_meta, inputs)


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Move the buffers of a model to ``meta`` in a ``with`` block, if its parameters are there.

    Yields:
        Name of a buffer that is in no state dict -> its value on the CPU, as far as it is known.
    """
    values: dict[str, torch.Tensor] = {}
    if not is_on_meta(model):
        yield values
        return
    moved: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    for path, module in model.named_modules(remove_duplicate=False):
        held = attributes_of(module)
        again = None
        for name, buffer in held.buffers.items():
            if buffer is None or isinstance(buffer, FakeTensor):
                continue
            if name in held.unsaved:
                again = _computed_again(model, module) if again is None and buffer.is_meta else again
                known = (again or {}).get(name) if buffer.is_meta else buffer.detach().cpu().clone()
                if known is not None:
                    values[f"{path}.{name}".lstrip(".")] = known
            if not buffer.is_meta:
                moved.setdefault(id(buffer), _on_meta(buffer))
                replaced.append((held.buffers, name, buffer))
    try:
        for table, name, buffer in replaced:
            table[name] = moved[id(buffer)]
        yield values
    finally:
        for table, name, buffer in replaced:
            table[name] = buffer


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return tensor.detach().to("meta").requires_grad_(tensor.requires_grad)


def _computed_again(model: nn.Module, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that the model's own initialization of a module fills, by name.

    It runs on two copies of the module filled with different numbers: what differs afterwards was not filled.
    """
    around = [m for m in model.modules() if any(inner is module for inner in m.modules())]
    fill: Any = next((m for m in reversed(around) if callable(getattr(m, "_init_weights", None))), None)
    if fill is None:
        return {}
    made: list[dict[str, torch.Tensor]] = []
    for number in (0, 1):
        copied = copy.copy(module)
        tables = attributes_of(copied)
        fresh = {
            name: torch.full(b.shape, number, dtype=b.dtype, device="cpu") if b is not None else None
            for name, b in tables.buffers.items()
        }
        copied.__dict__["_buffers"] = fresh
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
                fill._init_weights(copied)
        except Exception:
            # The initialization is the model's own code, which may need what a bare module lacks.
            return {}
        made.append({name: b for name, b in fresh.items() if b is not None})
    first, second = made
    return {name: b for name, b in first.items() if torch.equal(b, second[name])}


# Check the inputs of a captured graph, with a hook that Dynamo and strict export can trace.


Size = int | str | None
"""The size of a dimension: fixed, the name of a symbol, or ``None`` where only torch's own check knows."""


Expected = tuple[Size, ...] | float | str | None
"""What an input must be: a tensor of these sizes, or the number or string that was fixed at capture; else ``None``."""


class InputCheck:
    """Refuses inputs that differ from the example in structure, fixed sizes or Python values.

    It needs nothing of the module but its graph and signature, so that the parent of a split can have it too. Where
    Dynamo traces the check, sizes and values are compared at compile time and become guards.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        inputs = gm.graph.find_nodes(op="placeholder")
        self.spec: Any = gm._in_spec
        self.ranges: Any = dict(getattr(gm, "range_constraints", None) or {})
        self.limits = _limits(self.ranges)
        self.wanted = [_expected(node) for node in inputs]
        # whether `wanted` covers every check of the inputs
        open_sizes = any(isinstance(wanted, tuple) and None in wanted for wanted in self.wanted)
        self.is_whole = not open_sizes and not any(isinstance(n.meta.get("val"), torch.SymInt) for n in inputs)

    def watch(self, gm: fx.GraphModule) -> None:
        """Register the check on ``gm``, so that modules unpickled from it have the check too."""
        gm.register_forward_pre_hook(self, with_kwargs=True)
        pickle_by_nodes(gm)

    def __call__(self, gm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise RuntimeError for inputs of another size or value, ValueError for another structure."""
        if torch.compiler.is_compiling():
            self._require(_leaves(args, kwargs, self.spec))
            return
        # The usual case: everything as in the example, and nothing that only torch's check knows.
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec == self.spec and self.is_whole and not self._refusal(leaves):
            return
        self._look_closely(gm, args, kwargs)

    def _look_closely(self, gm: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run torch's own check, which is slow and names the input; then ours, for graphs without values."""
        from torch.export._unlift import _check_input_constraints_pre_hook  # 2.11, 2.13, 2.15

        read = SimpleNamespace(validate_inputs=True, range_constraints=self.ranges, graph=gm.graph, _in_spec=self.spec)
        _check_input_constraints_pre_hook(read, args, kwargs)  # type: ignore[no-untyped-call]
        self._require(_leaves(args, kwargs, self.spec))

    def _require(self, leaves: Sequence[Any]) -> None:
        if refusal := self._refusal(leaves):
            raise RuntimeError(refusal)

    def _refusal(self, leaves: Sequence[Any]) -> str:
        """Return what is wrong with inputs of the right structure; empty if nothing is."""
        sizes: dict[str, Any] = {}
        for i in range(min(len(self.wanted), len(leaves))):
            if refusal := self._input_refusal(self.wanted[i], leaves[i], sizes):
                return f"Expected input {i} {refusal}"
        return ""

    def _input_refusal(self, wanted: Expected, given: Any, sizes: dict[str, Any]) -> str:
        if wanted is None:
            return ""
        if not isinstance(wanted, tuple):
            same = type(given) is type(wanted) and given == wanted
            return "" if same else f"to be equal to {wanted}, as at capture"
        if not isinstance(given, torch.Tensor):
            return "to be a tensor"
        if len(wanted) != given.dim():
            return f"to have {len(wanted)} dimensions, as at capture"
        for dim, size in enumerate(wanted):
            if refusal := self._size_refusal(size, given.shape[dim], sizes):
                return f"at shape[{dim}] {refusal}"
        return ""

    def _size_refusal(self, wanted: Size, given: int, sizes: dict[str, Any]) -> str:
        if wanted is None:
            return ""
        if isinstance(wanted, int):
            return "" if given == wanted else f"to be equal to {wanted}, as at capture"
        low, high = self.limits.get(wanted, (None, None))
        if wanted in sizes and given != sizes[wanted]:
            return "to be equal to another size, as at capture"
        sizes[wanted] = given
        if low is not None and given < low:
            return f"to be >= {low}"
        return f"to be <= {high}" if high is not None and given > high else ""


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any], spec: Any) -> list[Any]:
    """Return the inputs in the order of the signature."""
    if len(args) != spec.child(0).num_children:
        raise RuntimeError("The graph takes other positional inputs: give the ones that it was captured with.")
    return list(fx_pytree.tree_flatten_spec((args, kwargs), spec))


def _expected(node: fx.Node) -> Expected:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return tuple(map(_size, value.shape))
    return value if isinstance(value, (int, float, str)) else None


def _size(size: int | torch.SymInt) -> Size:
    if isinstance(size, int):
        return size
    return str(size.node.expr) if size.node.expr.is_Symbol else None


def _limits(ranges: Mapping[Any, Any]) -> dict[str, tuple[int | None, int | None]]:
    """Return symbol -> (lower bound, upper bound), ``None`` where a bound is missing."""

    def bound(value: Any) -> int | None:
        return int(value) if getattr(value, "is_Integer", False) or isinstance(value, int) else None

    return {str(symbol): (bound(r.lower), bound(r.upper)) for symbol, r in dict(ranges).items()}
