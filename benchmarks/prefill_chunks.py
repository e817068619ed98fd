"""What pieces of a prompt of equal time bring over pieces of equal length, by FLOPs and measured: ``--json``.

A piece of c tokens after p others costs c (1 + (p + c / 2) / r): the layers cost the same for each token, and attention
as much as they after r positions. A prompt passes n stages as jobs pass a line of machines, in the time of all its
pieces and n - 1 times the longest one. The first piece has the same length both ways: the memory of activations.

``pieces``    the number of pieces, of equal length and of equal time.
``prompt``    the time of a prompt with pieces of equal length over that with pieces of equal time.
``hold-up``   the longest piece, for which other requests wait, both ways: one over the other.

These figures are ratios of FLOPs, and kernels are less efficient for short pieces. With ``--measure`` a prompt runs on
two gloo processes with one thread each, alone, both ways in turns:

``computed``  ``prompt``, measured.
``waits``     the same where each stage sleeps as long as its piece has FLOPs, as if it waited for an accelerator: what
              is left of the gain when nothing disturbs the processes.
``hold-up``   as above, measured in the first stage.

Figures are medians of the rounds. Beware of other load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import splitkit as sk
from splitkit.engine.split import Split
from splitkit.runtime.generation.generation_request import Request
from splitkit.runtime.generation.generator import Generator
from splitkit.runtime.generation.prompt_pieces import piece

MODELS = {
    # parameters that multiply each token (without the embedding), heads x head size, layers
    "Llama-3-8B": (7.5e9, 32 * 128, 32),
    "Llama-3-70B": (69.5e9, 64 * 128, 80),
}
PROMPTS = ((8192, 512), (32768, 2048), (131072, 2048))


def row(model: str, tokens: int, chunk: int, stages: int) -> dict[str, float | int | str]:
    """Return the ratios of a prompt that is run in pieces."""
    parameters, width, layers = MODELS[model]
    equals = round(parameters * 2 / (4 * width * layers))
    same, even = (_costs(lengths, equals) for lengths in ([chunk] * (tokens // chunk), pieces(tokens, chunk, equals)))
    ways = [sum(costs) + (stages - 1) * max(costs) for costs in (same, even)]
    return {
        "model": model,
        "tokens": tokens,
        "chunk": chunk,
        "stages": stages,
        "pieces": f"{len(same)} / {len(even)}",
        "prompt": ways[0] / ways[1],
        "hold-up": max(same) / max(even),
    }


def pieces(tokens: int, chunk: int, equals: int) -> list[int]:
    """Return the lengths of the pieces in which a prompt is run."""
    found: list[int] = []
    while (before := sum(found)) < tokens:
        found.append(min(piece(chunk, before, equals), tokens - before))
    return found


def _costs(lengths: list[int], equals: float) -> list[float]:
    return [_cost(length, sum(lengths[:i]), equals) for i, length in enumerate(lengths)]


def _cost(chunk: float, before: float, equals: float) -> float:
    return chunk * (1 + (before + chunk / 2) / equals)


LAYERS, WIDTH, HEADS, RANKS, SHORTER = 4, 256, 8, 2, 8


class Chunked:
    """Runs a prompt in chunks of given lengths, and measures how long it takes."""

    def __init__(self, generator: Generator, tokens: int, equals: float) -> None:
        self.generator, self.request = generator, Request(((1, 2, 3, 4) * (tokens // 4),), max_new_tokens=1)
        self.times: list[float] = []
        self._costly, self.slept, run = round(equals), 0.0, generator.stage.run

        def measured(number: int, query: int, received: Any) -> Any:
            before = time.perf_counter()
            time.sleep(self.slept * _cost(query, generator.stage.held[number].length, equals))
            made = run(number, query, received)
            self.times.append(time.perf_counter() - before)
            return made

        generator.stage.run = measured  # type: ignore[method-assign]

    def seconds(self, even: bool, slept: float = 0.0) -> tuple[float, float]:
        """Return the seconds to the first token, and those of the longest piece of this stage."""
        self.generator._costly, self.times, self.slept = self._costly if even else None, [], slept
        dist.barrier()
        start = time.perf_counter()
        self.generator.generate([self.request] if not dist.get_rank() else ())
        return time.perf_counter() - start, max(self.times)


def on_ranks(split: Split, rank: int, store: str, tokens: int, chunks: list[int], rounds: int, out: str) -> None:
    """Measure on one rank; rank 0 writes what it found."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS, timeout=wait)
    rows = []
    for chunk in chunks:
        generator = sk.serve(split, chunk=chunk)
        equals = generator._costly
        assert equals is not None
        prompt, short = Chunked(generator, tokens, equals), tokens // SHORTER
        prompt.seconds(even=False)
        taken = [[*prompt.seconds(even=False), *prompt.seconds(even=True)] for _ in range(rounds)]
        small, slept = Chunked(sk.serve(split, chunk=chunk // SHORTER), short, equals / SHORTER), 4 / short
        waited = [small.seconds(even, slept)[0] for even in (False, True)]
        rows.append(
            {
                "tokens": tokens,
                "chunk": chunk,
                "equals": equals,
                "pieces": [tokens // chunk, len(pieces(tokens, chunk, equals))],
                "seconds": [statistics.median(one[i] for one in taken) for i in (0, 2)],
                "computed": statistics.median(one[0] / one[2] for one in taken),
                "waits": waited[0] / waited[1],
                "hold-up": statistics.median(one[1] / one[3] for one in taken),
            }
        )
    if not rank:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measured(tokens: int, chunks: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each length of the first piece, measured on two processes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": LAYERS, "vocab_size": 1000}
    config = LlamaConfig(**sizes, num_attention_heads=HEADS, max_position_embeddings=2 * tokens, eos_token_id=None)
    split = sk.split(sk.capture_decoder(LlamaForCausalLM(config).eval()), sk.policies.Stages(RANKS))
    with tempfile.TemporaryDirectory() as folder:
        store, out = f"file://{folder}/store", f"{folder}/found.json"
        fork = multiprocessing.get_context("fork")
        given = (tokens, chunks, rounds, out)
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
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 1024], help="tokens of a piece (512 1024)")
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
