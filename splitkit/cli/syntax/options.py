"""Adds the options that several commands have; imports no torch."""

from __future__ import annotations

import argparse
import shutil

from splitkit.cli.syntax.arguments import Parser, natural, positive, sizes, sizes_of_memory
from splitkit.testing.factory import LOSSES, TARGET
from splitkit.testing.models import NAMES

MODEL_HELP = f"an example ({', '.join(NAMES)}), package.module:factory, path.py:factory, or path.pt2"

Commands = argparse._SubParsersAction  # argparse has no public name for it


def add_number(group: argparse._ActionsContainer, option: str, what: str, default: int | None = None) -> None:
    """Add an option whose value is a whole number >= 1."""
    group.add_argument(option, type=positive, metavar="N", default=default, help=what)


def add_size(group: argparse._ActionsContainer, option: str, what: str) -> None:
    """Add an option whose value is a size of memory."""
    group.add_argument(option, type=sizes_of_memory, metavar="SIZE", help=what)


def add_flag(group: argparse._ActionsContainer, option: str, what: str, default: bool | None = False) -> None:
    """Add an option without a value; its default is ``None`` if something else may decide."""
    group.add_argument(option, action="store_true", default=default, help=what)


def add_links(group: argparse._ArgumentGroup) -> None:
    """Add ``--links``."""
    group.add_argument(
        "--links",
        metavar="NAME",
        help="links between the devices, such as nvlink4, pcie4 or none; `splitkit devices` lists them (default: the "
        "usual links of such devices, or pcie4 if they differ)",
    )


def add_recompute(group: argparse._ArgumentGroup) -> None:
    """Add ``--recompute``."""
    add_flag(
        group,
        "--recompute",
        "activation checkpointing: save only the inputs of each part, and recompute the rest in backward",
        default=None,
    )


def command(commands: Commands[Parser], name: str, what: str, example: str) -> Parser:
    """Add the parser of a command, with the options that all commands have."""
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
    add_flag(parser, "--json", "print one JSON object and nothing else")
    add_flag(parser, "--debug", "show tracebacks and warnings")
    return parser


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formats help as wide as the terminal, up to 110 characters, with more room for option names."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(110, shutil.get_terminal_size().columns - 2))


def add_view(parser: argparse._ActionsContainer, what: str) -> None:
    """Add ``--view``."""
    parser.add_argument("--view", metavar="FILE", help=f"also write a page for a browser: {what}")


def add_output(parser: argparse._ActionsContainer) -> None:
    """Add ``--output`` for a plan file."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan as JSON (- for standard output)")


def add_plan_or_model(parser: Parser) -> None:
    """Add the arguments for a plan file, or a model and a policy."""
    add_plan_target(parser)
    add_model_options(parser)
    add_policy_options(parser, "policy (with MODEL)")


def add_plan_target(parser: Parser) -> None:
    """Add the argument for the plan file or model that a command works on."""
    parser.add_argument("target", metavar="PLAN.json|MODEL", help=f"a plan file, or {MODEL_HELP}")
    add_model_of_plan(parser)


def add_model_of_plan(parser: Parser) -> None:
    """Add ``--model`` for a plan file."""
    parser.add_argument(
        "--model",
        metavar="SPEC",
        help="the model of the plan; required for a model of your own, since a plan file alone may not run code",
    )


def add_model_options(parser: Parser) -> None:
    """Add the options of a model; they default to None, so that a plan file's own hold unless given."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--size", type=sizes, action="append", metavar="NAME=N", help="sizes of the model: layers=4,width=256"
    )
    group.add_argument(
        "--how",
        choices=("export", "symbolic_trace", "decoder"),
        help="how to capture the model (default export); decoder: one step of generation, with its KV caches",
    )
    add_flag(group, "--dynamic", "let the sizes of the inputs vary", default=None)
    add_flag(group, "--eval", "use evaluation mode: no dropout", default=None)
    group.add_argument(
        "--loss",
        metavar="LOSS",
        help=f"the loss of a model that returns predictions: {', '.join(LOSSES)}, or FILE.py:FUNCTION of the output; "
        f"the target is the keyword input {TARGET!r} of the factory. Without it: classes 0, 1, 2 ... in turn, which "
        "are the last dimension, of images the second; zeros for mse",
    )
    group.add_argument("--seed", type=natural, metavar="N", help="random seed of weights and inputs (default 0)")


def add_policy_options(parser: Parser, title: str, costs: str = "flops") -> None:
    """Add the options of a policy and its prices."""
    group = parser.add_argument_group(title)
    one = group.add_mutually_exclusive_group()
    add_number(one, "--stages", "N pipeline stages; short for --policy 'Stages(N)'")
    one.add_argument("--policy", metavar="EXPR", help="a policy with its parameters; see `splitkit policies`")
    add_costs(group, costs)
    add_training(group)


def add_training(group: argparse._ArgumentGroup) -> None:
    """Add ``--training``."""
    add_flag(group, "--training", "add the cost of each node's backward", default=None)


def add_costs(group: argparse._ArgumentGroup, default: str = "flops") -> None:
    """Add ``--costs``."""
    group.add_argument(
        "--costs",
        metavar="KIND",
        help=f"how to price nodes (default: {default}): flops, unit, measured, measured:DEVICE, roofline:DEVICE, "
        "or fused:DEVICE (as Inductor fuses); `splitkit devices` lists the names for DEVICE, or use FILE.toml:NAME",
    )
