"""One rank that generates with an encoder or images, which run whole on rank 0; prints its results as JSON."""

from __future__ import annotations

import atexit
import copy
import json
import os
import shutil
import sys
import tempfile
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from decoders import IMAGE, captured, decoder

import splitkit as sk
import splitkit.runtime
from splitkit.engine.split import Split
from splitkit.errors import SplitError
from splitkit.graph.caches import constant_caches
from splitkit.runtime.generation.before_stages import ModelTokens
from splitkit.runtime.generation.decoder import DecoderChain
from splitkit.runtime.generation.encoder_caches import encoder_caches_of
from splitkit.runtime.generation.generator import before_stages
from splitkit.runtime.ranks.stage_chain import chain_of

END, PAD, LIMIT = 7, 0, 20.0
SAMPLED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 3}
PROMPTS: list[Any] = [[[9, 3, 5]], [[4] * 9, [8, 6, 3]], [[11]], [[5, 3, 90, 9, 3, 5]], [[9], [3, 4, 5, 6], [7, 8]]]


def prepare() -> None:
    """Capture once for all ranks; let T5 force and suppress tokens, which no configuration of it does."""
    for family in ("t5", "llava"):
        split_of(family, 2)
    known: Any = decoder("t5").generation_config
    known.forced_bos_token_id, known.forced_eos_token_id = 6, 8
    known.suppress_tokens, known.begin_suppress_tokens = [48, 58], [79]


@cache
def split_of(family: str, parts: int) -> Split:
    return sk.split(captured(family), sk.policies.Stages(parts))


@cache
def pictures(count: int, size: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(count))


def speech(count: int, frames: int = 40) -> torch.Tensor:
    return torch.randn(count, 8, frames, generator=torch.Generator().manual_seed(count))


def without_ends(rows: list[list[int]]) -> list[list[int]]:
    """As Whisper's ``generate``: without the token that ends a text."""
    return [row[:-1] if row[-1] == 2 else row for row in rows]


