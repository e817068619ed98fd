"""Generation with small random models of twelve families on two devices of one process: ``--json`` for machines.

``equal``       the greedy tokens of a batch of prompts of different lengths, with a sequence that ends early, are
                those of the unsplit model.
``cache sent``  bytes of keys and values among the tensors that are copied from part to part, in all steps.
``predicted``   bytes of each part at the peak of the last step, by `splitkit.runtime.decoder_memory`, and as measured.
``steps/s``     decode steps a second: of the unsplit model, of `splitkit.generator`, and of the model after
                ``accelerate.dispatch_model`` with a hook on every layer. All devices are this CPU, so nothing is copied
                and nothing runs at the same time: the figures compare what the two ways to split cost beside compute.

Figures of time are medians of the rounds, in which the three take turns. Beware of other load.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import splitkit as sk
from splitkit.errors import SplitError
from splitkit.runtime.devices.accelerators import Send
from splitkit.runtime.devices.on_devices import PartOnDevice
from splitkit.runtime.generation.local_generator import DecoderOnDevices

SEQUENCES, PROMPT, TOKENS, WIDTH, VOCABULARY = 4, 16, 48, 128, 512
DEVICES = ["cpu:0", "cpu:1"]
IMAGE, PATCHES = 500, 4
_TEXT: Mapping[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_OWN: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    # with tied weights these two repeat one token
    "gemma2": {"head_dim": 16, "sliding_window": 20, "tie_word_embeddings": False},
    "gemma3_text": {"head_dim": 16, "sliding_window": 20, "tie_word_embeddings": False},
    "mistral": {"sliding_window": 20},
    "mixtral": {"num_local_experts": 4},
    "gpt2": {"n_embd": WIDTH, "n_layer": 4, "n_head": 8, "n_positions": 64},
    "mamba": {"state_size": 16},
}
FAMILIES = (*list(_OWN)[:-1], "t5", "whisper", "llava", "mamba")


def model_of(family: str) -> Any:
    """Return a random model; all weights are drawn large, so that its tokens differ."""
    import transformers as hf

    torch.manual_seed(7)
    if family == "t5":
        sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 3 * WIDTH, "num_layers": 4, "num_heads": 8}
        made: Any = hf.T5ForConditionalGeneration(
            hf.T5Config(**sizes, vocab_size=VOCABULARY, decoder_start_token_id=0, eos_token_id=None)
        )
    elif family == "whisper":
        layers = {"encoder_layers": 4, "decoder_layers": 4, "encoder_attention_heads": 8, "decoder_attention_heads": 8}
        wide = {"encoder_ffn_dim": 3 * WIDTH, "decoder_ffn_dim": 3 * WIDTH, "d_model": WIDTH, "num_mel_bins": 8}
        ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 3}
        long = {"max_source_positions": 20, "max_target_positions": 64, "vocab_size": VOCABULARY}
        made = hf.WhisperForConditionalGeneration(hf.WhisperConfig(**layers, **wide, **ends, **long))
        made.generation_config.no_timestamps_token_id, made.generation_config.is_multilingual = 400, False
    elif family == "llava":
        sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 4}
        seen = hf.CLIPVisionConfig(**sizes, image_size=16, patch_size=8, projection_dim=WIDTH)
        made = hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(
                vision_config=seen,
                text_config=hf.LlamaConfig(**_TEXT),
                image_token_id=IMAGE,
                image_seq_length=PATCHES,
            )
        )
    else:
        made = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(family, **{**_TEXT, **_OWN[family]}))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    return made.eval()


def inputs_of(family: str) -> tuple[dict[str, Any], int]:
    """Return inputs for ``generate``, of several lengths, and the positions that the decoder has after them."""
    torch.manual_seed(5)
    if family == "whisper":
        return {"input_features": torch.randn(SEQUENCES, 8, 40)}, 1
    # the encoder of T5 has as many tokens as the decoder comes to have: so many does the prediction assume
    length = TOKENS if family == "t5" else PROMPT
    ids, mask = torch.randint(3, 90, (SEQUENCES, length)), torch.ones(SEQUENCES, length, dtype=torch.long)
    for row in range(1, SEQUENCES):
        mask[row, : 3 * row] = 0
    if family == "t5":
        mask = mask.flip(1)
        return {"input_ids": ids * mask, "attention_mask": mask}, 1
    given = {"input_ids": ids * mask, "attention_mask": mask}
    if family == "llava":
        given["input_ids"][:, -PATCHES - 1 : -1] = IMAGE
        given["pixel_values"] = torch.randn(SEQUENCES, 3, 16, 16)
    return given, length


def tokens_of(model: Any, given: Mapping[str, Any], new: int, **options: Any) -> torch.Tensor:
    """Return the greedy tokens of so many new ones; without an end token in the options, none ends earlier."""
    ends = {"min_new_tokens": new} if "eos_token_id" not in options else {}
    made: torch.Tensor = model.generate(**given, max_new_tokens=new, do_sample=False, pad_token_id=0, **ends, **options)
    return made


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the bytes that are copied between parts, and those of caches among them."""
    found, sent = {"sent": 0, "cache sent": 0}, list[torch.Tensor]()
    send, step = Send._moved, DecoderOnDevices.step

    def moved(self: Any, tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor)
        return send(self, tensor)

    def stepped(self: Any, inputs: Any, caches: list[torch.Tensor]) -> Any:
        # all are held to the end of the step, or another tensor could get the memory of an old cache
        held = list(caches)
        sent.clear()
        made = step(self, inputs, caches)
        places = {tensor.untyped_storage().data_ptr() for tensor in (*held, *made[1]) if tensor.numel()}
        found["sent"] += sum(tensor.nbytes for tensor in sent)
        found["cache sent"] += sum(t.nbytes for t in sent if t.untyped_storage().data_ptr() in places)
        return made

    with mock.patch.object(Send, "_moved", moved), mock.patch.object(DecoderOnDevices, "step", stepped):
        yield found


