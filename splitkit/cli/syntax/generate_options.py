"""Adds the command ``splitkit generate`` and its options; imports no torch."""

from __future__ import annotations

from splitkit.cli.syntax.arguments import Parser, above_zero, natural, positive
from splitkit.cli.syntax.options import Commands, add_plan_or_model, command

_EXAMPLE = (
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
    parser = command(commands, "generate", what, _EXAMPLE)
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
    how.add_argument(
        "--max-new-tokens", type=positive, metavar="N", help="largest number of tokens to generate (default 20)"
    )
    how.add_argument(
        "--do-sample", action="store_true", default=None, help="draw tokens at random, instead of the most likely one"
    )
    how.add_argument("--temperature", type=above_zero, metavar="X", help="divides the logits (default 1)")
    how.add_argument("--top-k", type=natural, metavar="K", help="draw from the K most likely tokens (default: all)")
    how.add_argument(
        "--top-p",
        type=above_zero,
        metavar="P",
        help="draw from the likeliest tokens with this total probability (default 1)",
    )
    run = parser.add_argument_group("processes")
    run.add_argument(
        "--nproc", type=positive, metavar="N", help="start N processes, one per stage (default: the number of stages)"
    )
    run.add_argument("--weights", metavar="PATH", help="weights for a folder of stages, as for splitkit train")
    run.add_argument(
        "--in-flight", type=positive, metavar="N", help="largest number of requests in flight (default: 2 per stage)"
    )
    run.add_argument(
        "--cache-tokens",
        type=positive,
        metavar="N",
        help="largest number of tokens in the KV caches of all requests in flight; others wait (default: no limit)",
    )
    run.add_argument(
        "--chunk", type=positive, metavar="N", help="largest number of prompt tokens that run at once (default: all)"
    )
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
