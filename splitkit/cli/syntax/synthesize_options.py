"""Adds the arguments of ``splitkit synthesize``."""

from __future__ import annotations

from splitkit.cli.syntax.arguments import Parser, above_zero, positive, sizes_of_memory
from splitkit.cli.syntax.options import Commands, add_links, add_plan_or_model, add_recompute, command
from splitkit.pipeline.schedules import USUAL_MICROBATCHES


def add_synthesize(commands: Commands[Parser]) -> None:
    """Add the parser of the command."""
    example = (
        "splitkit synthesize plan.json --microbatches 8 --memory 8GiB -o order.csv\n"
        "splitkit synthesize gpt2 --stages 8 --ranks 4 --costs roofline:h200 --links nvlink4 -o order.csv\n"
        "splitkit train plan.json --nproc 4 --schedule order.csv --check"
    )
    what = "make a pipeline schedule: order forward, input gradients and weight gradients on each rank"
    parser = command(commands, "synthesize", what, example)
    add_plan_or_model(parser)
    group = parser.add_argument_group("pipeline")
    group.add_argument(
        "--microbatches",
        type=positive,
        metavar="N",
        help=f"number of microbatches in a step (default: the plan's own, or {USUAL_MICROBATCHES})",
    )
    group.add_argument(
        "--ranks", type=positive, metavar="N", help="number of ranks that share the parts (default: one part on each)"
    )
    group.add_argument(
        "--placement",
        choices=("loop", "V"),
        help="with several parts per rank: part s on rank s mod N; or two per rank, in a V (default: the better one)",
    )
    group.add_argument(
        "--memory",
        type=sizes_of_memory,
        metavar="SIZE",
        help="memory limit of each rank, such as 80GiB (default: none)",
    )
    add_links(group)
    group.add_argument(
        "--optimizer",
        choices=("adam", "momentum", "sgd"),
        help="optimizer whose state takes memory (default: the plan's own, or adam)",
    )
    add_recompute(group)
    group.add_argument(
        "--objective",
        choices=("step", "span"),
        default="step",
        help="minimize the time of a step (default), or the longest time of a rank from its first to its last action",
    )
    group.add_argument(
        "--effort",
        type=above_zero,
        default=1.0,
        metavar="X",
        help="search effort: 10 searches ten times as much (default 1)",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the order as torch's schedule CSV (- for standard output)"
    )
