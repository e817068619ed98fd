"""A model on meta is captured, split and saved wherever its inputs and buffers are; buffers keep their values."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import splitkit as sk
from splitkit.errors import FileError, PipelineError
from splitkit.graph.storages import kept_values
from splitkit.runtime import open_stages, save_stages, to_devices
from splitkit.runtime.folder.tensorfiles import write_tensors
from splitkit.testing import models


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0), persistent=False)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.b(self.a(x * self.scale + self.shift))


def on_meta(real_buffers):
    with torch.device("meta"):
        model = Scaled()
    if real_buffers:
        model.scale, model.shift = torch.arange(4.0), torch.ones(4)
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("real_buffers", [False, True])
def test_a_model_on_meta_is_saved_with_the_buffers_that_are_known(device, real_buffers, tmp_path):
    model, x = on_meta(real_buffers), torch.ones(2, 4, device=device)
    gm = sk.capture(model, x)
    assert {b.device.type for b in model.buffers()} == ({"cpu"} if real_buffers else {"meta"})
    assert {b.device.type for b in gm.buffers()} == {"meta"}
    known = kept_values(gm)
    assert list(known) == (["scale"] if real_buffers else [])
    save_stages(sk.split(gm, sk.policies.Stages(2)), tmp_path / "stages", inputs=((x,), {}))
    whole = Scaled()
    write_tensors(tmp_path / "model.safetensors", whole.state_dict())
    held = open_stages(tmp_path / "stages", weights=tmp_path)
    if not real_buffers:
        with pytest.raises(FileError, match="SK507: .* has no scale"):
            held.load(range(2))
        return
    held.load(range(2))
    assert torch.equal(held.module(torch.ones(2, 4)), whole(torch.ones(2, 4)))
    if device == "meta":
        with pytest.raises(FileError, match="SK504: .* no example"):
            held.example()
    else:
        assert torch.equal(held.example()[0][0], x)


def test_a_graph_on_meta_takes_real_inputs_no_more_than_the_model(tmp_path):
    """A tensor without data is refused by `to_devices` with the way to load it."""
    split = sk.split(sk.capture(on_meta(False), torch.ones(2, 4)), sk.policies.Stages(2))
    with pytest.raises(PipelineError, match=r"SK807: .* on meta (.|\n)*splitkit\.load\(split, folder, devices\)"):
        to_devices(split, ["cpu:0", "cpu:1"])
    with pytest.raises(PipelineError, match="SK807: .* StageFolder"):
        save_stages(split, tmp_path)
        to_devices(open_stages(tmp_path), "cpu")


class Counts(nn.Module):
    """Counts what experts get, as transformers does for products of groups."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(4, 3)

    def forward(self, x):
        chosen = self.router(x).argmax(-1)
        counted = torch.histc(chosen.float() if x.device.type == "cpu" else chosen.int(), bins=3, min=0, max=2)
        return x * counted.cumsum(0, dtype=torch.int32)[chosen, None]


def test_experts_that_were_captured_on_meta_are_counted_on_a_cpu(tmp_path):
    torch.manual_seed(0)
    whole, x = Counts(), torch.randn(9, 4)
    write_tensors(tmp_path / "model.safetensors", whole.state_dict())
    with torch.device("meta"):
        model = Counts()
    split = sk.load(sk.split(sk.capture(model, x), sk.policies.Stages(2)), tmp_path, ["cpu:0", "cpu:1"])
    assert torch.equal(split(x), whole(x))


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text"])
def test_rotary_buffers_of_transformers_are_computed_again(family):
    transformers = pytest.importorskip("transformers")
    kind = {"Llama": "LlamaForCausalLM", "Gemma3Text": "Gemma3ForCausalLM"}[family]
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{family}Config")(**sizes, intermediate_size=16, num_key_value_heads=1, head_dim=8)
    whole = getattr(transformers, kind)(config).eval()
    with torch.device("meta"):
        model = getattr(transformers, kind)(config).eval()
    state = torch.random.get_rng_state()
    inputs = {"input_ids": torch.ones(1, 4, dtype=torch.long), "use_cache": False}
    known = kept_values(sk.capture(model, **inputs))
    with torch.device("meta"):  # as the model is made
        assert kept_values(sk.capture(model, **inputs)).keys() == known.keys()
    assert torch.equal(torch.random.get_rng_state(), state)
    saved = whole.state_dict()
    wanted = {name: b for name, b in whole.named_buffers() if name not in saved}
    assert known.keys() == wanted.keys() != set()
    assert all(torch.equal(known[name], b) for name, b in wanted.items())


@pytest.mark.parametrize("real_buffers", [False, True])
def test_a_training_step_on_meta_takes_inputs_and_buffers_that_are_elsewhere(real_buffers):
    model, x = on_meta(real_buffers), torch.ones(2, 4)
    joint = sk.capture(model, x, training=True, loss=lambda y: y.sum())
    values = [n.meta["val"] for n in joint.graph_module.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    assert {value.device.type for value in values} == {"meta"}
    assert {b.device.type for b in model.buffers()} == ({"cpu"} if real_buffers else {"meta"})
    assert len(joint.signature.gradients) == 4


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_graph_from_meta_is_the_graph_from_the_cpu(family):
    """What attention returns lies in memory as on the CPU, so that nothing is copied after it."""
    example = models.build(family, layers=1, width=16, heads=2, vocab=16, seq=4)
    graphs = []
    for device in ("cpu", "meta"):
        gm = sk.capture(example.model.eval().to(device), *example.args, **example.kwargs)
        step = sk.capture_decoder(example.model)
        graphs.append([(n.name, str(n.target), shape_of(n)) for graph in (gm, step) for n in graph.graph.nodes])
    assert graphs[0] == graphs[1]
    assert any("scaled_dot_product" in name for name, *_ in graphs[0])


def shape_of(node):
    value = node.meta.get("val")
    return (str(value.shape), str(value.stride())) if isinstance(value, torch.Tensor) else None
