"""Measure the memory of a compiled training step that does not run: on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend  # 2.11, 2.13, 2.15
from torch._dynamo.exc import BackendCompilerFailed, InvalidBackend  # 2.11, 2.13, 2.15

from splitkit._torch import fake_mode, pytree
from splitkit.errors import CaptureError, PolicyError, SplitError
from splitkit.frontends.capture.forward_hooks import hook_state_restored
from splitkit.frontends.compile.compile import Backend, own_code
from splitkit.frontends.compile.generated_code import without_kernels
from splitkit.frontends.joint.joint_checks import checked_loss
from splitkit.frontends.joint.train_step import Loss
from splitkit.frontends.trace_settings import without_logging, without_meta_errors
from splitkit.memory.measurement import MeasuredMemory, measure_memory

CompileBackend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
"""A backend of ``torch.compile``."""


class FakeRun:
    """A backend of ``torch.compile`` that compiles by another one, and runs the compiled code on fakes.

    Attributes:
        compiler: the other backend.
        mode: the mode of the fakes.
    """

    def __init__(self, compiler: CompileBackend) -> None:
        self.compiler, self.mode = compiler, fake_mode()
        self._made: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}  # (real tensor, its fake, the fake's gradient)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        return partial(self._run, self.compiler(gm, example_inputs))

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the one fake of a real tensor."""
        if id(tensor) not in self._made:
            made = self.mode.from_tensor(tensor)
            self._made[id(tensor)] = tensor, made, made.grad if made.is_leaf else None
        return self._made[id(tensor)][1]

    def restore_gradients(self) -> None:
        """Give all fakes the gradients that their real tensors have."""
        for _, made, gradient in self._made.values():
            if made.is_leaf:
                made.grad = gradient

    def _run(self, compiled: Callable[..., Any], *args: Any) -> Any:
        with self.mode:
            return compiled(*pytree.tree_map_only(Tensor, self.fake, args))


def compiled_dry_run(
    model: nn.Module,
    backend: str | CompileBackend,
    loss: Loss | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> MeasuredMemory:
    """Return the memory of a training step of ``torch.compile(model, backend=backend)``, as `splitkit.dry_run` does.

    Dynamo traces a copy of the model with the same parameters, as in a real run, but computes nothing. The code that
    the backend returns runs on fakes of the parameters and inputs, twice: the first run also compiles backward.

    Raises:
        CaptureError: SK401 if a tensor is not on the CPU, or there is no loss.
        PolicyError: SK302 if there is no such backend.
        SplitError: what the policy of a backend refuses.
        TorchDynamoException: if the model does not become one graph.
    """
    run = FakeRun(_fresh(backend))
    state = (*model.parameters(), *model.buffers())
    _require_cpu(model, [*state, *(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))])
    traced = copy.deepcopy(model, {id(tensor): tensor for tensor in state})  # tracing may change attributes
    # Dynamo remembers the sizes of earlier calls, and would make those symbolic that differ.
    compiled = torch.compile(own_code(traced), backend=run, fullgraph=True, dynamic=False)

    def step(*held: Any) -> None:
        output = compiled(*args, **kwargs)
        with run.mode:
            value = checked_loss(output, loss, model, args, kwargs)
            del output  # as in `model(**batch).loss.backward()`
            value.backward()  # type: ignore[no-untyped-call]

    held = copy.deepcopy(model, {id(tensor): run.fake(tensor) for tensor in state})
    given = pytree.tree_map_only(Tensor, run.fake, (args, kwargs))
    rng, hooks = torch.random.fork_rng(), hook_state_restored(model)
    with without_kernels(), without_logging(), without_meta_errors(), rng, hooks, torch.enable_grad():
        try:
            step()
        except BackendCompilerFailed as failed:
            if isinstance(failed.inner_exception, SplitError):
                raise failed.inner_exception from None
            raise
        run.restore_gradients()
        return measure_memory(step, held, given)


def _fresh(backend: object) -> CompileBackend:
    """Return the backend; for one of `splitkit.backend`, another with the same settings, since it notes its graphs."""
    if isinstance(backend, Backend):
        return Backend(backend.policy, backend.inner, backend.costs)
    if not isinstance(backend, str) and not callable(backend):
        problem = f"a {type(backend).__name__} is no backend of torch.compile"
        raise PolicyError("SK302", problem, "Give splitkit.backend(...), a function or a name such as 'inductor'.")
    try:
        found: Any = lookup_backend(backend)
    except InvalidBackend as error:
        remedy = f"Choose one of {', '.join(torch.compiler.list_backends(()))}, or give splitkit.backend(...)."
        raise PolicyError("SK302", f"torch.compile has no backend {backend!r}", remedy) from error
    return found  # type: ignore[no-any-return]


def _require_cpu(model: nn.Module, tensors: Sequence[Tensor]) -> None:
    devices = sorted({str(t.device) for t in tensors} - {"cpu"})
    if devices:
        raise CaptureError(
            "SK401",
            f"{type(model).__name__} has tensors on {', '.join(devices)}; compiled code is only simulated on the CPU",
            "Give the model and the inputs on the CPU.",
        )
