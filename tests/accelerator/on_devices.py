"""One process: splits on devices of the simulated accelerator, without and with planted races; a JSON line for each."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import simgpu
import torch
from smallnets import UNet
from torch import nn

import splitkit as sk
from splitkit.graph.losses import loss_of
from splitkit.runtime import to_devices
from splitkit.runtime.devices import accelerators, on_devices
from splitkit.testing import models

SMALL = {"layers": 2, "width": 32, "heads": 2, "batch": 2}
TEXT = {**SMALL, "vocab": 64, "seq": 8}
IMAGE = {**SMALL, "image": 16, "patch": 8, "classes": 8}


def example(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model in float64 and its inputs; dropout is off, since each device has random numbers of its own."""
    torch.manual_seed(0)
    if name == "unet":
        return UNet(8, 2).double(), {"x": torch.randn(2, 3, 16, 16).double()}
    made = models.build(name, **IMAGE if name == "vit" else TEXT)
    given = {name: t.double() if t.is_floating_point() else t for name, t in made.kwargs.items()}
    return made.model.eval().double(), given


def loss(output: Any) -> torch.Tensor:
    found = loss_of(output)
    return found if found is not None else output.square().mean()


def train(model: Callable[..., Any], inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Three steps; losses, and the gradients and weights after each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    seen: dict[str, Any] = {}
    for step in range(3):
        found = loss(model(**inputs))
        found.backward()
        seen[f"loss {step}"] = found.detach().cpu()
        for name, p in model.named_parameters():
            seen[f"gradient of {name} {step}"] = p.grad.cpu().clone()
        optimizer.step()
        optimizer.zero_grad()
        for name, t in model.state_dict().items():
            seen[f"{name} {step}"] = t.cpu().clone()
    return seen


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """How far two tensors are apart, relative to the largest entry."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-3)) if b.numel() else 0.0


def same(name: str, count: str) -> dict[str, Any]:
    """A model on some devices beside the same on the CPU."""
    model, inputs = example(name)
    gm = sk.capture(copy.deepcopy(model), **inputs)
    placed = to_devices(sk.split(gm, sk.policies.Stages(int(count))), [f"simgpu:{i}" for i in range(int(count))])
    mine, theirs = train(placed, inputs), train(model, inputs)
    theirs = {name: t for name, t in theirs.items() if name in mine}
    worst = max(theirs, key=lambda name: apart(mine[name], theirs[name]))
    devices = {str(t.device) for t in placed.state_dict().values()}
    return {
        "apart": apart(mine[worst], theirs[worst]),
        "worst": worst,
        "devices": len(devices),
        "compared": len(theirs),
    }


def loop(name: str, count: str) -> dict[str, Any]:
    """Ten steps with dropout, clipping and a learning rate schedule, beside the same split on the CPU."""
    torch.manual_seed(0)
    made = models.build(name, **TEXT)
    model = made.model.double().train()
    for module in model.modules():
        if name == "llama" and hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    gm = sk.capture(model, **made.kwargs)
    there = sk.split(gm, sk.policies.Stages(int(count)))
    here = sk.split(copy.deepcopy(gm), sk.policies.Stages(int(count)))
    torch.manual_seed(7)
    generators = {key: torch.get_rng_state() for key in here.parts}
    for key, child in here.names.items():
        _draw_from(here.module.get_submodule(child), generators, key)
    theirs = steps(here.module, made.kwargs)
    placed = to_devices(there, [f"simgpu:{i}" for i in range(int(count))])
    torch.manual_seed(7)
    mine = steps(placed, made.kwargs)
    drawn = sum(not torch.equal(state, generators[key]) for key, state in _seeded(here.parts).items())
    return {"apart": max(abs(a - b) / b for a, b in zip(mine, theirs, strict=True)), "steps": len(mine), "drawn": drawn}


def _seeded(keys: Iterable[Any]) -> dict[Any, torch.Tensor]:
    return {key: torch.Generator().manual_seed(7).get_state() for key in keys}


def _draw_from(part: nn.Module, generators: dict[Any, torch.Tensor], key: Any) -> None:
    """Let a part draw from a generator of its own, as on a device of its own."""

    def before(*given: Any) -> None:
        generators["outside"] = torch.get_rng_state()
        torch.set_rng_state(generators[key])

    def after(*given: Any) -> None:
        generators[key] = torch.get_rng_state()
        torch.set_rng_state(generators["outside"])

    part.register_forward_pre_hook(before)
    part.register_forward_hook(after)


def steps(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[float]:
    """A training loop; the loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses, rng = [], torch.Generator().manual_seed(1)
    for _ in range(10):
        shift = int(torch.randint(8, (), generator=rng))
        found = loss(model(**{name: t.roll(shift, -1) for name, t in inputs.items()}))
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        losses.append(float(found.detach()))
    return losses


def named() -> dict[str, Any]:
    """The values that move between parts on devices of which some are named without an index."""
    moved = []
    for current in (0, 1):
        torch.accelerator.set_device_index(current)
        gm = sk.capture(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), torch.randn(2, 4))
        placed = to_devices(sk.split(gm, sk.policies.Stages(3)), ["simgpu:0", "simgpu", "simgpu:1"])
        placed(torch.randn(2, 4)).sum().backward()
        moved.append([str(move.target) for move in placed.moves if move.source is not None])
    return {"moved": moved}


