"""What chunks of a prompt of equal time would bring over chunks of equal length, by FLOPs and measured: ``--json``.

A chunk of c tokens after p others costs c (1 + (p + c / 2) / r): the layers cost the same for each token, and attention
as much as they after r positions. A prompt passes n stages as jobs pass a line of machines, in the time of all its
chunks and n - 1 times the longest one. Both ways have the same number of chunks here.

``prompt``    the time of a prompt with chunks of equal length over that with chunks of equal time.
``hold-up``   the longest chunk, for which other requests wait, over that of equal time.
``first``     the first chunk of equal time over one of equal length: the memory of activations grows with it.

These figures are ratios of FLOPs, and kernels are less efficient for short chunks. With ``--measure`` a prompt runs on
two gloo processes with one thread each, alone, in the same number of chunks both ways, in turns:

``computed``  the time to the first token with chunks of equal length over that with chunks of equal time.
``waits``     the same where each stage sleeps as long as its chunk has FLOPs, as if it waited for an accelerator: what
              is left of the gain when nothing disturbs the processes.
``hold-up``   the longest chunk of the first stage, both ways.

``equals`` is the number of positions after which attention costs as much as the layers: by FLOPs, and as fitted to the
times of the chunks in one process. Figures are medians of the rounds. Beware of other load.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import splitkit as sk
from splitkit.runtime import Generator, Request

MODELS = {
    # parameters that multiply each token (without the embedding), heads x head size, layers
    "Llama-3-8B": (7.5e9, 32 * 128, 32),
    "Llama-3-70B": (69.5e9, 64 * 128, 80),
}
PROMPTS = ((8192, 512), (32768, 2048), (131072, 2048))


def row(model: str, tokens: int, chunk: int, stages: int) -> dict[str, float | int | str]:
    """Return the ratios of a prompt that is run in chunks."""
    parameters, width, layers = MODELS[model]
    equals = parameters * 2 / (4 * width * layers)
    count = tokens // chunk
    long = [_cost(chunk, i * chunk, equals) for i in range(count)]
    each = sum(long) / count
    first = equals * (math.sqrt(1 + 2 * each / equals) - 1)
    return {
        "model": model,
        "tokens": tokens,
        "chunk": chunk,
        "stages": stages,
        "prompt": (sum(long) + (stages - 1) * long[-1]) / (sum(long) + (stages - 1) * each),
        "hold-up": long[-1] / each,
        "first": first / chunk,
    }


def _cost(chunk: float, before: float, equals: float) -> float:
    return chunk * (1 + (before + chunk / 2) / equals)


LAYERS, WIDTH, HEADS, RANKS, SHORTER = 4, 256, 8, 2, 8
EQUALS = 2 * (4 + 9) * WIDTH**2 / (4 * WIDTH)
"""By FLOPs, for layers with an intermediate size of three times the width."""


def equal_lengths(tokens: int, count: int) -> list[int]:
    return [tokens // count] * count


def equal_times(tokens: int, count: int, equals: float) -> list[int]:
    """Return the lengths of chunks of equal cost: the cost of p tokens is ``p + p ** 2 / (2 equals)``."""
    whole = tokens + tokens**2 / (2 * equals)
    ends = [round(equals * (math.sqrt(1 + 2 * whole * i / count / equals) - 1)) for i in range(count + 1)]
    return [end - start for start, end in itertools.pairwise(ends)]


class Chunked:
    """Runs a prompt in chunks of given lengths, and measures how long it takes."""

    def __init__(self, generator: Generator, tokens: int) -> None:
        self.generator, self.request = generator, Request(((1, 2, 3, 4) * (tokens // 4),), max_new_tokens=1)
        self.lengths: list[int] = []
        self.times: list[float] = []
        self.slept: float = 0.0
        start, run = generator._start, generator.stage.run

        def started(number: int, entry: Any, left: list[int]) -> bool:
            generator._chunk = self.lengths[len(self.times)]
            return start(number, entry, left)

        def measured(number: int, query: int, received: Any) -> Any:
            before = time.perf_counter()
            time.sleep(self.slept * _cost(query, sum(self.lengths[: len(self.times)]), EQUALS / SHORTER))
            made = run(number, query, received)
            self.times.append(time.perf_counter() - before)
            return made

        generator._start = started  # type: ignore[method-assign]
        generator.stage.run = measured  # type: ignore[method-assign]

    def seconds(self, lengths: list[int], slept: float = 0.0) -> tuple[float, list[float]]:
        """Return the seconds to the first token, and those of each chunk of this stage."""
        self.lengths, self.times, self.slept = lengths, [], slept
        dist.barrier()
        start = time.perf_counter()
        self.generator.generate([self.request] if not dist.get_rank() else ())
        return time.perf_counter() - start, self.times


def on_ranks(split: sk.Split, rank: int, store: str, tokens: int, counts: list[int], rounds: int, out: str) -> None:
    """Measure on one rank; rank 0 writes what it found."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=wait)
    chunked, rows = Chunked(sk.serve(split), tokens), []
    for count in counts:
        same = equal_lengths(tokens, count)
        each = [chunked.seconds(same)[1] for _ in range(2)][-1]
        # t(c tokens after p) = a (c + c (p + c / 2) / equals), of the first stage
        slope, start = np.polyfit(np.cumsum(same) - same[0] / 2, each, 1)
        told = [float(start / slope) if slope > 0 else EQUALS]
        dist.broadcast_object_list(told, src=0)
        fitted = max(told[0], tokens / 50)
        ways = {"lengths": same, "flops": equal_times(tokens, count, EQUALS), "fit": equal_times(tokens, count, fitted)}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, lengths in ways.items():
                whole, parts = chunked.seconds(lengths)
                taken[name].append((whole, max(parts)))
        short = tokens // SHORTER
        small = Chunked(sk.serve(split), short)
        waited = [
            small.seconds(lengths, 4 / _cost(short, 0, EQUALS / SHORTER))[0]
            for lengths in (equal_lengths(short, count), equal_times(short, count, EQUALS / SHORTER))
        ]
        middle = {name: [statistics.median(x) for x in zip(*rows, strict=True)] for name, rows in taken.items()}
        rows.append(
            {
                "tokens": tokens,
                "chunks": count,
                "equals": [EQUALS, fitted],
                "seconds": {name: whole for name, (whole, _) in middle.items()},
                "longest": {name: most for name, (_, most) in middle.items()},
                "computed": [middle["lengths"][0] / middle[name][0] for name in ("flops", "fit")],
                "waits": waited[0] / waited[1],
                "hold-up": [middle["lengths"][1] / middle[name][1] for name in ("flops", "fit")],
            }
        )
    if not rank:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measured(tokens: int, counts: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each number of chunks, measured on two processes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": 1000}
    config = LlamaConfig(**sizes, num_attention_heads=HEADS, max_position_embeddings=2 * tokens, eos_token_id=None)
    split = sk.split(sk.capture_decoder(LlamaForCausalLM(config).eval()), sk.policies.Stages(RANKS))
    with tempfile.TemporaryDirectory() as folder:
        store, out = f"file://{folder}/store", f"{folder}/found.json"
        fork = multiprocessing.get_context("fork")
        given = (tokens, counts, rounds, out)
        started = [fork.Process(target=on_ranks, args=(split, rank, store, *given)) for rank in range(RANKS)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        found: list[dict[str, Any]] = json.loads(Path(out).read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="on two processes, not by FLOPs of published models")
    parser.add_argument("--tokens", type=int, default=4096, help="of the measured prompt (default 4096)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[4, 8], help="numbers of chunks (default 4 8)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps({"rows": measured(args.tokens, args.chunks, args.rounds)}, indent=1))
        return
    rows = [row(model, *prompt, stages) for model in MODELS for prompt in PROMPTS for stages in (2, 4, 8)]
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
        return
    table = Table(*rows[0])
    for one in rows:
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in one.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
