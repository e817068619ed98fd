"""Random graphs whose called modules read weights that other nodes write: through aliases, in hooks, under autocast."""

from __future__ import annotations

import random
import warnings
from contextlib import suppress

import torch
import torch.nn.functional as F
from fuzzing import FuzzReport, try_plan, usable_inputs
from opaquecode import Wrapped, wrapper_of
from torch import fx, nn
from torch.nn.utils import parametrizations

from splitkit import _torch
from splitkit.errors import PlanError

SIZE = 8


class Plain(torch.Tensor):
    """A subclass with memory of its own."""


class Weight(nn.Parameter):
    """A subclass of parameters, as libraries of quantized weights have."""


class Unnamed(torch.Tensor):
    """A wrapper that does not say which tensors it holds, but keeps them in an attribute."""

    @staticmethod
    def __new__(cls, held):
        return wrapper_of(cls, held)

    def __init__(self, held):
        self.box = {"held": [held]}

    __torch_dispatch__ = classmethod(
        lambda cls, func, types, args=(), kwargs=None: _unwrapped(func, args, kwargs, lambda one: one.box["held"][0])
    )


TABLE = {}


class Elsewhere(Unnamed):
    """A wrapper whose memory nobody can find: it is in a table of its module."""

    def __init__(self, held):
        TABLE[id(self)] = held

    __torch_dispatch__ = classmethod(
        lambda cls, func, types, args=(), kwargs=None: _unwrapped(func, args, kwargs, lambda one: TABLE[id(one)])
    )


def _unwrapped(func, args, kwargs, inside):
    def bare(value):
        return inside(value) if isinstance(value, Unnamed) else value

    result = func(*map(bare, args), **{key: bare(value) for key, value in (kwargs or {}).items()})
    return args[0] if func.overloadpacket.__name__.endswith("_") else result


def shrink(module, args):
    """A forward pre-hook that writes the weight."""
    module.weight.data.mul_(0.9)


def _shrinking():
    module = nn.Linear(SIZE, SIZE)
    module.register_forward_pre_hook(shrink)
    return module


def _old(wrapper):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return wrapper(nn.Linear(SIZE, SIZE))


def _subclassed(kind):
    module = nn.Linear(SIZE, SIZE)
    data = module.weight.detach()
    module.weight = Weight(data) if kind is Weight else nn.Parameter(data.as_subclass(kind))
    return module


MODULES = {
    "linear": lambda: (nn.Linear(SIZE, SIZE), "weight"),
    "sequential": lambda: (nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU()), "0.weight"),
    "norm": lambda: (nn.BatchNorm1d(SIZE), "running_mean"),
    "graph": lambda: (fx.symbolic_trace(nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU())), "0.weight"),
    "subclass of parameters": lambda: (_subclassed(Weight), "weight"),
    "subclass in a parameter": lambda: (_subclassed(Plain), "weight"),
    "spectral norm": lambda: (parametrizations.spectral_norm(nn.Linear(SIZE, SIZE)), "parametrizations.weight.0._u"),
    "weight norm": lambda: (
        parametrizations.weight_norm(nn.Linear(SIZE, SIZE)),
        "parametrizations.weight.original1",
    ),
    "old spectral norm": lambda: (_old(nn.utils.spectral_norm), "weight_u"),
    "old weight norm": lambda: (_old(nn.utils.weight_norm), "weight_v"),
    "pre-hook": lambda: (_shrinking(), "weight"),
}


def _bare(tensor):
    return tensor.detach().as_subclass(torch.Tensor)


ALIASES = {
    "detach": lambda t: t.detach(),
    "plain": _bare,
    "tail": lambda t: _bare(t)[1:],
    "tail of an array": lambda t: torch.from_numpy(_bare(t).numpy()[1:]),
    "subclass": lambda t: _bare(t).as_subclass(Plain),
    "parameter": lambda t: nn.Parameter(t.detach(), False),
}
WRAPPERS = {"named": Wrapped, "unnamed": Unnamed, "elsewhere": Elsewhere}