class Tied(nn.Module):
    """A weight that two devices read, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = skip = self.table(index)
        for layer in self.layers:
            x = layer(x).tanh() + skip
        return x @ self.table.weight.t()


class Counted(nn.Module):
    """A buffer that one device writes, and another reads."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("n", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n.add_(1.0)
        return self.b(self.a(x) + self.n) * self.n


class Late(nn.Module):
    """One gradient for what is copied back and for a value that gets a second gradient later, which autograd adds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = late = self.b(x)
        both = self.a(x) + first
        for _ in range(100):
            late = late.tanh()
        return late + both * 2


def trained() -> None:
    index = torch.randint(16, (6,))
    gm = sk.capture(Tied(), index)
    placed = to_devices(sk.split(gm, sk.policies.Stages(3)), [f"simgpu:{i}" for i in range(3)])
    for _ in range(2):
        placed(index.to("simgpu:0")).square().mean().backward()
        with torch.no_grad():
            for p in placed.parameters():
                p.sub_(p.grad)


def buffered(training: bool = False) -> None:
    gm = sk.capture(Counted(), torch.randn(2, 4))
    first = {"add_", "linear", "add"}
    split = sk.split(gm, lambda n: int(n.name not in first) if n.op == "call_function" else None)
    placed = to_devices(split, ["simgpu:0", "simgpu:1"])
    for _ in range(2):
        with torch.set_grad_enabled(training):
            placed(torch.randn(2, 4))


def gradient_added() -> None:
    gm = sk.capture(Late(), torch.randn(2, 4))
    place = {"linear": 1, "linear_1": 0, "add": 1}
    split = sk.split(gm, lambda n: place.get(n.name, 2) if n.op == "call_function" else None)
    placed = to_devices(split, {key: f"simgpu:{key}" for key in split.parts})
    placed(torch.randn(2, 4)).square().mean().backward()


def input_written() -> None:
    gm = sk.capture(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4))
    placed = to_devices(sk.split(gm, sk.policies.Stages(2)), ["simgpu:1", "simgpu:2"])
    x = torch.randn(2, 4).to("simgpu:0")
    with torch.no_grad():
        for _ in range(2):
            placed(x)
            x.add_(1.0)


def output_written() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return (found := self.a(x)).view(-1), self.b(found)

    gm = sk.capture(Both(), torch.randn(2, 4))
    placed = to_devices(sk.split(gm, sk.policies.Stages(2)), ["simgpu:0", "simgpu:1"])
    with torch.no_grad():
        placed(torch.randn(2, 4))[0].add_(1.0)


def two_devices() -> None:
    """One value with tensors on two devices: each is ready after its own copy."""
    streams = accelerators.CopyStreams()
    given = (torch.ones(3, device="simgpu:0"), torch.ones(3, device="simgpu:1"))
    sent = accelerators.Send(torch.device("simgpu:0"), torch.device("simgpu:2"), streams)(given)
    a, b = accelerators.Receive()(sent)
    a + b


def from_cpu() -> None:
    x = torch.ones(3)
    sent = accelerators.Send(None, torch.device("simgpu:2"), accelerators.CopyStreams())(x)
    x.add_(1.0)
    accelerators.Receive()(sent) + 1


RUNS: dict[str, Callable[[], None]] = {
    "a tied weight": trained,
    "a written buffer": buffered,
    "a written buffer with gradients": lambda: buffered(True),
    "a gradient that is added to": gradient_added,
    "an input that is written after the call": input_written,
    "an output that is written after the call": output_written,
    "a value on two devices": two_devices,
    "memory of the CPU": from_cpu,
}


def _skip(owner: Any, name: str, found: Callable[..., Any] = lambda *args: None) -> Callable[[], None]:
    return lambda: setattr(owner, name, found)


def _first_only() -> None:
    """As if a value had the device of its first tensor."""
    real = accelerators.Receive.forward
    accelerators.Receive.forward = lambda self, sent: real(self, sent._replace(ready=sent.ready[:1]))  # type: ignore[method-assign]


def _elsewhere(*functions: Any) -> Callable[[], None]:
    """While one of these functions runs itself, the current stream of a device is one on which nothing else happens."""
    real = accelerators.stream_of

    def stream_of(device: torch.device) -> torch.Stream:
        there = sys._getframe(1).f_code in [function.__code__ for function in functions]
        return torch.Stream(device=device) if there else real(device)

    return lambda: setattr(accelerators, "stream_of", stream_of)


_BACK = accelerators._CopyFunction

PLANTED: dict[str, tuple[str, Callable[[], None]]] = {
    "a part does not wait for the copy": (
        "a tied weight", _elsewhere(accelerators.Receive.forward),
    ),
    "the copy does not wait for the kernel before it": (
        "a tied weight", _elsewhere(accelerators.copy_to_device),
    ),
    "the gradient is not waited for": (
        "a tied weight", _elsewhere(_BACK.forward, _BACK.backward),
    ),
    "no record_stream": ("a tied weight", _skip(torch.Tensor, "record_stream")),
    "a written value is not waited for": (
        "a written buffer", _skip(accelerators, "wait_until_read"),
    ),
    "the end of the call waits for nothing, and an input is written": (
        "an input that is written after the call", _skip(accelerators.Release, "forward"),
    ),
    "the end of the call waits for nothing, and an output is written": (
        "an output that is written after the call", _skip(accelerators.Release, "forward"),
    ),
    "outputs count as no memory of the caller": (
        "an output that is written after the call",
        _skip(on_devices, "callers_memory", lambda flow: frozenset()),
    ),
    "one event for two devices": ("a value on two devices", _first_only),
    "memory of the CPU is copied while the caller goes on": (
        "memory of the CPU",
        lambda: setattr(accelerators, "_copied", lambda x, target, _: x.to(target, copy=True, non_blocking=True)),
    ),
}  # fmt: skip
"""What is wrong -> the run in which it is found, and what makes it wrong."""


def main() -> None:
    simgpu.register()
    kind, *words = sys.argv[1:]
    if kind == "planted":
        run, plant = PLANTED[words[0]]
        plant()
        RUNS[run]()
        found: dict[str, Any] = {}
    elif kind == "run":
        RUNS[words[0]]()
        found = {}
    else:
        found = {"same": same, "loop": loop, "named": named}[kind](*words)
    print(json.dumps({"case": words, **found, "races": simgpu.races()}), flush=True)
