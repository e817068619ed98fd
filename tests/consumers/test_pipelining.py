"""torch.distributed.pipelining: `pipeline` traces a model and cuts it at the modules of a ``split_spec``."""

from __future__ import annotations

import pytest
import torch
from campaigns import these_first
from torch.distributed.pipelining import SplitPoint, pipeline

import splitkit as sk
from splitkit.policies import AtMarkers

PLACE = "torch.distributed.pipelining._IR"
CASES = {
    "gpt2": {"transformer.h.1": SplitPoint.BEGINNING, "transformer.h.3": SplitPoint.BEGINNING},
    "bert": {"bert.encoder.layer.1": SplitPoint.END, "cls": SplitPoint.BEGINNING},
    "vit": {"vit.layers.1": SplitPoint.BEGINNING, "vit.layernorm": SplitPoint.BEGINNING},
}


def built(small, name, **sizes):
    sizes |= {"image": 16, "patch": 4, "classes": 5} if name == "vit" else {}
    model, inputs = small(name, layers=4, **sizes)
    return model.eval(), inputs


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("name", these_first(["gpt2"], [name for name in CASES if name != "gpt2"]))
def test_stages_run_one_by_one_like_the_whole(use, small, name):
    pipes = {}
    for engine in ("torch", "splitkit"):
        model, inputs = built(small, name)
        spy = use(engine, PLACE)
        pipes[engine] = pipeline(model, (), inputs, split_spec=CASES[name])
        assert len(spy.made) == 1
    model, inputs = built(small, name)
    expected = model(**inputs).logits
    expected.pow(2).mean().backward()
    ours, theirs = pipes["splitkit"], pipes["torch"]
    assert ours.num_stages == theirs.num_stages == len(CASES[name]) + 1
    assert _stages(ours) == _stages(theirs)
    assert ours.replicated_params == theirs.replicated_params
    for pipe in (ours, theirs):
        torch.testing.assert_close(pipe(**inputs)[0], expected)
    logits = _by_hand(ours, tuple(inputs.values()))
    torch.testing.assert_close(logits, expected)
    logits.pow(2).mean().backward()
    wanted = {n: p.grad for n, p in model.named_parameters(remove_duplicate=False)}
    shared = {stage_name for group in ours.replicated_params for stage_name in group.values()}
    for i in range(ours.num_stages):
        for fqn, parameter in ours.get_stage_module(i).named_parameters():
            if fqn not in shared:
                torch.testing.assert_close(parameter.grad, wanted[fqn], rtol=1e-4, atol=1e-6)
    for group in ours.replicated_params:  # one gradient a stage, to be summed
        parts = [ours.split_gm.get_submodule(stage).get_parameter(fqn).grad for stage, fqn in group.items()]
        whole = wanted.get(next(iter(group.values())))
        torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-6)


def _stages(pipe):
    """Of each stage: the parameters and buffers that it owns, and what it computes."""
    pictures = []
    for i in range(pipe.num_stages):
        stage = pipe.get_stage_module(i)
        pictures.append((sorted(stage.state_dict()), sorted(n for n, _ in stage.named_modules())))
    return pictures


def _by_hand(pipe, args):
    """Call the stages in the order of their numbers, each with what the graph of the pipe gives it."""
    env = dict(zip(pipe.split_gm.graph.find_nodes(op="placeholder"), args, strict=True))
    calls = []
    for node in pipe.split_gm.graph.nodes:
        if node.op == "call_module":
            calls.append(node.target)
            env[node] = pipe.split_gm.get_submodule(node.target)(*[env[a] for a in node.args])
        elif node.op == "call_function":
            env[node] = node.target(env[node.args[0]], node.args[1])
        elif node.op == "output":
            last = node.all_input_nodes[0]
    assert calls == [f"submod_pp_{i}" for i in range(len(calls))]
    return env[last].logits if hasattr(env[last], "logits") else env[last]


@pytest.mark.parametrize("name", these_first(["gpt2"], ["bert"]))
def test_the_policy_cuts_where_the_split_spec_does(use, small, name):
    """And leaves nothing to repair: stages own their parameters, ties are listed, no marker is in a stage."""
    model, inputs = built(small, name)
    gm = sk.capture(model, **inputs)
    made = sk.split(gm, AtMarkers(CASES[name]))
    use("torch", PLACE)
    pipe = pipeline(built(small, name)[0], (), inputs, split_spec=CASES[name])
    assert list(made.parts) == list(range(pipe.num_stages))
    tied = _owned(model, remove_duplicate=False) - _owned(model) | {
        n for g in pipe.replicated_params for n in g.values()
    }
    for i, part in made.parts.items():
        assert _owned(part) - tied == _owned(pipe.get_stage_module(i)) - tied
    assert len(made.shared) == len(pipe.replicated_params)
    assert torch.equal(made(**inputs).logits, model(**inputs).logits)


def _owned(module, **options):
    return {n for n, _ in module.named_parameters(**options)}


def test_markers_in_a_row_begin_one_part(small):
    """torch's pipeline numbers the stages 0, 2, 4 then, and `get_stage_module(1)` fails."""
    model, inputs = built(small, "bert")
    gm = sk.capture(model, **inputs)
    spec = {"bert.encoder.layer.1": SplitPoint.END, "bert.encoder.layer.2": SplitPoint.BEGINNING}
    made = sk.split(gm, AtMarkers(spec))
    assert list(made.parts) == [0, 1]
    assert torch.equal(made(**inputs).logits, model(**inputs).logits)


class Marked(torch.nn.Module):
    """People put pipe_split() into their models: between layers, twice in a row, and at the very beginning."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        from torch.distributed.pipelining import pipe_split

        pipe_split()
        x = self.layers[1](self.layers[0](x).relu())
        pipe_split()
        pipe_split()
        x = self.layers[2](x).relu()
        pipe_split()
        return self.layers[3](x)


def test_markers_in_the_model_stay_in_the_host():
    model, x = Marked(), torch.randn(2, 8)
    gm = sk.capture(model, x)
    made = sk.split(gm, AtMarkers("pippy::_pipe_split"))
    assert {key: len(list(part.parameters())) for key, part in made.parts.items()} == {0: 4, 1: 2, 2: 2}
    assert not any("pipe_split" in n.name for part in made.parts.values() for n in part.graph.nodes)
    assert torch.equal(made(x), model(x))
