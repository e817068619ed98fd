"""The bytes of quantized checkpoints as publishers write them, by the headers of their files and by configurations."""

from __future__ import annotations

import json
from math import prod

import pytest
import transformers
from small_configs import config_of

import splitkit as sk
from splitkit.studies.fit.block_fit import weight_bytes
from splitkit.studies.fit.fit_model import blocks_of, fit_model

WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1, "I8": 1, "I32": 4, "I64": 8}
SYMMETRIC = {"symmetric": True}


def compressed(form, **weights):
    group = {"targets": ["Linear"], "weights": SYMMETRIC | weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
BNB_4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_use_double_quant": True}
BNB_8 = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
FBGEMM = {
    "quant_method": "fbgemm_fp8",
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.self_attn" for i in range(9))],
}
FP8 = compressed("float-quantized", num_bits=8, type="float", strategy="tensor")
FP8_BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 32]}
W4A16 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)

# name of a matrix, rows and columns -> what the publishers' files have of it
LAYOUTS = {
    "fp8": (
        FP8,
        lambda n, r, c: {n: ("F8_E4M3", r, c), f"{n}_scale": ("BF16", 1), f"{n[:-6]}input_scale": ("BF16", 1)},
    ),
    "fp8 blocks": (
        FP8_BLOCKS,
        lambda n, r, c: {n: ("F8_E4M3", r, c), f"{n}_scale_inv": ("F32", -(-r // 32), -(-c // 32))},
    ),
    "fbgemm": (FBGEMM, lambda n, r, c: {n: ("F8_E4M3", r, c), f"{n}_scale": ("F32", r, 1)}),
    "w4a16": (
        W4A16,
        lambda n, r, c: {
            f"{n}_packed": ("I32", r, c // 8), f"{n}_scale": ("BF16", r, c // 32), f"{n}_shape": ("I64", 2),
        },
    ),
    "nvfp4": (
        NVFP4,
        lambda n, r, c: {
            f"{n}_packed": ("U8", r, c // 2), f"{n}_scale": ("F8_E4M3", r, c // 16), f"{n}_global_scale": ("F32", 1),
        },
    ),
    "bnb 4": (
        BNB_4,
        lambda n, r, c: {
            n: ("U8", r * c // 2, 1), f"{n}.absmax": ("U8", r * c // 64), f"{n}.quant_map": ("F32", 16),
            f"{n}.nested_absmax": ("F32", -(-r * c // 64 // 256)), f"{n}.nested_quant_map": ("F32", 256),
            f"{n}.quant_state.bitsandbytes__nf4": ("U8", 90),
        },
    ),
    "bnb 8": (BNB_8, lambda n, r, c: {n: ("I8", r, c), f"{n[:-6]}SCB": ("F32", r), f"{n[:-6]}weight_format": ("U8",)}),
    "gptq": (
        GPTQ,
        lambda n, r, c: {
            f"{n[:-6]}qweight": ("I32", c // 8, r), f"{n[:-6]}qzeros": ("I32", c // 32, r // 8),
            f"{n[:-6]}scales": ("F16", c // 32, r), f"{n[:-6]}g_idx": ("I32", c),
        },
    ),
}  # fmt: skip


def write_files(folder, tensors, shards=1):
    """Files of safetensors with holes in the place of their numbers, and an index if there are several."""
    names, index = list(tensors), {}
    for shard in range(shards):
        header, place = {}, 0
        for name in names[shard::shards]:
            kind, *shape = tensors[name]
            nbytes = WIDTH[kind] * prod(shape)
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [place, place + nbytes]}
            place += nbytes
        text = json.dumps(header).encode()
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        index |= dict.fromkeys(header, file)
        with (folder / file).open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + place)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return sum(WIDTH[kind] * prod(shape) for kind, *shape in tensors.values())


def write_config(folder, config, stored):
    kind = {"llama": "LlamaForCausalLM", "gpt_oss": "GptOssForCausalLM", "mixtral": "MixtralForCausalLM"}[
        config.model_type
    ]
    data = config.to_dict() | {"architectures": [kind], "dtype": "bfloat16", "quantization_config": stored}
    (folder / "config.json").write_text(json.dumps(data))


def names_and_shapes(config):
    """The names and shapes of a Llama's tensors, as in its files."""
    h, m, kv = config.hidden_size, config.intermediate_size, config.num_key_value_heads * config.head_dim
    linear = {f"self_attn.{n}_proj": (r, h) for n, r in (("q", h), ("k", kv), ("v", kv), ("o", h))}
    linear |= {"mlp.gate_proj": (m, h), "mlp.up_proj": (m, h), "mlp.down_proj": (h, m)}
    layers = range(config.num_hidden_layers)
    matrices = {f"model.layers.{i}.{n}.weight": shape for i in layers for n, shape in linear.items()}
    norms = [f"model.layers.{i}.{n}_layernorm.weight" for i in layers for n in ("input", "post_attention")]
    others = {
        "model.embed_tokens.weight": ("BF16", config.vocab_size, h),
        "lm_head.weight": ("BF16", config.vocab_size, h),
    }
    return matrices, others | dict.fromkeys((*norms, "model.norm.weight"), ("BF16", h))


def weights_of(folder):
    made = fit_model(str(folder), None)
    return made, sum(made.stored.values())


@pytest.mark.parametrize("name", LAYOUTS)
def test_files_and_configurations_tell_the_same_bytes(tmp_path, name):
    stored, layout = LAYOUTS[name]
    config = config_of("llama")
    write_config(tmp_path, config, stored)
    _, by_config = weights_of(tmp_path)
    matrices, tensors = names_and_shapes(config)
    skipped = "self_attn" if name == "fbgemm" else "nothing"
    for matrix, (rows, columns) in matrices.items():
        tensors |= {matrix: ("BF16", rows, columns)} if skipped in matrix else layout(matrix, rows, columns)
    written = write_files(tmp_path, tensors, shards=3)
    made, by_files = weights_of(tmp_path)
    assert by_files == written
    # what has one size for each matrix, such as a code book, is not told by a configuration
    assert abs(by_files - by_config) <= len(matrices) * (64 + 1024 + 90 + 16 if name == "bnb 4" else 16)
    blocks = blocks_of(made.model, made.stored)
    of_layers = [weight_bytes([block]) for block in blocks if ".layers." in block.name]
    assert len(set(of_layers)) == 1 and of_layers[0] * 4 < written


def oss():
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    return transformers.GptOssConfig(**sizes, num_key_value_heads=2, vocab_size=160, num_local_experts=4)


def test_experts_in_mxfp4(tmp_path):
    write_config(tmp_path, oss(), MXFP4)
    made, by_config = weights_of(tmp_path)
    tensors = {}
    for name, tensor in made.model.state_dict().items():
        if tensor.ndim == 3:  # experts, input, output
            count, columns, rows = tensor.shape
            tensors[f"{name}_blocks"] = ("U8", count, rows, columns // 32, 16)
            tensors[f"{name}_scales"] = ("U8", count, rows, columns // 32)
        else:
            tensors[name] = ("BF16", *tensor.shape)
    assert by_config == write_files(tmp_path, tensors) == weights_of(tmp_path)[1]
    found = sk.fit(str(tmp_path), "1x1GiB", tokens=8)
    buffers = sum(buffer.nbytes for buffer in made.model.buffers())
    assert found.fits and found.devices[0].held.weights == by_config + buffers
    assert "--memory" not in found.next  # plan counts weights as the model computes with them


def test_experts_one_by_one_belong_to_their_layer(tmp_path):
    config = config_of("mixtral")
    write_config(tmp_path, config, W4A16)
    made, by_config = weights_of(tmp_path)
    layout, tensors = LAYOUTS["w4a16"][1], {}
    for name, tensor in made.model.state_dict().items():
        old = name.replace("mlp.", "block_sparse_moe.")
        if tensor.ndim == 3:
            parts, rows = (("w1", "w3"), tensor.shape[1] // 2) if "gate_up" in name else (("w2",), tensor.shape[1])
            for i, part in ((i, part) for i in range(len(tensor)) for part in parts):
                tensors |= layout(f"{old.rpartition('.')[0]}.{i}.{part}.weight", rows, tensor.shape[2])
        elif "_proj" in name:
            tensors |= layout(name, *tensor.shape)
        else:
            tensors[old] = ("BF16", *tensor.shape)
    written = write_files(tmp_path, tensors)
    assert weights_of(tmp_path)[1] == written and abs(written - by_config) < 20 * len(tensors)


def test_what_is_not_known_is_refused_by_name(tmp_path):
    config = config_of("llama")
    for stored, name in (
        (BNB_4, "bitsandbytes"),
        ({"quant_method": "odd"}, "odd"),
        (compressed("marlin-24", num_bits=4), "marlin"),
    ):
        write_config(tmp_path, config_of("mixtral") if stored is BNB_4 else config, stored)
        with pytest.raises(sk.SplitError, match=rf"SK401.*{name}.*\n.*safetensors files beside it"):
            sk.fit(str(tmp_path), "1x1GiB", tokens=8)
    # the remedy: files tell the bytes of any format
    write_config(tmp_path, config, {"quant_method": "odd"})
    matrices, tensors = names_and_shapes(config)
    tensors |= {name: ("I8", *shape) for name, shape in matrices.items()}
    written = write_files(tmp_path, tensors)
    assert weights_of(tmp_path)[1] == written
    write_files(tmp_path, tensors | {"model.layers.9.mlp.up_proj.weight": ("I8", 4)})
    with pytest.raises(sk.SplitError, match=r"SK507.*model\.layers\.9\.mlp.*the model has not"):
        weights_of(tmp_path)
    write_files(tmp_path, {name: tensor for name, tensor in tensors.items() if "norm" not in name})
    with pytest.raises(sk.SplitError, match=r"SK507.*has no model\.layers\.0\.input_layernorm"):
        weights_of(tmp_path)
    with pytest.raises(sk.SplitError, match=r"SK302.*cannot be trained"):
        write_files(tmp_path, tensors)
        sk.fit(str(tmp_path), "1x1GiB", tokens=8, train="adamw")


def test_a_clone_without_its_large_files_is_counted_by_its_configuration(tmp_path):
    write_config(tmp_path, config_of("llama"), AWQ)
    _, by_config = weights_of(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert weights_of(tmp_path)[1] == by_config


LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
OSS_120B = {"num_hidden_layers": 36, "num_local_experts": 128}
OSS_20B = {"num_hidden_layers": 24, "num_local_experts": 32}


@pytest.mark.parametrize(
    ("kind", "sizes", "stored", "published"),
    [
        ("LlamaConfig", LLAMA_8B, FP8, 9.08e9),  # RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8, as huggingface.co shows it
        ("LlamaConfig", LLAMA_8B, BNB_4, 5.70e9),  # unsloth/Meta-Llama-3.1-8B-bnb-4bit
        ("LlamaConfig", LLAMA_8B, AWQ, 5.73e9),  # hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4
        ("GptOssConfig", OSS_120B, MXFP4, 60.8 * 2**30),  # table 1 of the model card of gpt-oss (2025)
        ("GptOssConfig", OSS_20B, MXFP4, 12.8 * 2**30),
    ],
)
def test_published_checkpoints(kind, sizes, stored, published):
    config = getattr(transformers, kind)(**sizes, quantization_config=stored)
    made = fit_model(config, None)
    assert abs(sum(made.stored.values()) / published - 1) < 0.02