def good(family: str) -> list[dict[str, Any]]:
    """Prompts of different lengths, batches, some that end early, and sampling."""
    if family == "whisper":
        few = [{"input_features": speech(n), "max_new_tokens": 4 + 5 * n} for n in (1, 2, 3)]
        return [*few, {"input_features": speech(2).tolist(), "max_new_tokens": 9, **SAMPLED}]
    plain = [{"input_ids": prompts, "max_new_tokens": 5 + 4 * i} for i, prompts in enumerate(PROMPTS)]
    more = {"input_ids": [5, 6, 9], "max_new_tokens": 9, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    if family != "llava":
        start = {"input_ids": [[5, 6], [7, 9, 9]], "decoder_input_ids": [[4, 8]], "max_new_tokens": 6}
        return [*plain, start, {"input_ids": PROMPTS[1], "max_new_tokens": 9, **SAMPLED}, more]
    one, rows = [3, *[IMAGE] * 4, 5], [[*[IMAGE] * 4, 9], [8, 6, 4, *[IMAGE] * 4, 5, *[IMAGE] * 4], [7, 7, 3]]
    return [
        *plain[:3],
        {"input_ids": one, "pixel_values": pictures(1), "max_new_tokens": 9},
        {"input_ids": rows, "pixel_values": pictures(3), "max_new_tokens": 14},
        {"input_ids": rows, "inputs": {"pixel_values": pictures(3).tolist()}, "max_new_tokens": 8, **SAMPLED},
        {**more, "input_ids": one, "pixel_values": pictures(1)},
    ]


def bad(family: str) -> list[Any]:
    """Requests that fail alone."""
    if family == "whisper":
        return [
            {"input_ids": [5, 6]},
            {"input_features": speech(1, 12)},
            {"input_ids": [5, 6], "input_features": speech(1)},
            {"input_features": speech(1), "max_new_tokens": 39},
        ]
    if family == "llava":
        return [
            {"input_ids": [3, *[IMAGE] * 4]},
            {"input_ids": [3, *[IMAGE] * 4], "pixel_values": pictures(1, 8)},
            {"input_ids": [3, *[IMAGE] * 4], "pixel_values": pictures(2)},
            {"input_ids": [3, 4], "pixel_value": pictures(1)},
            {"input_ids": [3, *[IMAGE] * 4], "pixel_values": [[1, 2], [3]]},
            {"input_ids": [3, 96]},
        ]
    return [
        {"input_ids": [5, 6], "pixel_values": pictures(1)},
        {"input_ids": [5, 96]},
        {"input_ids": [5, 6], "decoder_input_ids": [[4], [5]]},
        {"input_ids": [[5] * 60] * 3, "max_new_tokens": 10},
        {"decoder_input_ids": [5, 6]},
        {"input_ids": [[5, 6], [7, 0]], "attention_mask": [[1, 1], [1, 0]]},
    ]


def expected(request: dict[str, Any], family: str) -> list[list[int]]:
    """What ``generate`` of the unsplit model gives, without prompt and padding."""
    given = {**request, **request.get("inputs", {})}
    torch.manual_seed(given.pop("seed", 0))
    given.pop("inputs", None)
    settings = {name: value for name, value in given.items() if name not in ("input_ids", "decoder_input_ids")}
    settings = {name: torch.tensor(v) if isinstance(v, list) else v for name, v in settings.items()}
    if family == "whisper":
        made = decoder(family).generate(**{"top_k": 0, **settings}).tolist()
        return [[token for token in row if token != PAD] for row in made]
    rows = given["input_ids"] if isinstance(given["input_ids"][0], list) else [given["input_ids"]]
    longest, left = max(map(len, rows)), family == "llava"
    ids, mask = (
        torch.tensor([fill * left + row + fill * (not left) for row, fill in zip(some, fills, strict=True)])
        for some, fills in (
            (rows, [[PAD] * (longest - len(row)) for row in rows]),
            ([[1] * len(row) for row in rows], [[0] * (longest - len(row)) for row in rows]),
        )
    )
    start = longest if left else 1
    if "decoder_input_ids" in given:
        settings["decoder_input_ids"] = torch.tensor(given["decoder_input_ids"]).expand(len(rows), -1)
        start = 1 + settings["decoder_input_ids"].shape[1]
    settings |= {"eos_token_id": END, "pad_token_id": PAD}
    made = decoder(family).generate(ids, attention_mask=mask, **{"top_k": 0, **settings})[:, start:].tolist()
    return [row[: row.index(END) + 1] if END in row else row for row in made]


def saved(split: Split, rank: int) -> str:
    """Write the stages of a split into a folder that all ranks know."""
    folder = [tempfile.mkdtemp() if not rank else ""]
    dist.broadcast_object_list(folder)
    if not rank:
        splitkit.runtime.save_stages(split, folder[0])
        atexit.register(shutil.rmtree, folder[0])
    dist.barrier()
    return folder[0]


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose weights are on ``meta``, and whose other buffers are not."""
    made = copy.deepcopy(model)
    for name in made.state_dict():
        owner, _, last = name.rpartition(".")
        module = made.get_submodule(owner)
        table: Any = module._parameters if last in module._parameters else module._buffers
        kind = torch.nn.Parameter if table is module._parameters else torch.Tensor.detach
        table[last] = kind(table[last].to("meta"))
    return made


def generated(family: str, size: int) -> dict[str, Any]:
    """Generate twice: all at once; and from a folder of stages, with prompts in chunks and room for few requests."""
    split, rank, model = split_of(family, size), dist.get_rank(), decoder(family)
    found: dict[str, Any] = {"left": [], "most": []}
    ends = {} if family == "whisper" else {"eos_token_id": END, "pad_token_id": PAD}
    folder = saved(split, rank)
    ways: list[tuple[Any, dict[str, Any]]] = [
        (split, {"cache_tokens": 200}),
        (splitkit.runtime.open_stages(folder), {"chunk": 4, "in_flight": 2, "cache_tokens": 150}),
    ]
    for stages, options in ways:
        given = None if rank else model if stages is split else on_meta(model)
        generator = sk.serve(stages, model=given, **ends, **options)
        stage, held, sent = generator.stage, [0], [0]
        enter, send = stage.enter, generator._ring.send

        def entered(number: int, *given: Any, enter: Any = enter, stage: Any = stage, held: Any = held) -> None:
            enter(number, *given)
            held.append(stage.cache_bytes())

        def counted(message: Any, send: Any = send, stage: Any = stage, sent: Any = sent) -> None:
            caches = {c.untyped_storage().data_ptr() for one in stage.held.values() for c in one.caches.values()}
            tensors = [v for v in (*message.values, *message.entering) if isinstance(v, torch.Tensor) and v.numel()]
            sent[0] += sum(v.nbytes for v in tensors if v.untyped_storage().data_ptr() in caches)
            send(message)

        stage.enter, generator._ring.send = entered, counted
        results = generator.generate([*bad(family)[:2], *good(family), *bad(family)[2:]] if not rank else ())
        found["left"].append(len(stage.held) + stage.cache_bytes())
        found["most"].append(max(held))
        found.setdefault("sent", []).append(sent[0])
        if not rank:
            made = [result.to_dict() for result in results]
            if family == "whisper":
                made = [{**result, "tokens": without_ends(result["tokens"])} for result in made]
            found.setdefault("made", []).append(made)
    if not rank:
        found["expected"] = [expected(request, family) for request in good(family)]
    return found


def facts() -> dict[str, Any]:
    """What stages have of an encoder, where its output goes, and which models are refused."""
    found: dict[str, Any] = {"entering": {}, "layers": {}, "refused": []}
    for family in ("t5", "llava"):
        decoding = chain(family, 4)
        found["entering"][family] = [int(decoding.sends_encoded(stage)) for stage in range(4)]
    for parts in (2, 4):
        decoding = chain("t5", parts)
        own = [names for stage in range(parts) if (names := decoding.constants(stage))]
        caches = [encoder_caches_of(captured("t5"), names) for names in own]
        read = [sorted({name.split("block.")[1][0] for name, _ in one.named_parameters()}) for one in caches]
        found["layers"][parts] = [read, [*sum(own, ())] == [*constant_caches(captured("t5"))]]
    for family, change in REFUSED:
        split = split_of(family, 2)
        inputs, known = chain(family, 2).inputs, ModelTokens.of(decoder(family))
        before_stages(copy.deepcopy(decoder(family)), split, inputs, known, torch.device("cpu"))
        try:
            before_stages(change(family), split, inputs, known, torch.device("cpu"))
            found["refused"].append("")
        except SplitError as error:
            found["refused"].append(str(error))
    return {**found, "unlike": require_like()}


@cache
def chain(family: str, parts: int) -> DecoderChain:
    return DecoderChain.of(chain_of(split_of(family, parts)))


def require_like() -> list[str]:
    """What is refused at a border: other dtypes and other dimensions."""
    said, wrong = (
        [],
        {"encoder_outputs_last_hidden_state": [torch.float16, torch.float32], "decoder_input_ids": [torch.int]},
    )
    for name, dtypes in wrong.items():
        for dtype in dtypes:
            try:
                chain("t5", 2).require_like(name, torch.zeros(1, 2, dtype=dtype))
            except SplitError as error:
                said.append(str(error))
    return said


def with_other_weights(family: str) -> Any:
    model: Any = copy.deepcopy(decoder(family))
    last = [value for name, value in model.named_parameters() if "encoder" in name or "vision" in name][-1]
    with torch.no_grad():
        last[0] += 1
    return model


REFUSED: list[tuple[str, Any]] = [
    ("t5", lambda family: None),
    ("llava", lambda family: None),
    ("t5", lambda family: decoder("llava")),
    ("t5", lambda family: copy.deepcopy(decoder(family)).train()),
    ("t5", lambda family: copy.deepcopy(decoder(family)).to("meta")),
    ("t5", with_other_weights),
    ("llava", with_other_weights),
]


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=size,
        timeout=timedelta(seconds=LIMIT),
    )  # fmt: skip
    said, found = "", {}
    try:
        if sys.argv[1] != "facts":
            found = generated(sys.argv[1], size)
        elif not rank:
            found = facts()
    except SplitError as error:
        said = str(error)
    print(json.dumps({"rank": rank, "family": sys.argv[1], "said": said, **found}), flush=True)


if __name__ == "__main__":
    prepare()
    main()