def memory_graph(kind, choose, length, seed):
    """Return a random graph over two square inputs: ``kind`` is ``"alias"``, ``"autocast"`` or ``"wrapper"``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        root, names = _root(kind, choose)
    graph = fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    regions = [_enter(graph)] if kind == "autocast" else []

    def read():
        return graph.get_attr(names[choose(len(names))])

    for _ in range(length):
        value, what = values[-1 - choose(min(len(values), 4))], choose(6)
        if what <= 1 and kind != "wrapper":
            called = ("called", "again", "other")[choose(3)]
            values.append(graph.call_module(called, (graph.call_method("float", (value,)),)))
        elif what == 1:
            values.append(graph.call_function(torch.sin, (value,)))
        elif what == 2:
            values.append(graph.call_method("mul", (read(), 1)))
        elif what <= 4:
            graph.call_method(("mul_", "add_")[choose(2)], (read(), 0.75))
        elif kind == "autocast" and regions and choose(2):
            graph.call_function(_torch.EXIT_AUTOCAST, (regions.pop(),))
        elif kind == "autocast":
            regions.append(_enter(graph, choose))
        else:
            values.append(graph.call_function(torch.sin, (value,)))
        if kind == "autocast" and choose(4) == 0:
            values.append(graph.call_function(F.linear, (graph.call_method("float", (value,)), graph.get_attr("own"))))
    for region in reversed(regions):
        graph.call_function(_torch.EXIT_AUTOCAST, (region,))
    graph.output(tuple(values[2:]) or tuple(values))
    return fx.GraphModule(root, graph)


def _enter(graph, choose=lambda n: 0):
    given = "cpu", torch.bfloat16, choose(4) < 3, (None, True, False)[choose(3)]
    return graph.call_function(_torch.ENTER_AUTOCAST, given)


def _root(kind, choose):
    root = nn.Module()
    if kind == "wrapper":
        held = torch.randn(SIZE, SIZE)
        root.held, root.part = held, held[1:]
        root.wrapped = list(WRAPPERS.values())[choose(len(WRAPPERS))](held)
        return root, ("wrapped", "held", "part")
    of_kind = list(MODULES)[:2] if kind == "autocast" else list(MODULES)
    root.called, path = MODULES[of_kind[choose(len(of_kind))]]()
    root.again, root.other = root.called, nn.Linear(SIZE, SIZE)
    root.own = nn.Parameter(torch.randn(SIZE, SIZE))
    owner, _, name = path.rpartition(".")
    weight = getattr(root.called.get_submodule(owner), name)
    alias = list(ALIASES.values())[choose(len(ALIASES))](weight)
    root.__dict__.update({} if isinstance(alias, nn.Parameter) else {"alias": alias})
    if isinstance(alias, nn.Parameter):
        root.alias = alias
    root.tail = root.own.detach()[1:]
    return root, ("alias", "tail")


def fuzz_memory(kind, plans, seed=0):
    """Try random plans on graphs of one kind, five on each; raise CheckError if one gives other results."""
    report = FuzzReport()
    while report.plans < plans:
        current = seed + report.graphs + report.unusable
        rng = random.Random(current)
        gm = memory_graph(kind, rng.randrange, 4 + rng.randrange(10), current)
        for parameter in gm.parameters():
            parameter.requires_grad_(kind == "autocast")
        inputs = None
        with suppress(ValueError):  # BatchNorm asks for at least two dimensions
            inputs = usable_inputs(gm)
        if inputs is None:
            report.unusable += 1
            continue
        report.graphs += 1
        for _ in range(5):
            try:
                try_plan(gm, inputs, rng.randrange, report)
            except PlanError as refusal:  # at the call: an input may share memory with a wrapper that names nothing
                assert refusal.code == "SK212" and kind == "wrapper", refusal
                report.refused[refusal.code] += 1
            except Exception as error:
                error.add_note(f"graph seed {current}:\n{gm.code}")
                raise
    return report
