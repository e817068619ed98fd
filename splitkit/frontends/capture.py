"""The door in: from a module and example inputs to a graph whose every value has ``meta["val"]``."""

from __future__ import annotations

import copy
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from splitkit._torch import pytree
from splitkit.engine.restoring import restore_modes_on_error
from splitkit.errors import CaptureError
from splitkit.frontends.capture_errors import capture_error, first_line, require_module
from splitkit.frontends.export_blocks import blocks_as_nodes, restore_callers_grad
from splitkit.frontends.firstcall import after_a_call, are_real, as_found, call_once, in_eval_mode, owned_by
from splitkit.frontends.functions import functions_as_nodes, refuse_lost_functions, refuse_module_hooks
from splitkit.frontends.gradflags import GradFlags
from splitkit.frontends.inputchecks import InputCheck
from splitkit.frontends.outputs import outputs_opened
from splitkit.frontends.quietlogs import without_meta_errors, without_partial_graph
from splitkit.frontends.symbolic_trace import trace
from splitkit.frontends.unfold_regions import inline_regions, inlined, restore_by_value
from splitkit.graph.storages import mark_repeated

# Checks that export writes into the graph. They hold by construction there, and would fail a part on another device.
_EXPORT_CHECKS: frozenset[Any] = frozenset({torch.ops.aten._assert_tensor_metadata.default})


def capture(
    model: nn.Module | ExportedProgram, *args: Any, how: str = "export", dynamic: bool = False, **kwargs: Any
) -> fx.GraphModule:
    """The graph that ``model(*args, **kwargs)`` runs, with ``meta["val"]`` on every node that has a value.

    A graph that was made elsewhere is given without inputs. torch.export hides the nodes of a ``no_grad`` or
    ``autocast`` block behind a single one; to split them, take the graph that ``capture`` makes of it::

        gm = torch.export.export(model, inputs).module()     wrap_with_autocast(..., body, x)      1 node
        gm = splitkit.capture(gm)                            enter; 200 nodes of body; exit        200 nodes

    The graph module is called like the model and holds the *same* parameters and buffers, not copies: a step taken on
    one is seen by the other. Training mode, dropout, tied weights and module paths (``meta["nn_module_stack"]``) are
    kept; ``no_grad`` and ``autocast`` blocks become enter and exit nodes. Neither the model's buffers nor the random
    number generators are touched.

    A ``torch.autograd.Function`` is one node that calls it, so that its backward stays. An output may be of any class
    that ``copy.copy`` can copy (a ``DynamicCache``): it is registered with ``torch.utils._pytree``, for the process.
    A model that hooks submodules or makes buffers at its first call, and fails for that, is called once for real.

    Python values among the inputs, and sizes unless ``dynamic``, are fixed at capture: the graph raises
    ``RuntimeError`` when it is called with others. What the model's Python code asks of its surroundings
    (``torch.is_grad_enabled()``, ``torch.is_autocast_enabled()``, ``self.training``) is fixed too, without a check:
    capture has grad mode on and autocast off. ``inference_mode`` blocks become ``no_grad`` blocks.

    Args:
        model: a module; or, without inputs, an ``ExportedProgram`` or a ``GraphModule``, which is left as it is.
        args: example inputs.
        how: ``"export"``, which understands most models, or ``"symbolic_trace"``, which keeps calls of modules whole
            loses ``no_grad`` and ``autocast`` blocks, and refuses models that write their own buffers outside of these.
        dynamic: let every size of the inputs vary where the model allows it (``how="export"`` only).
        kwargs: example keyword inputs.

    Raises:
        CaptureError: SK401, with the line of the model that could not be captured and what to try; SK404 for a Function
            that no node can call, SK405 for hooks on gradients, which a graph cannot have.
    """
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
        raise CaptureError("SK401", f"there is no way of capture named {how!r}", f"Choose one of {', '.join(ways)}.")
    require_module(model)
    given = args, kwargs
    args, kwargs = distinct(given)
    refuse_module_hooks(model)
    with undisturbed():
        try:
            gm = after_a_call(model, args, kwargs, ways[how])
            _note_repeated(gm, how, model, *given)
            return gm
        except CaptureError:
            raise
        except Exception as error:
            helps = _what_helps(model, args, kwargs, dynamic, how)
            raise capture_error(model, how, error, helps, runs=not helps.startswith(RAISES)) from error


def _what_helps(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool, how: str) -> str:
    """What was tried and captures the model, or what it says when it just runs; nothing, if nothing was found."""
    if not are_real(model, (args, kwargs)):
        return "Call the model once on real inputs, before it is moved to meta or fake tensors."
    with as_found(model), silence():
        try:
            call_once(copy.deepcopy(model), args, kwargs)
        except Exception as error:
            return f"{RAISES} {first_line(error)}"
        if how != "export":
            return 'Use how="export".' if works(lambda: _exported(model, args, kwargs, False)) else ""
        if dynamic and works(lambda: _exported(model, args, kwargs, False)):
            return "Capture with dynamic=False."
        if model.training and works(lambda: _exported(model, args, kwargs, dynamic), in_eval_mode(model)):
            return IN_EVAL_MODE
        if works(lambda: _from_exported(torch.export.export(model, args, kwargs, strict=False))):
            return "Take splitkit.capture(torch.export.export(model, args, kwargs))."
    return ""


