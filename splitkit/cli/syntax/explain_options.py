"""Adds the commands ``explain`` and ``compare``; imports no torch."""

from __future__ import annotations

from splitkit.cli.syntax.arguments import Parser
from splitkit.cli.syntax.options import Commands, add_model_of_plan, add_model_options, command


def add_explain(commands: Commands[Parser]) -> None:
    """Add ``splitkit explain``."""
    example = "splitkit explain plan.json\nsplitkit explain plan.json add_7 --json\nsplitkit explain step.json"
    what = "explain a plan: what limits it, what must be in the part of a node, what a change would gain"
    parser = command(commands, "explain", what, example)
    parser.add_argument("target", metavar="PLAN.json", help="a plan file")
    parser.add_argument("where", metavar="NODE", nargs="?", help="a node of the graph (default: the whole plan)")
    add_model_of_plan(parser)
    add_model_options(parser)
    parser.add_argument(
        "--policy",
        metavar="EXPR",
        help="the policy whose memory, schedule and links apply (default: the one that made the plan)",
    )
    parser.add_argument("--fast", action="store_true", help="do not plan again with more devices or more memory")


def add_compare(commands: Commands[Parser]) -> None:
    """Add ``splitkit compare``."""
    example = "splitkit compare a.json b.json\nsplitkit compare a.json b.json --json"
    parser = command(
        commands, "compare", "compare two plans of a model: what they place differently, and what that costs", example
    )
    parser.add_argument("target", metavar="A.json", help="a plan file; its prices and limits apply to both")
    parser.add_argument("other", metavar="B.json", help="another plan file of the same model")
    add_model_of_plan(parser)
    add_model_options(parser)
