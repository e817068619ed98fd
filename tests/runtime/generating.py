"""One rank that generates from a split decoder; prints what it made and how it ended, as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from decoders import FAMILIES, STATES, captured, decoder

import splitkit as sk
import splitkit.runtime.generation.generator as generator_module
from splitkit.engine.split import Split
from splitkit.errors import SplitError
from splitkit.runtime.generation.decoder import Message, Ring

OTHERS = ("gpt2", "mamba")
"""A tied weight, states; Llama's tables cross borders. A campaign has every family."""
END, PAD, LIMIT = 7, 0, 5.0
PROMPTS: list[Any] = [[[9, 3, 5]], [[4] * 9, [8, 6, 3]], [[11]], [[5, 3, 90, 9, 3, 5]], [[9], [3, 4, 5, 6], [7, 8]]]
REQUESTS: list[dict[str, Any]] = [
    *({"input_ids": prompts, "max_new_tokens": 5 + 6 * i} for i, prompts in enumerate(PROMPTS)),
    {"input_ids": [5, 6, 9], "max_new_tokens": 9, "do_sample": True, "temperature": 0.7, "top_k": 20, "seed": 3},
    {
        "input_ids": [5, 6, 9],
        "max_new_tokens": 9,
        "do_sample": True,
        "top_p": 0.8,
        "repetition_penalty": 1.2,
        "seed": 4,
    },
]
UNLUCKY = 13
"""The last rank fails to make the sampler of a request with this setting."""


class Broken(Mapping[str, Any]):
    """A request that fails while it is read."""

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def __iter__(self) -> Any:
        raise RuntimeError("not a request")

    def __len__(self) -> int:
        return 1


BAD: list[Any] = [
    {"input_ids": [5, 96]},
    {"input_ids": []},
    {"input_ids": [5, 6], "max_new_tokens": 99},
    {"input_ids": [[5, 6]] * 20, "max_new_tokens": 30},
    {"input_ids": [5, 6], "num_beams": 4},
    {"input_ids": [5, 6], "temprature": 0.5},
    Broken(),
    {"input_ids": [5, 6], "no_repeat_ngram_size": UNLUCKY},
]


def prepare() -> None:
    """Capture once for all ranks."""
    for name in ("llama", *OTHERS):
        captured(name)


def split_in(stages: int, family: str = "llama") -> Split:
    return sk.split(captured(family), sk.policies.Stages(stages))


def expected(request: dict[str, Any], family: str = "llama") -> list[list[int]]:
    """What ``generate`` of the unsplit model gives, without prompt and padding."""
    rows = request["input_ids"] if isinstance(request["input_ids"][0], list) else [request["input_ids"]]
    longest = max(map(len, rows))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    torch.manual_seed(request.get("seed", 0))
    settings = {name: value for name, value in request.items() if name not in ("input_ids", "seed")}
    made = (
        decoder(family)
        .generate(ids, attention_mask=mask, eos_token_id=END, **{"top_k": 0, **settings})[:, longest:]
        .tolist()
    )
    return [row[: row.index(END) + 1] if END in row else row for row in made]


def main() -> None:
    rank, size, what = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1]
    dist.init_process_group(
        "gloo", init_method=os.environ["SPLITKIT_STORE"], rank=rank, world_size=size,
        timeout=timedelta(seconds=LIMIT),
    )  # fmt: skip
    start, said, found = time.monotonic(), "", {}
    try:
        found = {"tokens": tokens, "family": family, "every": every, "messages": messages}.get(what, fails)(size)
    except SplitError as error:
        said = str(error)
    print(json.dumps({"rank": rank, "said": said, "took": time.monotonic() - start, **found}), flush=True)


