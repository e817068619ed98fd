"""Adds the arguments of commands that have many of their own: ``export``, ``fit``, ``generate``, ``plan --from``.

Nothing here imports torch.
"""

from __future__ import annotations

import argparse

from splitkit.cli.syntax.arguments import Parser, above_zero, natural, positive, sizes
from splitkit.cli.syntax.options import (
    MODEL_HELP,
    Commands,
    add_flag,
    add_links,
    add_model_of_plan,
    add_model_options,
    add_number,
    add_plan_or_model,
    add_policy_options,
    add_recompute,
    add_size,
    command,
)
from splitkit.exports.format_list import WRITES
from splitkit.pipeline.schedules import words_of


def add_export(commands: Commands[Parser]) -> None:
    """Add the parser of the command."""
    width = max(map(len, WRITES))
    formats = "\n".join(f"  {name:<{width}}  {what}" for name, what in WRITES.items())
    example = (
        "splitkit export plan.json --to megatron\n"
        "splitkit export plan.json --to torch --schedule zbv --microbatches 8 --order order.csv -o stages.py\n"
        "splitkit export llama --stages 4 --costs roofline:h100 --to vllm\n"
        "splitkit export --to list"
    )
    parser = command(commands, "export", "write a plan in the format of another tool, and price the rounding", example)
    parser.epilog = f"formats:\n{formats}\n\n{parser.epilog}"
    parser.add_argument(
        "target", nargs="?", metavar="PLAN.json|MODEL", help=f"a plan file, or {MODEL_HELP}; not needed with --to list"
    )
    add_model_of_plan(parser)
    parser.add_argument("--to", required=True, metavar="FORMAT", help="the format, or list to list them")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the text (default: print it)")
    group = parser.add_argument_group("schedule and memory of the stages")
    group.add_argument(
        "--schedule",
        metavar="NAME|FILE.csv",
        help=f"{words_of()}, or an order in torch's format (default: the plan's own, or none)",
    )
    add_number(group, "--microbatches", "number of microbatches in a step (default: the plan's own)")
    group.add_argument("--order", metavar="FILE.csv", help="with --schedule: also write its actions in torch's format")
    add_size(group, "--memory", "memory limit of each rank for the rounded plan (default: none)")
    add_links(group)
    group.add_argument(
        "--optimizer",
        choices=("adam", "momentum", "sgd"),
        help="optimizer whose state takes memory (default: the plan's own, or adam with a schedule)",
    )
    add_recompute(group)
    add_model_options(parser)
    add_policy_options(parser, "policy (with MODEL)")


def add_import(parser: argparse._ActionsContainer) -> None:
    """Add ``--from`` and ``--form``."""
    group = parser.add_argument_group("stages of another tool")
    group.add_argument(
        "--from",
        dest="from_file",
        metavar="FILE",
        help="read the plan from a layout, device map, list of modules ... of another tool, and compare it with the "
        "plan of --stages or --policy (default: the same number of stages)",
    )
    group.add_argument(
        "--form",
        metavar="FORMAT",
        choices=tuple(WRITES),
        help="the format of the file; `splitkit export --to list` lists all",
    )


_FIT = (
    "splitkit fit llama-3-70b/config.json --devices 4x48GiB --tokens 8192\n"
    "splitkit fit config.json --devices rtx-3090,rtx-4090 --requests 8 --dtype float8\n"
    "splitkit fit config.json --devices 4x24GiB --train adamw --tokens 2048 --recompute\n"
    "splitkit fit my_model.py:make --devices 2x24GiB --json"
)


