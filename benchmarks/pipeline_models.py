"""Unmodified models as pipelines of real processes, beside the model itself: ``--json`` for machines.

Each model has random weights and tiny sizes, and is called as its documentation calls it: keyword inputs, attention
masks, labels, default ``use_cache``, dropout on. It is captured, cut by ``Stages(n)`` and trained for some steps of
AdamW on 2 and 4 gloo processes, on microbatches that differ. The model itself is trained beside it, microbatch by
microbatch from the pipeline's seeds, and every process compares (`pipeline_compare.py`): each loss, each gradient, and
each parameter and buffer after the optimizer's step; then what `Pipeline.infer` returns, leaf by leaf.

A case is *right* where all of these are within 1e-6 in the first step, and within 1e-4 in those after it; *wrong*;
*refused*, by an error with a code; or *fails*, by any other error.

Without arguments: the eleven of transformers under each of the seven schedules. ``--zoo``: the architectures of
`zoo_models.py`, most of which no test of the suite names.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pipeline_compare import MICROBATCHES, Alone, Inputs, run, trained
from rich.console import Console
from rich.table import Table
from torch import nn
from zoo_models import Row, rows
from zoo_senses import VISION, image
from zoo_transformers import TEXT, causal, hf, masked, seq2seq

import splitkit as sk
from splitkit.engine.split import Split

FIRST, LATER = 1e-6, 1e-4
SECONDS = 120.0

ELEVEN = {
    "gpt2": hf("decoder", "GPT2LMHeadModel", causal, None, n_layer=2, n_embd=32, n_head=4, vocab_size=96,
               bos_token_id=1, eos_token_id=2),
    "llama": hf("decoder", "LlamaForCausalLM", causal),
    "bert": hf("encoder", "BertForMaskedLM", masked, TEXT),
    "t5": hf("encoder-decoder", "T5ForConditionalGeneration", seq2seq, {}, vocab_size=96, d_model=32, d_kv=8, d_ff=64,
             num_layers=2, num_heads=4, decoder_start_token_id=0),
    "vit": hf("vision", "ViTForImageClassification", image, VISION),
    "whisper": "WhisperForConditionalGeneration",
    "mixtral": hf("MoE", "MixtralForCausalLM", causal, num_local_experts=4, num_experts_per_tok=2),
    "clip": "CLIPModel",
    "mamba": "MambaForCausalLM",
    "swin": "SwinForImageClassification",
    "resnet": "ResNetForImageClassification",
}  # fmt: skip
"""A row of its own, or the name of one of `zoo_models.py`."""


@dataclass(frozen=True)
class Case:
    """How a model is run."""

    stages: int
    ranks: int
    schedule: str


EVERY = (
    *(Case(2, 2, name) for name in ("gpipe", "1f1b")),
    *(Case(4, 2, name) for name in (
        "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbvzerobubble", "dualpipev")),
    *(Case(4, 4, name) for name in ("gpipe", "1f1b")),
)  # fmt: skip
SOME = (Case(2, 2, "1f1b"), Case(4, 4, "1f1b"), Case(4, 2, "interleavedzerobubble"))


def drawn(row: Row, seed: int) -> tuple[nn.Module, Inputs]:
    """The model and inputs of a seed."""
    torch.manual_seed(seed)
    model, inputs = row.make(True)
    return model.train(), inputs


def rank_of(split: Split, alone: Alone, case: Case, batches: list[list[Inputs]], rank: int, folder: str) -> None:
    """The process of a rank: its answer goes to a file."""
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.ranks,
            timeout=timedelta(seconds=SECONDS / 2),
        )  # fmt: skip
        answer = run(split, alone, case.schedule, batches)
    except BaseException as error:
        answer = said(error)
    Path(folder, f"{rank}.json").write_text(json.dumps(answer))
    sys.stderr.flush()
    os._exit(0)


def said(error: BaseException) -> dict[str, Any]:
    text = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())[:600]
    if os.environ.get("SPLITKIT_TRACE"):
        traceback.print_exception(error)
    if isinstance(error, sk.SplitError):
        own = error.code != "SK805"
        return {"verdict": "refused" if own else "fails", "why": text}
    return {"verdict": "fails", "why": f"{type(error).__name__}: {text}"}


def judged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks say together."""
    bad = [a for a in answers if "verdict" in a]
    if bad:
        return min(bad, key=lambda a: (a["verdict"] != "refused", "another rank" in a["why"], "waited" in a["why"]))
    worst: dict[str, tuple[float, str]] = {}
    for answer in answers:
        for when, limit in (("first", FIRST), ("later", LATER), ("infer", LATER)):
            for what, (value, name) in answer.get(when, {}).items():
                key = f"{what} {when}"
                if not value <= worst.get(key, (-1.0, ""))[0]:
                    worst[key] = value, name
                if not value <= limit:
                    bad.append({"why": f"{key} differs by {value:.1e}: {name}"})
    found = {key: value for key, (value, _) in worst.items()} | {"borders": answers[0]["borders"]}
    return found | ({"verdict": "wrong", "why": bad[0]["why"]} if bad else {"verdict": "right"})