RAISES = "Called without capture, the model raises"
"""How the advice begins for a model that does not run."""
IN_EVAL_MODE = "Call model.eval() first: in eval mode the model is captured."
"""The advice where that was tried and helps."""


@contextmanager
def silence() -> Iterator[None]:
    """What fails on trial writes no logs."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with redirect_stderr(StringIO()), redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def works(capture: Callable[[], object], within: AbstractContextManager[None] | None = None) -> bool:
    """Whether a capture succeeds, tried in silence."""
    try:
        with silence(), within or nullcontext():
            capture()
    except Exception:
        return False
    return True


def by_export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """What `capture` gives, or whatever it failed with: nothing is tried to find out what would help."""
    refuse_module_hooks(model)
    with undisturbed():
        return after_a_call(model, args, kwargs, lambda: _exported(model, args, kwargs, False))


def distinct(inputs: Any) -> Any:
    """A tensor that is given twice as two tensors: export would take them for one input, whatever is passed later."""
    seen: set[int] = set()

    def copy_of_known(leaf: torch.Tensor) -> torch.Tensor:
        known = id(leaf) in seen
        seen.add(id(leaf))
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if known else leaf

    return pytree.tree_map_only(torch.Tensor, copy_of_known, inputs)


def _note_repeated(
    gm: fx.GraphModule, how: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Say which inputs were one tensor: export has a placeholder for each leaf, ``symbolic_trace`` for each name."""
    inputs, leaves = gm.graph.find_nodes(op="placeholder"), pytree.tree_leaves((args, kwargs))
    if len(inputs) == len(leaves) and isinstance(getattr(gm, "_in_spec", None), pytree.TreeSpec):
        mark_repeated(zip(inputs, leaves, strict=True))
    elif how == "symbolic_trace":
        named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        mark_repeated((node, named.get(str(node.target))) for node in inputs)


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: bool) -> fx.GraphModule:
    shapes = _all_dynamic(model, args, kwargs) if dynamic else None
    flags, owned = GradFlags(model), owned_by(model)
    quiet = without_partial_graph()
    with quiet, blocks_as_nodes(flags), functions_as_nodes() as put_functions_in, outputs_opened(model):
        program = torch.export.export(model, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
    if owned_by(model) != owned:
        raise CaptureError("SK401", "the model makes parameters or buffers while it runs", "Make them in its __init__.")
    gm = _from_exported(program)
    put_functions_in(gm)
    flags.check(gm)
    return gm


def _all_dynamic(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """``Dim.AUTO`` for every size of every tensor among the inputs."""
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            shapes[leaf] = dict.fromkeys(range(leaf.ndim), torch.export.Dim.AUTO)
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
    restore_modes_on_error(gm.graph)
    gm.recompile()
    _keep_input_check(gm)
    # Export's own are methods and a tracer that cannot be pickled.
    gm.__dict__.update(train=_refuse_mode, eval=_refuse_mode, _tracer_cls=None)
    gm.graph._tracer_cls = None
    return gm


def _refuse_mode(mode: bool = True) -> None:
    """What dropout and BatchNorm do is in the graph."""
    raise NotImplementedError("The mode is fixed at capture: call model.train() or model.eval(), and capture again.")


def _drop_checks(gm: fx.GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.target in _EXPORT_CHECKS or (node.op == "call_module" and node.target == "_guards_fn"):
            gm.graph.erase_node(node)
    if hasattr(gm, "_guards_fn"):
        del gm._guards_fn


def _keep_input_check(gm: fx.GraphModule) -> None:
    """Keep the one hook that refuses inputs of other sizes, also on copies; drop export's two others.

    Export's own hooks are closures, which cannot be pickled, and get lost in ``copy.deepcopy``.
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
def undisturbed() -> Iterator[None]:
    """Grad mode on, as a training step has it; afterwards the random state is what it was."""
    state = torch.get_rng_state()
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast("cuda", enabled=False),
            warnings.catch_warnings(),
            without_meta_errors(),
        ):
            # torch's own deprecations; what it has to say about the model still comes through
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def put_back(dicts: Iterable[dict[str, Any]]) -> Iterator[None]:
    """Afterwards the dicts, such as the buffers of modules, hold what they held: what was bound anew is put back."""
    held = [(now, dict(now)) for now in dicts]
    try:
        yield
    finally:
        for now, before in held:
            now.clear()
            now.update(before)
