"""Generation with tiny models of transformers' classes: ``python benchmarks/generation_classes.py llama gemma3``.

Each class is tried in a process of its own, with a limit of time and memory, on two devices of one process:

``equal``       the greedy tokens are those of the unsplit model.
``refused``     SK401 at the capture.
``not made``    no tiny model was made from the configuration, or the unsplit model does not generate.
``fault``       anything else: another error, other tokens, or a process that died.

The exit code is 1 after a fault. Names are those of configurations; without names, all classes that transformers lists
run, which takes hours.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import splitkit as sk
from splitkit.errors import SplitError

MAPPINGS = ("CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SPEECH_SEQ_2_SEQ")
VOCABULARY = 128
_SIZES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("vocab_size",), VOCABULARY),
    (("key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    (("head_dim", "d_kv", "kv_channels"), 8),
    (("rotary_dim",), 4),
    (("experts_per_tok", "experts_per_token", "moe_topk", "moe_k"), 2),
    (("n_group", "topk_group"), 1),
    (("num_experts", "local_experts", "routed_experts"), 4),
    (("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "depth"), 2),
    (("attention_heads", "num_heads", "n_head", "n_heads"), 4),
    (("lora_rank",), 16),
    (("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size", "d_inner", "n_inner", "mlp_dim"), 64),
    (("hidden_size", "d_model", "n_embd", "embed_dim", "hidden_dim"), 32),
    (("position_embeddings", "n_positions", "target_positions"), 128),
    (("source_positions",), 20),
    (("mel_bins",), 8),
    (("image_size",), 16),
    (("patch_size",), 8),
)
"""Endings of the names of sizes, and the largest value; the first that fits counts."""


def shrunk(config: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a configuration, as a dict, with small sizes and two layers, also in the configurations inside."""
    made = {
        name: shrunk(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if not str(name).isdigit() or int(name) < 2  # a layer
    }
    layers = next((made[name] for name in ("num_hidden_layers", "num_layers") if name in made), None)
    for name, value in [(name, value) for name, value in made.items() if isinstance(name, str)]:
        if isinstance(value, int) and not isinstance(value, bool):
            size = next((size for ends, size in _SIZES if name.endswith(ends)), None)
            if name.endswith(("token_id", "token_index")):
                made[name] = value if value < VOCABULARY else 90 + sum(map(ord, name)) % 30
            elif size is not None:
                made[name] = size if name.endswith("head_dim") else min(value, size)
                if name.endswith("key_value_heads") and value == config.get(name.replace("key_value", "attention")):
                    made[name] = min(value, 4)
        elif isinstance(value, list) and (len(value) == layers or name.endswith("layer_types")) and len(value) > 2:
            made[name] = [value[0], value[-1]]
    if "rope_type" in made:
        made["mrope_section"] = [1, 1, 2] if made.get("partial_rotary_factor", 1.0) == 1.0 else [0, 1, 1]
    if made.get("vocabulary_map", ()) is None:
        made["vocabulary_map"] = {
            "<image>": 100,
            **{f"IMGIMG{letter}Z": 100 + i for i, letter in enumerate("ABCDEFGH")},
        }
    if "model_type" in made:
        made |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return made


def model_of(class_name: str) -> Any:
    """Return a random model; all weights are drawn large, so that its tokens differ."""
    import transformers

    kind = getattr(transformers, class_name)
    config = kind.config_class.from_dict(shrunk(kind.config_class().to_dict()))
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point():
                parameter.normal_(std=0.3)
    settings = model.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.decoder_start_token_id = None, 0, 3
    return model


def inputs_of(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what the model's ``generate`` may read: tokens, or sound or an image for an encoder, of several shapes."""
    torch.manual_seed(1)
    main = getattr(model, "main_input_name", "input_ids")
    shapes = {
        "input_features": [(2, 8, 40), (2, 40, 8), (2, 40, 80), (2, 80, 40), (2, 40, 160), (2, 40, 128)],
        "input_values": [(2, 2000)],
        "flattened_patches": [(2, 6, 770), (2, 6, 194)],
        "pixel_values": [(2, 3, 16, 16)],
    }
    if model.config.is_encoder_decoder and main in shapes:
        yield from ({main: torch.randn(shape)} for shape in shapes[main])
        return
    tokens = {"input_ids": torch.randint(3, 60, (2, 7))}
    yield tokens
    yield tokens | {"pixel_values": torch.randn(2, 3, 16, 16)}


def generated(model: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """Return the first inputs from which the unsplit model generates, and its tokens."""
    refused: Exception | None = None
    for inputs in inputs_of(model):
        given = {**inputs, "max_new_tokens": 5, "do_sample": False}
        try:
            return given, copy.deepcopy(model).generate(**given)
        except Exception as error:
            refused = refused or error
    assert refused is not None
    raise refused


def outcome_of(class_name: str) -> tuple[str, str]:
    """Return the outcome of a class, and what was said."""
    try:
        model = model_of(class_name)
        given, want = generated(model)
    except Exception as error:
        return "not made", f"{type(error).__name__}: {error}"
    try:
        split = sk.split(sk.capture_decoder(model), sk.policies.Stages(2))
    except SplitError as error:
        return "refused" if error.code == "SK401" else "fault", f"{error.code}: {error.reason}"
    except Exception as error:
        return "fault", f"at the capture: {type(error).__name__}: {error}"
    try:
        got = sk.generator(model, split, ["cpu:0", "cpu:1"]).generate(**given)
    except Exception as error:
        return "fault", f"{type(error).__name__}: {error}"
    return ("equal", "") if torch.equal(got, want) else ("fault", f"{got.tolist()} and not {want.tolist()}")


def in_own_process(class_name: str, seconds: int) -> tuple[str, str]:
    """Return what `outcome_of` returns in a process that may take so many seconds of CPU, and 6 GiB."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            outcome, said = outcome_of(class_name)
            os.write(write, json.dumps([outcome, said[:500]]).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    outcome, said = json.loads(text) if text else ("fault", "the process died")
    return outcome, said


def classes(names: list[str]) -> Iterator[str]:
    """Yield the classes that transformers lists for configurations with these names; for all without names."""
    from transformers.models.auto import modeling_auto

    found = [getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES") for mapping in MAPPINGS]
    listed = [(name, kind) for mapping in found for name, kind in mapping.items() if isinstance(kind, str)]
    yield from dict.fromkeys(kind for name, kind in listed if not names or name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=int, default=120, help="limit of CPU time for each class (default 120)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    faults = 0
    for kind in classes(args.names):
        outcome, said = in_own_process(kind, args.seconds)
        faults += outcome == "fault"
        print(f"{kind:50} {outcome:9} {' '.join(said.split())[:300]}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