def add_fit(commands: Commands[Parser]) -> None:
    """Add the command."""
    parser = command(commands, "fit", "say whether a model fits your devices, and what would fit instead", _FIT)
    parser.add_argument(
        "model",
        metavar="CONFIG|MODEL",
        help=f"a transformers config.json or its folder, {MODEL_HELP}; no weights are created",
    )
    parser.add_argument(
        "--devices",
        metavar="LIST",
        help="the devices, such as 2x24GiB or rtx-3090,rtx-4090; `splitkit devices` lists the names (default: the GPUs "
        "of this machine, or its main memory); 5%% of each stays free",
    )
    add_number(
        parser,
        "--tokens",
        "tokens of each request or training sequence (default: 4096, or the model's context if that is less)",
    )
    add_number(parser, "--requests", "requests at once, or sequences per microbatch (default 1)", 1)
    add_number(parser, "--chunk", "largest number of new tokens per step, over all requests (default 512)", 512)
    parser.add_argument(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16 or float16; float8 or int4 for the weights of the layers (default: the model's own)",
    )
    parser.add_argument(
        "--size",
        type=sizes,
        action="append",
        metavar="NAME=N",
        help="sizes of an example or factory: layers=4,width=256",
    )
    group = parser.add_argument_group("training")
    group.add_argument(
        "--train",
        choices=("adam", "adamw", "momentum", "sgd"),
        help="train with this optimizer, as a pipeline with one stage per device (default: inference)",
    )
    group.add_argument("--schedule", default="1f1b", metavar="NAME", help="1f1b (default) or gpipe")
    add_number(group, "--microbatches", "microbatches in a step (default: 2 per device)")
    add_recompute(group)


_GENERATE = (
    "splitkit generate llama --stages 2 --prompt-ids 5,6,7\n"
    "splitkit plan llama --how decoder --stages 2 -o plan.json && splitkit generate plan.json --prompt-ids 5,6,7\n"
    "splitkit split plan.json -o stages && splitkit generate stages --weights checkpoint --tokenizer checkpoint "
    '--prompt "Once upon a time"\n'
    "splitkit generate plan.json --requests requests.jsonl --json\n"
    "torchrun --nproc-per-node 2 -m splitkit generate plan.json --prompt-ids 5,6,7"
)


def add_generate(commands: Commands[Parser]) -> None:
    """Add the command."""
    what = "generate text with a split decoder, one stage on each of several processes"
    parser = command(commands, "generate", what, _GENERATE)
    add_plan_or_model(parser)
    asked = parser.add_argument_group("requests")
    asked.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be given several times")
    asked.add_argument(
        "--prompt-ids",
        type=token_ids,
        action="append",
        metavar="ID,ID",
        help="a prompt as token ids; may be given several times",
    )
    asked.add_argument(
        "--requests",
        metavar="FILE.jsonl",
        help='a file with a request per line, such as {"input_ids": [5, 6], "max_new_tokens": 9, "do_sample": true}; '
        '"prompt" may replace "input_ids"',
    )
    asked.add_argument(
        "--tokenizer", metavar="PATH", help="the tokenizer for text: a folder, or a name on the Hugging Face Hub"
    )
    how = parser.add_argument_group("tokens (a request in the file may override these)")
    add_number(how, "--max-new-tokens", "largest number of tokens to generate (default 20)")
    add_flag(how, "--do-sample", "draw tokens at random, instead of the most likely one", default=None)
    how.add_argument("--temperature", type=above_zero, metavar="X", help="divides the logits (default 1)")
    how.add_argument("--top-k", type=natural, metavar="K", help="draw from the K most likely tokens (default: all)")
    how.add_argument(
        "--top-p",
        type=above_zero,
        metavar="P",
        help="draw from the likeliest tokens with this total probability (default 1)",
    )
    run = parser.add_argument_group("processes")
    add_number(run, "--nproc", "start N processes, one per stage (default: the number of stages)")
    run.add_argument("--weights", metavar="PATH", help="weights for a folder of stages, as for splitkit train")
    add_number(run, "--in-flight", "largest number of requests in flight (default: 2 per stage)")
    add_number(
        run,
        "--cache-tokens",
        "largest number of tokens in the KV caches of all requests in flight; others wait (default: no limit)",
    )
    add_number(run, "--chunk", "largest number of prompt tokens that run at once (default: all)")
    run.add_argument(
        "--timeout",
        type=positive,
        default=300,
        metavar="S",
        help="seconds that ranks wait for each other (default 300)",
    )


def token_ids(text: str) -> list[int]:
    """Return the token ids in a text such as ``5,6,7``."""
    return [natural(word) for word in text.split(",")]
