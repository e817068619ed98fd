"""torch.distributed.pipelining, called as PyTorch's own tests call it: ``pipe(x)[0]`` is what the model gives."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from launch import launch
from pipemodels import ROWS, SPEC, WIDTH, Aliased, Keywords, Layers, Pair, Shaped, Skipping
from torch import nn
from torch._export.utils import sequential_split
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.fx.experimental import const_fold

import splitkit as sk

PLACE = "torch.distributed.pipelining._IR"
each_engine = pytest.mark.parametrize("engine", ["torch", "splitkit"])


def batch():
    return torch.randn(ROWS, WIDTH)


def piped(use, engine, model, args=(), kwargs=None, **options):
    spy = use(engine, PLACE)
    pipe = pipeline(model, args, kwargs, **options)
    assert len(spy.made) == 1
    return pipe


@each_engine
@pytest.mark.parametrize(("make", "stages"), [(Skipping, 4), (Aliased, 2)], ids=["skip", "alias"])
def test_the_output_and_the_names_of_each_stage(use, engine, make, stages):
    """As test_pipe.py."""
    model, x, y = make(), batch(), batch()
    names, expected = set(model.state_dict()), model(x, y)
    pipe = piped(use, engine, model, (x, y))
    assert pipe.num_stages == stages
    torch.testing.assert_close(pipe(x, y)[0], expected)
    assert all(set(pipe.get_stage_module(i).state_dict()) <= names for i in range(stages))


@each_engine
def test_a_constant_by_keyword(use, engine):
    """As test_unflatten.py."""
    model, x, constant = Keywords(), batch(), torch.ones(ROWS, WIDTH)
    expected = model(x, constant=constant)
    pipe = piped(use, engine, model, (x,), {"constant": constant})
    assert pipe.num_stages == 2
    torch.testing.assert_close(pipe(x, constant)[0], expected)
    torch.testing.assert_close(pipe(x, constant=constant)[0], expected)
    state = {n for i in range(2) for n, _ in pipe.get_stage_module(i).named_parameters()}
    assert state == {n for n, _ in model.named_parameters()}


@each_engine
def test_layers_by_a_split_spec(use, engine):
    """As test_transformer.py."""
    model, x = Layers(), batch()
    expected = model(x)
    pipe = piped(use, engine, model, (x,), split_spec=SPEC)
    assert pipe.num_stages == 4
    torch.testing.assert_close(pipe(x)[0], expected)
    for i in range(4):
        names = [n for n, m in pipe.get_stage_module(i).named_modules() if n.count(".") == 1]
        assert names == [f"layers.{i}"]


def _cut_after_each_linear(gm):
    for node in [n for n in gm.graph.nodes if "linear" in n.name][:-1]:
        with gm.graph.inserting_after(node):
            gm.graph.call_function(torch.ops.pippy._pipe_split.default)
    gm.recompile()
    return gm


@each_engine
@pytest.mark.parametrize("options", [{}, {"split_policy": _cut_after_each_linear}], ids=["one stage", "policy"])
def test_a_pipe_without_markers_and_one_by_a_policy(use, engine, options):
    model, x = Layers(), batch()
    pipe = piped(use, engine, model, (x,), **options)
    assert pipe.num_stages == (4 if options else 1)
    torch.testing.assert_close(pipe(x)[0], model(x))


GIVEN = {
    "tensor": lambda y, x: y,
    "tuple": lambda y, x: (y, x),
    "list of one": lambda y, x: [y],
    "dict": lambda y, x: {"logits": y, "state": (x,)},
    "named": lambda y, x: Pair(y, x),
    "constants": lambda y, x: (None, y, 3),
}


@pytest.mark.parametrize("what", GIVEN)
def test_a_structure_comes_out_as_with_torch(use, what):
    model = Shaped(GIVEN[what])
    inputs = {"x": batch(), "more": [batch()]}
    out = {}
    for engine in ("torch", "splitkit"):
        pipe = piped(use, engine, model, (inputs,))
        out[engine] = pipe(inputs["x"], inputs["more"][0])  # a pipe takes bare values
    assert type(out["splitkit"]) is type(out["torch"]) is tuple
    assert len(out["splitkit"]) == len(out["torch"])
    for ours, theirs in zip(out["splitkit"], out["torch"], strict=True):
        assert torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("name", these_first(["gpt2"], ["bert"]))
def test_a_model_of_transformers_gives_what_torchs_pipe_gives(use, small, name):
    layer = {"gpt2": "transformer.h.1", "bert": "bert.encoder.layer.1"}[name]
    out = {}
    for engine in ("torch", "splitkit"):
        torch.manual_seed(0)
        model, inputs = small(name)
        expected = model.eval()(**inputs).logits
        pipe = piped(use, engine, model, (), inputs, split_spec={layer: SplitPoint.BEGINNING})
        out[engine] = pipe(**inputs)
        torch.testing.assert_close(out[engine][0], expected)
    assert [type(v) for v in out["splitkit"]] == [type(v) for v in out["torch"]]


@each_engine
def test_gradients_of_a_pipe(use, engine):
    model, x = Layers(), batch()
    model(x).sum().backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    pipe = piped(use, engine, model, (x,), split_spec=SPEC)
    last = pipe.get_stage_module(3)
    pipe(x)[0].sum().backward()  # a pipe detaches the inputs of each stage
    got = {n: p.grad for n, p in last.named_parameters()}
    assert got and all(torch.equal(g, expected[n]) for n, g in got.items())


def test_a_schedule_over_two_ranks():
    """As test_schedule_multiproc.py: stages are built from the pipe, and each rank runs one."""
    ranks = launch("consumers/pipemodels.py", 2)
    assert sorted(line["same"] for line in ranks) == [0, 1]


def test_stages_are_found_by_the_affix_that_makes_the_parent_flat():
    """`split_module` knows torch's pipelining by it."""
    from torch.distributed.pipelining import _IR

    from splitkit.engine.split import PIPELINING

    assert f"submod_{PIPELINING}" == _IR.PP_SUBMOD_PREFIX


