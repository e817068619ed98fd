"""Generation on real processes, one thread each, with requests in flight and one at a time: ``--json`` for machines.

``in flight``   tokens a second with two requests underway for each process, over those with one. With
                more processes than cores it cannot reach the number of processes: the processes share the cores, and
                ``cores`` says how many there are.
``waits``       a simulation: the same with a request for each process, where each stage sleeps 50 ms and computes,
                as if it waited for an accelerator. Sleeping needs no core, so it shows whether the ring keeps every
                stage busy; it says nothing of the speed of any machine.
``overhead``    what a step of one request takes beyond what its stages compute, in microseconds for a stage: messages,
                choosing the token, and waking the next process.
``accelerate``  a decode step of transformers' ``generate`` after ``accelerate.dispatch_model`` with a hook on every
                layer, in one process: it has one request at a time, whatever the number of devices. There is one
                device here, so nothing is copied, which favours accelerate.

Figures are medians of the rounds. Beware of other load: the ratio is then that of what the machine has left.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
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

NEW, PROMPT, SLEEP, HEADS = 16, 16, 0.05, 8


def decoder(layers: int, width: int) -> Any:
    """Return a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    config = LlamaConfig(**sizes, num_attention_heads=HEADS, vocab_size=1000, eos_token_id=None)
    return LlamaForCausalLM(config).eval()


def requests(count: int) -> list[Request]:
    return [Request(((i + 1,) * PROMPT,), max_new_tokens=NEW) for i in range(count)]


def timed(generator: Generator, count: int, in_flight: int) -> float:
    """Return the seconds that some requests take, with so many underway; on rank 0, elsewhere nothing of meaning."""
    generator.in_flight = in_flight
    dist.barrier()
    start = time.perf_counter()
    generator.generate(requests(count) if not dist.get_rank() else ())
    return time.perf_counter() - start


def on_ranks(split: Split, rank: int, ranks: int, store: str, rounds: int, out: str) -> None:
    """Measure on one rank; rank 0 writes what it found."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    generator, count = sk.serve(split), 4 * ranks
    timed(generator, count, 2 * ranks)
    computed = [(timed(generator, count, 2 * ranks), timed(generator, count, 1)) for _ in range(rounds)]
    run = generator.stage.run

    def slept(*args: Any) -> Any:
        time.sleep(SLEEP)
        return run(*args)

    generator.stage.run = slept  # type: ignore[method-assign]
    waited = timed(generator, ranks, ranks), timed(generator, ranks, 1)
    generator.stage.run = run  # type: ignore[method-assign]
    overhead = statistics.median(overhead_of_a_step(generator) for _ in range(rounds))
    if not rank:
        found = {
            "overhead_us": overhead / ranks * 1e6,
            "tokens_a_second": count * NEW / statistics.median(many for many, _ in computed),
            "one_at_a_time": count * NEW / statistics.median(one for _, one in computed),
            "in_flight": statistics.median(one / many for many, one in computed),
            "waits": waited[1] / waited[0],
        }
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def overhead_of_a_step(generator: Generator) -> float:
    """Return the seconds that a step of one request takes beyond what the stages of all ranks compute."""
    run, inside = generator.stage.run, [0.0]

    def measured_run(*args: Any) -> Any:
        start = time.perf_counter()
        made = run(*args)
        inside[0] += time.perf_counter() - start
        return made

    generator.stage.run = measured_run  # type: ignore[method-assign]
    whole = timed(generator, 1, 1)
    generator.stage.run = run  # type: ignore[method-assign]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, inside[0])
    return (whole - sum(every)) / NEW


def accelerate_step(model: Any) -> float:
    """Return the seconds of a decode step of ``generate`` with accelerate's hooks on every layer."""
    from accelerate import dispatch_model

    names = [*(f"model.layers.{i}" for i in range(len(model.model.layers))), "model.embed_tokens", "model.norm"]
    placed = dict.fromkeys([*names, "model.rotary_emb", "lm_head"], "cpu")
    hooked: Any = dispatch_model(model, placed, main_device="cpu", force_hooks=True)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise RuntimeError("accelerate offloaded weights, which it should not here")
    ids = torch.ones(1, PROMPT, dtype=torch.long)

    def seconds(new: int) -> float:
        start = time.perf_counter()
        hooked.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        return time.perf_counter() - start

    seconds(2)
    return statistics.median((seconds(NEW + 1) - seconds(1)) / NEW for _ in range(3))


def measured(ranks: int, layers: int, width: int, rounds: int) -> dict[str, Any]:
    """Return the row of a number of processes."""
    model = decoder(layers, width)
    split = sk.split(sk.capture_decoder(model), sk.policies.Stages(ranks))
    with tempfile.TemporaryDirectory() as folder:
        store, out = f"file://{folder}/store", f"{folder}/found.json"
        fork = multiprocessing.get_context("fork")
        started = [
            fork.Process(target=on_ranks, args=(split, rank, ranks, store, rounds, out)) for rank in range(ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join()
        found = json.loads(Path(out).read_text())
    return {
        "processes": ranks,
        "cores": os.cpu_count(),
        **found,
        "step": 1 / found["one_at_a_time"],
        "accelerate": accelerate_step(model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of processes (default 2 4)")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(ranks, args.layers, args.width, args.rounds) for ranks in args.ranks]
    if args.json:
        print(
            json.dumps({"layers": args.layers, "width": args.width, "torch": torch.__version__, "rows": rows}, indent=1)
        )
        return
    titles = (
        "processes",
        "cores",
        "tokens/s",
        "in flight",
        "waits",
        "step ms",
        "overhead us",
        "accelerate ms",
    )
    table = Table(*titles)
    for row in rows:
        table.add_row(
            str(row["processes"]),
            str(row["cores"]),
            f"{row['tokens_a_second']:.1f}",
            f"{row['in_flight']:.2f} x",
            f"{row['waits']:.2f} x",
            f"{row['step'] * 1e3:.1f}",
            f"{row['overhead_us']:.0f}",
            f"{row['accelerate'] * 1e3:.1f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