def tokens(size: int) -> dict[str, Any]:
    """Generate twice: whole prompts, and prompts in chunks with room for few requests."""
    split, rank = split_in(size), dist.get_rank()
    found: dict[str, Any] = {"most": [], "left": []}
    make = generator_module.Sampler

    def unlucky(request: Any, *rest: Any) -> Any:
        if request.no_repeat_ngram_size == UNLUCKY:
            raise KeyError("no such processor")
        return make(request, *rest)

    generator_module.Sampler = unlucky  # type: ignore[misc, assignment]
    for options in ({}, {"chunk": 4, "in_flight": 2, "cache_tokens": 110}):
        generator = sk.serve(
            split, eos_token_id=END, pad_token_id=PAD, positions=64, **{"cache_tokens": 200, **options}
        )
        held, stage = [0], generator.stage
        enter = stage.enter
        stage.enter = lambda *args: held.append(enter(*args) or len(stage.held))
        results = generator.generate(iter([*BAD[:3], *REQUESTS, *BAD[3:]])) if not rank else generator.generate()
        found["most"].append(max(held))
        found["left"].append(len(stage.held) + stage.cache_bytes())
        if not rank:
            found.setdefault("made", []).append([result.to_dict() for result in results])
    if not rank:
        found["expected"] = [expected(request) for request in REQUESTS]
    return found


def every(size: int) -> dict[str, Any]:
    """Generate with models of all families."""
    return family(size, (*FAMILIES, *STATES))


def family(size: int, names: Sequence[str] = OTHERS) -> dict[str, Any]:
    """Generate with models of other families: mixed lengths, and one token after another in chunks of three."""
    made: dict[str, Any] = {}
    for name in names:
        results = sk.serve(split_in(size, name), eos_token_id=END, pad_token_id=PAD, chunk=3).generate(REQUESTS[:3])
        if not dist.get_rank():
            made[name] = [[result.to_dict()["tokens"] for result in results], [expected(r, name) for r in REQUESTS[:3]]]
    return {"families": made}


def fails(size: int) -> dict[str, Any]:
    """Generate while rank 1 ends by SIGKILL or fails at its fifth call, or while the logits of a request are nan."""
    what, rank = sys.argv[1], dist.get_rank()
    generator = sk.serve(split_in(size), eos_token_id=END, pad_token_id=PAD)
    calls, run = [], generator.stage.run

    def spoiled(number: int, *args: Any) -> Any:
        calls.append(number)
        if len(calls) == 5 and rank == 1 and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == 5 and rank == 1 and what == "raise":
            raise ValueError("no such thing")
        made = run(number, *args)
        return (made[0] * torch.nan,) if what == "nan" and number == 1 and rank == size - 1 else made

    generator.stage.run = spoiled
    results = generator.generate(REQUESTS[:4])
    return {"results": [result.to_dict() for result in results], "expected": [expected(r) for r in REQUESTS[:4]]}


def messages(size: int) -> dict[str, Any]:
    """Send a message round: what arrives must be what was sent, for each kind of value."""
    ring, rank = Ring(None, torch.device("cpu"), 2), dist.get_rank()
    same = []
    for count in (0, 1, 5, 9):
        base = torch.arange(3 * count * 2).half().reshape(count, 3, 2)
        values = (base.transpose(0, 1), 0.1, torch.tensor(True), -(2**40), torch.randn(count, 7).double(), True)
        sent = Message(3, count, True, {"note": count} if count else None, values)
        if not rank:
            torch.manual_seed(count)
            ring.send(sent)
        came = ring.receive()
        if rank:
            ring.send(came)
            continue
        plain = [a == b for a, b in zip(came.values, values, strict=True) if not isinstance(a, torch.Tensor)]
        exact = [
            torch.equal(a, b) and (count < 2 or a.stride() == b.stride())
            for a, b in zip(came.values, values, strict=True)
            if torch.is_tensor(a)
        ]
        heads = [getattr(came, name) == getattr(sent, name) for name in ("request", "query", "last", "note")]
        same.append(all([*plain, *exact, *heads]) and len(came.values) == len(values))
    ring.finish()
    return {"same": same}


if __name__ == "__main__":
    prepare()
    main()
