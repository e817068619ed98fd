"""The options that several commands have. Nothing here waits for torch."""

from __future__ import annotations

import argparse
import shutil

from splitkit.cli.arguments import Parser, natural, positive, sizes
from splitkit.testing.models import NAMES

MODEL_HELP = f"an example ({', '.join(NAMES)}), package.module:factory, or path.py:factory"

Commands = argparse._SubParsersAction  # argparse has no public name for it


def add_links(group: argparse._ArgumentGroup) -> None:
    """The preset of links."""
    group.add_argument(
        "--links",
        metavar="NAME",
        help="what connects the devices, such as nvlink4, pcie4 or none; `splitkit devices` lists them (default: the "
        "usual ones of such devices, pcie4 where they differ)",
    )


def command(commands: Commands[Parser], name: str, what: str, example: str) -> Parser:
    """The parser of a command, with what all have."""
    indented = "\n".join(f"  {line}" for line in example.splitlines())
    parser = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"example:\n{indented}",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and warnings")
    return parser


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, up to 110 characters, with the texts further to the right than argparse has them."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(110, shutil.get_terminal_size().columns - 2))


def add_view(parser: argparse._ActionsContainer, what: str) -> None:
    """An option for a page to look at."""
    parser.add_argument("--view", metavar="FILE", help=f"also write a page to look at: {what}")


def add_output(parser: argparse._ActionsContainer) -> None:
    """An option for the file of a plan."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON (- for standard output)")


def add_plan_or_model(parser: Parser) -> None:
    """A plan file, or a model and a policy."""
    add_plan_target(parser)
    add_model_options(parser)
    add_policy_options(parser, "policy (with MODEL)")


def add_plan_target(parser: Parser) -> None:
    """The plan file or model that a command works on."""
    parser.add_argument("target", metavar="PLAN.json|MODEL", help=f"a plan, or {MODEL_HELP}")
    parser.add_argument("--model", metavar="SPEC", help="the model of the plan; needed to run a factory's code")


def add_model_options(parser: Parser) -> None:
    """Options default to None, so that those of a plan file hold unless others are given."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--size", type=sizes, action="append", metavar="NAME=N", help="sizes of the model: layers=4,width=256"
    )
    group.add_argument("--how", choices=("export", "symbolic_trace"), help="way of capture (default export)")
    group.add_argument("--dynamic", action="store_true", default=None, help="let the sizes of the inputs vary")
    group.add_argument("--eval", action="store_true", default=None, help="evaluation mode: no dropout")
    group.add_argument("--seed", type=natural, metavar="N", help="random seed of weights and inputs (default 0)")


def add_policy_options(parser: Parser, title: str, costs: str = "flops") -> None:
    """Which policy, and its prices."""
    group = parser.add_argument_group(title)
    one = group.add_mutually_exclusive_group()
    one.add_argument("--stages", type=positive, metavar="N", help="N pipeline stages; short for --policy 'Stages(N)'")
    one.add_argument("--policy", metavar="EXPR", help="a policy with its parameters; see `splitkit policies`")
    add_costs(group, costs)
    add_training(group)
    add_on_cycle(group)


def add_training(group: argparse._ArgumentGroup) -> None:
    """Whether prices include backward."""
    group.add_argument("--training", action="store_true", default=None, help="let costs include the backward of a node")


def add_on_cycle(group: argparse._ArgumentGroup) -> None:
    """What happens to parts in a cycle."""
    group.add_argument(
        "--on-cycle",
        choices=("error", "refine", "merge"),
        help="parts that depend on each other in a cycle: refuse (default), visit them several times, or join them",
    )


def add_costs(group: argparse._ArgumentGroup, default: str = "flops") -> None:
    """What a node costs."""
    group.add_argument(
        "--costs",
        metavar="KIND",
        help=f"what a node costs (default: {default}): flops, unit, measured, measured:DEVICE, roofline:DEVICE or "
        "fused:DEVICE (as Inductor fuses); DEVICE as `splitkit devices` lists them, or FILE.toml:NAME",
    )
