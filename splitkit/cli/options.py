"""The options that several commands have. Nothing here waits for torch."""

from __future__ import annotations

import argparse

from splitkit.cli.arguments import Parser, natural, positive, sizes
from splitkit.testing.models import NAMES

MODEL_HELP = f"an example ({', '.join(NAMES)}), package.module:factory, or path.py:factory"

Commands = argparse._SubParsersAction  # argparse has no public name for it


def add_links(group: argparse._ArgumentGroup) -> None:
    """The preset of links."""
    group.add_argument(
        "--links",
        metavar="NAME",
        help="nvlink3, nvlink4, nvlink5, pcie4, pcie5, ethernet100, ethernet400, shared-memory or none (default: what "
        "the devices usually have, pcie4 where they differ)",
    )


def command(commands: Commands[Parser], name: str, what: str, example: str) -> Parser:
    """The parser of a command, with what all have."""
    indented = "\n".join(f"  {line}" for line in example.splitlines())
    parser = commands.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}.",
        epilog=f"example:\n{indented}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(parser=parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--debug", action="store_true", help="show tracebacks and warnings")
    return parser


def add_view(parser: Parser, what: str) -> None:
    """A page besides."""
    parser.add_argument("--view", metavar="FILE", help=f"also write a page to look at: {what}")


def add_plan_or_model(parser: Parser) -> None:
    """A plan file, or a model and a policy."""
    parser.add_argument("target", metavar="PLAN.json|MODEL", help=f"a plan, or {MODEL_HELP}")
    parser.add_argument("--model", metavar="SPEC", help="the model of the plan; needed to run a factory's code")
    add_model_options(parser)
    add_policy_options(parser, "policy (with MODEL)")


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
    group.add_argument("--training", action="store_true", default=None, help="let costs include the backward of a node")
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
        help=f"what a node costs (default: {default}): flops, unit, measured (on this CPU; with --training backward "
        "too), measured:DEVICE, roofline:DEVICE or fused:DEVICE (cpu, a100, h100, h200, rtx-4090, l4, or "
        "devices.toml:NAME; fused: as Inductor fuses)",
    )
