"""Adds the arguments of ``splitkit export``, and those of ``splitkit plan --from``."""

from __future__ import annotations

import argparse

from splitkit.cli.syntax.arguments import Parser, positive, sizes_of_memory
from splitkit.cli.syntax.options import (
    MODEL_HELP,
    Commands,
    add_links,
    add_model_of_plan,
    add_model_options,
    add_policy_options,
    add_recompute,
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
        "--schedule", metavar="NAME|FILE.csv", help=f"{words_of()}, or an order in torch's format (default: the plan's)"
    )
    group.add_argument(
        "--microbatches", type=positive, metavar="N", help="number of microbatches in a step (default: the plan's own)"
    )
    group.add_argument("--order", metavar="FILE.csv", help="also write the schedule's actions in torch's format")
    group.add_argument(
        "--memory",
        type=sizes_of_memory,
        metavar="SIZE",
        help="memory limit of each rank for the rounded plan (default: none)",
    )
    add_links(group)
    group.add_argument(
        "--optimizer", choices=("adam", "momentum", "sgd"), help="optimizer whose state takes memory (default adam)"
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
