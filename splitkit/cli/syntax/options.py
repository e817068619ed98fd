"""Adds the options that several commands have; imports no torch."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from typing import Any, NoReturn

from splitkit.errors import UsageError, nearest
from splitkit.testing.factory import LOSSES, TARGET
from splitkit.testing.models import NAMES
from splitkit.units import read_percent, read_size

# Defines an argument parser whose errors say what to write instead, and the types of option values.


INSTEAD = "; write "
"""Separates, in the error message of a type, the reason from what the option accepts."""
_FEW_BYTES = 2**20
"""Fewer bytes than this need a unit."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `UsageError` where argparse would print a message and exit."""

    _words: list[str]

    def error(self, message: str) -> NoReturn:
        """Raise SK601, with what to write instead where that can be told from the message."""
        help_text = f"See `{self.prog} --help`."
        option = re.match(r"argument (?:\S+/)?(\S+): ", message)
        reason, _, instead = message.partition(INSTEAD)
        if split := next(filter(None, map(self._split_size, self._words)), ""):
            help_text = split
        elif instead and option:
            help_text = f"Write {option[1]} {instead}. {help_text}"
        elif reason.endswith("expected one argument") and option and (value := self._negative_value(option[1])):
            reason, help_text = f"{option[1]} {value} is below zero", f"Write {option[1]} {value[1:]}. {help_text}"
        elif reason.endswith("expected one argument") and option:
            action = self._option_string_actions[option[1]]  # argparse has no public name for it
            help_text = f"Write {option[1]}={action.metavar or action.dest.upper()}. {help_text}"
        elif wrong := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            help_text = nearest(wrong[1], [word.strip("' ") for word in wrong[2].split(",")], help_text)
        raise UsageError("SK601", reason, help_text)

    def format_help(self) -> str:
        """Return the help with a short usage line: argparse would list all options there, and again below."""
        if self.usage is None and self._subparsers is None:  # argparse has no public name for it
            names = [str(action.metavar) for action in self._get_positional_actions()]
            self.usage = " ".join(["%(prog)s [options]", *names])
        return super().format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does, and keep the words for error messages."""
        self._words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._words, namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse as argparse does; suggest the nearest option of the command for an unknown one.

        Raises:
            UsageError: SK601.
        """
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command: Parser = getattr(found, "parser", self)
            option, reason = unknown[0].partition("=")[0], f"unrecognized arguments: {' '.join(unknown)}"
            remedy = nearest(option, command._option_string_actions, f"See `{command.prog} --help`.")
            raise UsageError("SK601", reason, self._split_size(unknown[0]) or remedy)
        return found

    def every_argument(self) -> list[argparse.Action]:
        """Return the arguments of the parser and of its commands."""
        return [*self._actions, *(action for own in self.commands().values() for action in own.every_argument())]

    def commands(self) -> dict[str, Parser]:
        """Return the parsers of the commands by name, and nothing for the parser of a command."""
        found = (action for action in self._actions if isinstance(action, argparse._SubParsersAction))
        return {name: parser for action in found for name, parser in action.choices.items()}

    def _split_size(self, suffix: str) -> str:
        """Return what to write in place of ``--memory 80 GB``, or ``""`` if the words are something else."""
        at = self._words.index(suffix) if suffix in self._words else 0
        option, number = self._words[at - 2 : at] if at >= 2 else ("", "")
        read = read_percent if suffix == "%" else read_size
        is_size = option.startswith("--") and read_size(number) is not None and not suffix.isdecimal()
        is_size = is_size and read(number + suffix) is not None
        return f"Write {option} {number}{suffix}." if is_size else ""

    def _negative_value(self, option: str) -> str:
        """Return ``-1GiB`` of ``--memory -1GiB``, or ``""`` if no negative value follows the option."""
        at = self._words.index(option) + 1 if option in self._words else len(self._words)
        value = self._words[at] if at < len(self._words) else ""
        return value if re.match(r"-\.?\d", value) else ""


def sizes(text: str) -> dict[str, int]:
    """Parse ``layers=4,width=256``."""
    found: dict[str, int] = {}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        if not equals or not name.isidentifier():
            raise argparse.ArgumentTypeError(f"{item!r} is not NAME=N{INSTEAD}NAME=N, such as layers=4")
        if not _is_natural(value):
            raise argparse.ArgumentTypeError(f"{item!r} has no whole number >= 0{INSTEAD}{name}=N, such as {name}=4")
        found[name] = int(value)
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Parse ``2,4,8``: whole numbers >= 1, each once."""
    for item in text.split(","):
        if not _is_natural(item) or not int(item):
            raise argparse.ArgumentTypeError(f"{item!r} is not a whole number >= 1{INSTEAD}numbers of 1 or more: 2,4,8")
    return tuple(dict.fromkeys(map(int, text.split(","))))


def words(text: str) -> tuple[str, ...]:
    """Parse ``1f1b,zbv``: words, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def natural(text: str) -> int:
    """Parse a whole number >= 0."""
    if not _is_natural(text):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number >= 0{INSTEAD}0 or more")
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number >= 1."""
    if not _is_natural(text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number >= 1{INSTEAD}1 or more, such as 4")
    return int(text)


def sizes_of_memory(text: str) -> str:
    """Return a text of sizes; refuse ``80``, ``8e1`` or ``24,16``: so few bytes that a unit must be missing."""
    words = text.split(",")
    for word in filter(_lacks_unit, words):
        instead = ",".join(f"{one}GB" if _lacks_unit(one) else one for one in words)
        raise argparse.ArgumentTypeError(f"{word} is {word} bytes{INSTEAD}{instead}, or {word}B if you mean bytes")
    return text


def _lacks_unit(word: str) -> bool:
    return bool(word) and word[-1] in "0123456789" and 1 < (read_size(word) or 0) < _FEW_BYTES


def above_zero(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _is_natural(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


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


def add_optimizer(group: argparse._ArgumentGroup, default: str) -> None:
    """Add ``--optimizer`` of a training step; ``default`` says which it is without the option."""
    help_text = f"optimizer whose state takes memory ({default})"
    group.add_argument("--optimizer", choices=("adam", "momentum", "sgd"), help=help_text)


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


def add_plan_or_model(parser: Parser) -> None:
    """Add the arguments for a plan file, or a model and a policy."""
    add_plan_target(parser)
    add_model_options(parser)
    add_policy_options(parser)


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


def add_policy_options(parser: Parser) -> None:
    """Add the options of a policy and its prices."""
    group = parser.add_argument_group("policy (with MODEL)")
    one = group.add_mutually_exclusive_group()
    add_number(one, "--stages", "N pipeline stages; short for --policy 'Stages(N)'")
    one.add_argument("--policy", metavar="EXPR", help="a policy with its parameters; see `splitkit policies`")
    add_costs(group, "flops")
    add_training(group)


def add_training(group: argparse._ArgumentGroup) -> None:
    """Add ``--training``."""
    add_flag(group, "--training", "add the cost of each node's backward", default=None)


def add_costs(group: argparse._ArgumentGroup, default: str) -> None:
    """Add ``--costs``."""
    group.add_argument(
        "--costs",
        metavar="KIND",
        help=f"how to price nodes (default: {default}): flops, unit, measured, measured:DEVICE, roofline:DEVICE, "
        "or fused:DEVICE (as Inductor fuses); `splitkit devices` lists the names for DEVICE, or use FILE.toml:NAME",
    )