def ran(split: Split, alone: Alone, case: Case, batches: list[list[Inputs]]) -> dict[str, Any]:
    """Run a case on processes of its own."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_of, args=(split, alone, case, batches, rank, folder))
            for rank in range(case.ranks)
        ]
        for process in processes:
            process.start()
        end = time.monotonic() + SECONDS
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        for process in processes:
            process.kill()
            process.join()
        answers = []
        for rank, process in enumerate(processes):
            file = Path(folder, f"{rank}.json")
            gone = {"verdict": "fails", "why": f"rank {rank} does not answer (exit {process.exitcode})"}
            answers.append(json.loads(file.read_text()) if file.exists() else gone)
    return judged(answers)


def examine(row: Row, cases: tuple[Case, ...], steps: int, tell: Callable[[dict[str, Any]], None]) -> None:
    """All cases of a model."""
    try:
        batches = [[drawn(row, 1 + step * MICROBATCHES + i)[1] for i in range(MICROBATCHES)] for step in range(steps)]
        alone = trained(drawn(row, 0)[0], batches)
    except Exception as error:
        tell({"case": "the model itself", **said(error), "verdict": "no row"})
        return
    try:
        model, inputs = drawn(row, 0)
        gm = sk.capture(model, **inputs)
    except Exception as error:
        tell({"case": "capture", **said(error)})
        return
    for case in cases:
        start = time.perf_counter()
        try:
            found = ran(sk.split(gm, sk.policies.Stages(case.stages)), alone, case, batches)
        except Exception as error:
            found = said(error)
        tell({**asdict(case), **found, "seconds": time.perf_counter() - start})


def inside(row: Row, cases: tuple[Case, ...], steps: int, pipe: Any) -> None:
    """What the process of a model does; what models print is not shown."""
    os.setsid()
    if not os.environ.get("SPLITKIT_TRACE"):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
    warnings.filterwarnings("ignore")
    examine(row, cases, steps, pipe.send)


def examined(row: Row, cases: tuple[Case, ...], steps: int) -> dict[str, Any]:
    """A row of the table, whatever becomes of its process."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=inside, args=(row, cases, steps, sending))
    process.start()
    sending.close()
    found: list[dict[str, Any]] = []
    while receiving.poll(SECONDS * 1.5):
        try:
            found.append(receiving.recv())
        except EOFError:
            break
    if process.is_alive() and process.pid is not None:
        process.join(2)
        if process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    verdicts = Counter(case["verdict"] for case in found)
    print(f"{row.name}: {dict(verdicts)}", file=sys.stderr, flush=True)
    for case in found:
        if case["verdict"] != "right":
            print(
                f"    {case.get('stages')}-{case.get('ranks')}-{case.get('schedule')}: {case['why']}",
                file=sys.stderr,
                flush=True,
            )
    return {"name": row.name, "family": row.family, "cases": found}


def chosen(args: argparse.Namespace) -> list[Row]:
    named = {row.name: row for row in rows()}
    if args.zoo:
        found = [row for row in named.values() if "train" in row.modes and row.installed]
    else:
        found = [named[row] if isinstance(row, str) else row for row in ELEVEN.values()]
    return [row for row in found if not args.only or row.name.lower().startswith(tuple(n.lower() for n in args.only))]


def summary_of(table: list[dict[str, Any]]) -> dict[str, Any]:
    cases = [case for row in table for case in row["cases"]]
    whole = sum(all(c["verdict"] == "right" for c in row["cases"]) and bool(row["cases"]) for row in table)
    named = sum(all(c["verdict"] in ("right", "refused") for c in row["cases"]) and bool(row["cases"]) for row in table)
    keys = sorted({key for c in cases for key in c if key.split()[-1] in ("first", "later", "infer")})
    return {
        "models": len(table), "right in every case": whole, "right, or refused by name": named,
        "cases": dict(Counter(case["verdict"] for case in cases)),
        "largest relative difference": {key: max(c[key] for c in cases if key in c) for key in keys},
    }  # fmt: skip


def show(table: list[dict[str, Any]]) -> None:
    """A row a model."""
    console = Console(width=190)
    columns = list(
        dict.fromkeys((c["stages"], c["ranks"], c["schedule"]) for r in table for c in r["cases"] if "stages" in c)
    )
    shown = Table()
    for heading in ("model", *(f"{s} stages\n{r} ranks\n{name}" for s, r, name in columns)):
        shown.add_column(heading, no_wrap=True, overflow="ignore")
    for row in table:
        cells = {(c.get("stages"), c.get("ranks"), c.get("schedule")): c for c in row["cases"]}
        shown.add_row(row["name"], *(cell(cells.get(key)) for key in columns))
    console.print(shown)
    for row in table:
        for case in row["cases"]:
            if case["verdict"] != "right":
                console.print(f"{row['name']} {case.get('schedule', 'capture')}: {case['why']}", markup=False)


def cell(case: dict[str, Any] | None) -> str:
    if case is None or case["verdict"] != "right":
        return "" if case is None else case["verdict"]
    return f"{max(case[key] for key in case if key.endswith(' first')):.0e}"


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--zoo", action="store_true", help="architectures of the zoo instead of the eleven")
    parser.add_argument("--every", action="store_true", help="each schedule also for the zoo")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="models whose names begin so")
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = EVERY if args.every or not args.zoo else SOME
    table = [examined(row, cases, args.steps) for row in chosen(args)]
    summary = summary_of(table)
    if args.json:
        print(json.dumps({"rows": table, "summary": summary}))
    else:
        show(table)
        Console(width=190).print(summary)


if __name__ == "__main__":
    main()