def exported():
    model = Shaped(GIVEN["dict"])
    inputs = {"x": batch(), "more": [batch()]}
    return torch.export.export(model, (inputs,)).module(), inputs, model(inputs)


def _same(got, expected):
    return torch.equal(got["logits"], expected["logits"]) and torch.equal(got["state"][0], expected["state"][0])


@pytest.mark.parametrize("affix", [None, "stage"])
def test_elsewhere_the_signature_of_the_model_is_kept(affix):
    gm, inputs, expected = exported()
    split = sk.split_module(gm, None, lambda n: int("b" in n.name), partition_affix=affix)
    assert _same(split(inputs), expected)
    assert _same(torch.fx.Interpreter(split).run(inputs), expected)


def test_the_flat_parent_can_be_called_too():
    gm, inputs, expected = exported()
    split = sk.split_module(gm, None, lambda n: 0, partition_affix="pp")
    logits, state = split(inputs["x"], inputs["more"][0])
    assert torch.equal(logits, expected["logits"]) and torch.equal(state, expected["state"][0])


@each_engine
def test_sequential_split_is_called_like_the_model(use, engine):
    gm, inputs, expected = exported()
    spy = use(engine)
    split = sequential_split(gm, lambda n: n.target is torch.ops.pippy._pipe_split.default)
    assert len(spy.made) == 1 and _same(split(inputs), expected)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")
def test_a_folded_model_is_called_like_the_model(use):
    """torch's takes bare values and gives a tuple."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(WIDTH))

        def forward(self, batch):
            return {"y": batch["x"] * self.w.exp()}

    model, inputs = Model(), {"x": batch()}
    gm = torch.export.export(model, (inputs,)).module()
    spy = use("splitkit", "torch.fx.experimental.const_fold")
    folded = const_fold.split_const_subgraphs(gm)
    assert len(spy.made) == 1 and torch.equal(folded(inputs)["y"], model(inputs)["y"])


def test_a_pipe_gives_a_tuple_of_its_output(monkeypatch):
    from torch.distributed.pipelining import _IR

    monkeypatch.setattr(_IR, "split_module", sk.split_module)
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(5, 4)
    expected = model(x)
    pipe = pipeline(model, (x,), split_spec={"2": SplitPoint.BEGINNING})
    out = pipe(x)
    assert type(out) is tuple and len(out) == 1
    torch.testing.assert_close(out[0], expected)
