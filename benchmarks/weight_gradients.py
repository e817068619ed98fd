"""What waits between the input part and the weight part of backward: torch's way, the closure, and the minimum cut.

saved      bytes from forward to backward, with the input of the blocks
torch      ``torch.distributed.pipelining``: all that was saved, and the gradients at which the path of a parameter
           meets that of an input (`stage_backward_input` of torch 2.13 keeps the autograd graph)
closure    separate graphs: everything that no gradient of an input needs is deferred, as in torchtitan's GraphPP
cut        `splitkit.policies.SplitBackward()`: products are deferred, the rest is where the fewest bytes wait
recompute  the same after `RecomputeAll`
measured   bytes alive after a real run of forward and the input part, divided by those that the plan of the cut says

Sizes are those of two blocks without embedding and head, in units of sequence * width * bytes of an element. The table
is of fake tensors, and no memory is allocated; ``measured`` is of real ones, of the same blocks in small.

    python benchmarks/weight_gradients.py [--json] [--small]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

import splitkit as sk
from splitkit.graph.dataflow import analyze
from splitkit.plans.record import Plan
from splitkit.policies import RecomputeAll, SaveAll, SplitBackward
from splitkit.search.deferral_problem import deferrals, divided, plan_in_stages
from splitkit.training.flow import JointFlow

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from waitingvalues import waiting_bytes, waiting_values

BLOCKS = 2


@dataclass(frozen=True)
class Size:
    """The size of a block: tokens, width, width of the MLP, heads, and heads of keys and values."""

    tokens: int = 4096
    width: int = 4096
    inner: int = 14336
    heads: int = 32
    pairs: int = 8
    dtype: torch.dtype = torch.bfloat16

    @property
    def unit(self) -> int:
        """Bytes of one activation of the width of the model."""
        return self.tokens * self.width * self.dtype.itemsize


SMALL = Size(32, 64, 224, 8, 2, torch.float32)


class PlainNorm(nn.Module):
    """RMSNorm as transformers write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x."""
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class LlamaBlock(nn.Module):
    """A block of Llama 3."""

    def __init__(self, size: Size, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.size, self.each = size, size.width // size.heads
        self.before, self.after = norm(size.width), norm(size.width)
        narrow = size.pairs * self.each
        self.q, self.o = (nn.Linear(size.width, size.width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(size.width, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the block's output."""
        y, shape = self.before(x), x.shape
        q, k, v = (of(y).view(*shape[:2], -1, self.each).transpose(1, 2) for of in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat((-t[..., self.each // 2 :], t[..., : self.each // 2]), -1) * sin for t in (q, k))
        k, v = (t.repeat_interleave(self.size.heads // self.size.pairs, 1) for t in (k, v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(shape))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class GptBlock(nn.Module):
    """A block of GPT-2."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.width, self.each = size.width, size.width // size.heads
        self.before, self.after = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.o = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        shape = x.shape
        parts = self.qkv(self.before(x)).split(self.width, -1)
        q, k, v = (t.view(*shape[:2], -1, self.each).transpose(1, 2) for t in parts)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(shape))
        return x + self.down(F.gelu(self.up(self.after(x)), approximate="tanh"))


@dataclass(frozen=True)
class Case:
    """Blocks to price: how one is made, the number of its further inputs, and whether norms are decomposed."""

    name: str
    make: Callable[[Size], nn.Module]
    rotary: bool = False
    decomposed: bool = False


CASES = (
    Case("Llama 3 8B, norm of transformers", lambda size: LlamaBlock(size, PlainNorm), rotary=True),
    Case("Llama 3 8B, nn.RMSNorm", lambda size: LlamaBlock(size, lambda h: nn.RMSNorm(h, eps=1e-6)), rotary=True),
    Case("GPT, LayerNorm", GptBlock),
    Case("GPT, LayerNorm decomposed", GptBlock, decomposed=True),
)


def step_of(case: Case, size: Size, fake: bool = True) -> tuple[JointFlow, list[Any]]:
    """The joint graph of two blocks, from the gradient of their output to that of their input; and its inputs."""
    with FakeTensorMode() if fake else nullcontext(), _dtype(size.dtype):
        blocks = nn.ModuleList(case.make(size) for _ in range(BLOCKS))
        x, gradient = (torch.randn(1, size.tokens, size.width) for _ in range(2))
        angles = [torch.randn(1, 1, size.tokens, size.width // size.heads) for _ in range(2 * case.rotary)]
        names = [name for name, _ in blocks.named_parameters()]

        def step(x: Tensor, gradient: Tensor, weights: list[Tensor], *angles: Tensor) -> tuple[Tensor, ...]:
            y = x
            known = dict(zip(names, weights, strict=True))
            for i, block in enumerate(blocks):
                own = {n.split(".", 1)[1]: w for n, w in known.items() if n.startswith(f"{i}.")}
                y = torch.func.functional_call(block, own, (y, *angles))
            return (y, *torch.autograd.grad(y, [x, *weights], gradient))

        given = [x.requires_grad_(), gradient, [p for _, p in blocks.named_parameters()], *angles]
        gm = make_fx(step, decomposition_table=_norms() if case.decomposed else {}, tracing_mode="real")(*given)
    gm.graph.eliminate_dead_code()
    inputs, outputs = gm.graph.find_nodes(op="placeholder"), gm.graph.output_node().args[0]
    leaves = [given[0], gradient, *given[2], *angles]
    return JointFlow.of(analyze(gm), [inputs[1]], 1, (), [outputs[1]]), [t.detach() for t in leaves]


def _dtype(dtype: torch.dtype) -> Any:
    class Default:
        def __enter__(self) -> None:
            self.before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)

        def __exit__(self, *_: object) -> None:
            torch.set_default_dtype(self.before)

    return Default()


def _norms() -> dict[Any, Any]:
    return {op: f for op, f in core_aten_decompositions().items() if "layer_norm" in str(op)}


def bytes_of(flow: JointFlow, values: Iterable[Node]) -> int:
    """The bytes of the storages of values and of the input of the blocks, each once, without parameters."""
    held = list(values)
    x = flow.graph.find_nodes(op="placeholder")[0]
    own = {root for value in held for root in flow.storages.under(value)}
    given = sum(n.meta["val"].untyped_storage().nbytes() for n in {*held} if n is x or n in flow.backward_inputs)
    return sum(flow.storages.nbytes[root] for root in own) + given


def row(case: Case, size: Size) -> dict[str, Any]:
    """A row of the table, in units of an activation; seconds on an H100."""
    flow, _ = step_of(case, size)
    costs = sk.costs.roofline(flow, "h100")
    saved = flow.save_all
    late = {n for n in flow.scope if "backward" in saved.places.get(flow.producer(n), ())}
    read = {r for n in late for r in n.all_input_nodes if r not in late and r not in flow.backward_inputs}
    plan = plan_in_stages(flow, saved)
    problem = deferrals(flow, plan, ("backward", 0), costs)
    closure = problem.choose(problem.pinned, ~problem.pinned)
    after = divided(plan, {0: closure})
    met = [n for n in waiting_values(flow, after, 0) if n in late or n in flow.backward_inputs]
    cut, again = (SplitBackward(policy=policy).assign(flow, costs) for policy in (SaveAll(), RecomputeAll()))
    weight = [sum(costs.seconds(n) for n in p.members(("weight", 0))) for p in (after, cut)]
    return {
        "model": case.name,
        "saved": bytes_of(flow, read) / size.unit,
        "torch": (bytes_of(flow, [*read, *met])) / size.unit,
        "closure": closure.nbytes / size.unit,
        "cut": waiting_bytes(flow, cut, 0) / size.unit,
        "recompute": waiting_bytes(flow, again, 0) / size.unit,
        "ms deferred, closure": weight[0] * 1e3,
        "ms deferred, cut": weight[1] * 1e3,
        "measured": measured(case),
    }


def measured(case: Case) -> float:
    """Bytes alive after forward and the input part of small blocks, over those that the plan says."""
    flow, leaves = step_of(case, SMALL, fake=False)
    plan = SplitBackward().assign(flow, sk.costs.flops(flow))
    tangents = [n for n in waiting_values(flow, plan, 0) if n.op == "placeholder"]
    with torch.no_grad():
        memory = sk.measure_memory(lambda *given: held_by_weight_part(flow, plan, given), *leaves)
    came = sum(n.meta["val"].untyped_storage().nbytes() for n in tangents)  # alive before the run, too
    return (memory.end - memory.baseline + came) / waiting_bytes(flow, plan, 0)


def held_by_weight_part(flow: JointFlow, plan: Plan, given: Iterable[Any]) -> list[Any]:
    """Run forward and the input part; return what waits, of a plan that recomputes nothing."""
    env: dict[Node, Any] = dict(zip(flow.graph.find_nodes(op="placeholder"), given, strict=True))
    interpreter = fx.Interpreter(flow.root)
    interpreter.env = env
    early = {("forward", 0), ("input", 0)}
    for node in flow.index:
        if node.op == "get_attr" or (node.op == "call_function" and early & {*plan.places[flow.producer(node)]}):
            env[node] = interpreter.run_node(node)
    return [env[value] for value in waiting_values(flow, plan, 0)]


def rows(size: Size) -> Iterator[dict[str, Any]]:
    """All rows."""
    return (row(case, size) for case in CASES)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--small", action="store_true", help="blocks of width 64")
    args = parser.parse_args()
    found = list(rows(SMALL if args.small else Size()))
    if args.json:
        print(json.dumps({"rows": found}))
        return
    shown = Table(title=f"{BLOCKS} blocks, in units of sequence * width * bytes of an element")
    for name in found[0]:
        shown.add_column(name, justify="left" if name == "model" else "right")
    for each in found:
        shown.add_row(*(v if isinstance(v, str) else f"{v:.2f}" for v in each.values()))
    Console(width=140).print(shown)


if __name__ == "__main__":
    main()