@contextmanager
def measured() -> Iterator[list[int]]:
    """Measure the peak of each part; the last ones are those of the last step."""
    peaks: list[int] = []

    def run(self: Any, *given: Any) -> Any:
        outputs: list[Any] = []
        peaks.append(sk.measure_memory(lambda: outputs.append(self.part(*given))).peak)
        return outputs[0]

    with mock.patch.object(PartOnDevice, "forward", run):
        yield peaks


def hooked(model: nn.Module) -> Any:
    """Return a model with accelerate's hooks on every layer, and on what is outside of the layers."""
    from accelerate import dispatch_model

    placed: dict[str, str] = {}

    def place(name: str, module: nn.Module) -> None:
        """Give a hook to the items of the outermost lists, and to modules without lists inside."""
        lists = any(isinstance(inner, nn.ModuleList) for inner in module.modules())
        if isinstance(module, nn.ModuleList) or (lists and not name.rpartition(".")[2].isdigit()):
            for inner, child in module.named_children():
                place(f"{name}.{inner}".lstrip("."), child)
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            placed.update({f"{name}.{inner}".lstrip("."): "cpu" for inner, _ in own})
        else:
            placed[name] = "cpu"

    place("", model)
    made: Any = dispatch_model(model, placed, main_device="cpu", force_hooks=True)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError("accelerate offloaded weights, which it should not here")
    return made


def seconds_of_a_step(model: Any, given: Mapping[str, Any], new: int) -> float:
    """Return the seconds of a decode step."""
    times = []
    for count in (1, new):
        start = time.perf_counter()
        tokens_of(model, given, count)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / (new - 1)


def measured_family(family: str, rounds: int) -> dict[str, Any]:
    """Return the row of a family."""
    model, (given, before) = model_of(family), inputs_of(family)
    new = TOKENS - before + 1
    try:
        split = sk.split(sk.capture_decoder(model), sk.policies.Stages(2))
    except SplitError as error:
        return {"family": family, "refused": f"{error.code}: {error.reason}"}
    whole = tokens_of(model, given, new)
    ends = int(whole[1, -new // 2])
    early = tokens_of(model, given, new, eos_token_id=ends)
    predicted = sk.runtime.decoder_memory(split, sequences=SEQUENCES, tokens=TOKENS)
    # parts move the weights of the model that they are given, and accelerate hooks another one
    generator, plain, hooks = sk.generator(model, split, DEVICES), model_of(family), hooked(model_of(family))
    with measured() as peaks:
        equal = torch.equal(tokens_of(generator, given, new), whole)
    with counted() as seen:
        equal = equal and torch.equal(tokens_of(generator, given, new, eos_token_id=ends), early)
    ways = {"whole": plain, "splitkit": generator, "accelerate": hooks}
    for way in ways.values():
        tokens_of(way, given, 2)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(seconds_of_a_step(way, given, new))
    return {
        "family": family,
        "equal": equal,
        "different": len({*whole.flatten().tolist()}),
        **seen,
        "predicted": [part.peak for part in predicted.values()],
        "measured": peaks[-len(split.parts) :],
        "cache": [part.cache for part in predicted.values()],
        "steps": {name: 1 / statistics.median(times) for name, times in taken.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in args.families:
        rows.append(measured_family(family, args.rounds))
        gc.collect()
    if args.json:
        print(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1))
        return
    table = Table("family", "equal", "cache sent", "predicted", "measured", "whole/s", "splitkit/s", "accelerate/s")
    for row in rows:
        if "refused" in row:
            table.add_row(row["family"], row["refused"])
            continue
        peaks = (" / ".join(f"{peak:,}" for peak in row[name]) for name in ("predicted", "measured"))
        speeds = (f"{row['steps'][name]:.0f}" for name in ("whole", "splitkit", "accelerate"))
        table.add_row(row["family"], str(row["equal"]), str(row["cache sent"]), *peaks, *speeds)
    Console().print(table)


if __name__ == "__main__":
    main()
