"""Models of transformers that are sharded by their own plans."""

from __future__ import annotations

import pytest
import torch
from shardednets import first_of
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import splitkit as sk
from splitkit.errors import CaptureError
from splitkit.graph.shards import collective_group, local_tensor
from splitkit.testing import models
from splitkit.testing.tensor_parallel import shard_model

SIZES = {"layers": 1, "width": 16, "heads": 4, "vocab": 32, "seq": 8}


@pytest.fixture(scope="module")
def whole():
    with first_of(4) as made:
        yield made


@pytest.fixture
def mesh(whole):
    return whole["tp"]


def small(kind, **more):
    config = CONFIG_MAPPING[kind](
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=32, head_dim=4, **more,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def shards_of(model):
    return {name for name, p in model.named_parameters() if local_tensor(p).numel() < p.numel()}


def test_gpt2_has_its_products_sharded(mesh):
    example = models.build("gpt2", **SIZES)
    shard_model(example.model, mesh)
    products = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    biases = {"transformer.h.0.attn.c_attn.bias", "transformer.h.0.mlp.c_fc.bias"}
    assert shards_of(example.model) == {f"transformer.h.0.{name}.weight" for name in products} | biases
    graph = sk.capture(example.model, **example.kwargs, training=True).graph_module.graph
    # forward: all columns of q, k, v, then the sum of either product; backward: what columns of a rank do to its input
    ops = [str(n.target).split(".")[1] for n in graph.nodes if collective_group(n) is not None]
    assert ops.count("all_reduce") == 4 and ops.count("all_gather_into_tensor") == 2


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mistral"])
def test_the_plan_of_a_family(mesh, kind):
    model = small(kind)
    shard_model(model, mesh)
    layers = {name.removeprefix("model.layers.0.") for name in shards_of(model) if name.startswith("model.layers.0.")}
    wanted = {f"self_attn.{n}_proj.weight" for n in "qkvo"} | {f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert {name for name in layers if name.endswith("weight")} == wanted
    assert "lm_head.weight" in shards_of(model) and "model.embed_tokens.weight" not in shards_of(model)


def test_experts_stay_whole(mesh):
    example = models.build("mixtral", **SIZES, experts=2)
    shard_model(example.model, mesh)
    assert all("self_attn" in name or name == "lm_head.weight" for name in shards_of(example.model))


def test_a_style_that_torch_lacks(mesh):
    with pytest.raises(CaptureError, match="SK401: Qwen3ForCausalLM cannot be sharded.*q_norm as 'replicated_with"):
        shard_model(small("qwen3"), mesh)


def test_heads_that_ranks_cannot_share(mesh):
    with pytest.raises(CaptureError, match="SK401: LlamaForCausalLM has 1 num_key_value_heads, which 2 ranks"):
        model = small("llama")
        model.config.num_key_value_heads = 1
        shard_model(model, mesh)


def test_a_model_without_a_plan(mesh):
    with pytest.raises(CaptureError, match="SK401: Linear cannot be sharded: transformers has no plan"):
        shard_model(torch.nn.Linear(2, 2), mesh)


def test_a_mesh_of_two_dimensions(whole):
    with pytest.raises(CaptureError, match="one dimension, and the mesh has 2"):
        shard_model(small("llama"), whole)
