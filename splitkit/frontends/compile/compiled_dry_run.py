"""Measure the memory of a compiled training step that does not run: on fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import lookup_backend  # 2.11, 2.13, 2.15

from splitkit._torch import fake_mode, pytree
from splitkit.frontends.capture.capture import dicts_restored
from splitkit.frontends.compile.compile import Backend, own_code
from splitkit.frontends.compile.generated_code import without_kernels
from splitkit.frontends.joint.joint_checks import no_loss_error
from splitkit.frontends.module_state import owned_dicts
from splitkit.losses import loss_of
from splitkit.memory.measurement import MeasuredMemory, measure_memory

Compiler = Callable[..., Callable[..., Any]]
"""A backend of ``torch.compile``."""


class FakeRun:
    """A backend of ``torch.compile`` that compiles by another one, and runs what that returns on fakes.

    Attributes:
        compiler: the other backend.
        mode: the mode of the fakes.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.compiler, self.mode = compiler, fake_mode()
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # id -> the real tensor, so that its id stays its own; a fake

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile a graph."""
        return partial(self._run, self.compiler(gm, example_inputs))

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the one fake of a real tensor."""
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, self.mode.from_tensor(tensor)
        return self._made[id(tensor)][1]

    def clear_gradients(self) -> None:
        """Forget the gradients of all fakes."""
        for _, fake in self._made.values():
            if fake.is_leaf:
                fake.grad = None

    def _run(self, compiled: Callable[..., Any], *args: Any) -> Any:
        with self.mode:
            return compiled(*pytree.tree_map_only(Tensor, self.fake, args))


def compiled_dry_run(
    model: nn.Module, backend: str | Compiler, loss: Callable[[Any], Any] | None, args: Any, kwargs: Any
) -> MeasuredMemory:
    """Return the memory of a training step of ``torch.compile(model, backend=backend)``, as `dry_run` does."""
    run = FakeRun(_fresh(backend))
    compiled = torch.compile(own_code(model), backend=run, fullgraph=True)

    def step(*held: Any) -> None:
        output = compiled(*args, **kwargs)
        with run.mode:
            value = (loss_of if loss is None else loss)(output)
            del output
            if value is None:
                raise no_loss_error(model, args, kwargs)
            value.backward()

    state = {id(t): run.fake(t) for t in (*model.parameters(), *model.buffers())}
    held = copy.deepcopy(model, dict[int, Any](state)), pytree.tree_map_only(Tensor, run.fake, (args, kwargs))
    with without_kernels(), torch.random.fork_rng(), torch.enable_grad(), dicts_restored(owned_dicts(model)):
        step()  # compiles both halves
        run.clear_gradients()
        return measure_memory(step, *held)


def _fresh(backend: str | Compiler) -> Compiler:
    if isinstance(backend, Backend):
        return Backend(backend.policy, backend.inner, backend.costs)
    return lookup_backend(backend)
