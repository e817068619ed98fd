"""A parser of arguments that raises and says what to write instead, and the types of its values. Without torch."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from splitkit.errors import UsageError, nearest

INSTEAD = "; write "
"""In the message of a type: what stands behind it is what the option takes."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would print and leave."""

    def error(self, message: str) -> NoReturn:
        """Raise SK601, with what to write instead where the message has it, or has what it is made of."""
        help_text = f"See `{self.prog} --help`."
        option = re.match(r"argument (?:\S+/)?(\S+): ", message)
        reason, _, instead = message.partition(INSTEAD)
        if instead and option:
            help_text = f"Write {option[1]} {instead}. {help_text}"
        elif reason.endswith("expected one argument") and option:
            help_text = f"Write {option[1]}={self._metavar(option[1])}. {help_text}"
        elif wrong := re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message):
            help_text = nearest(wrong[1], [word.strip("' ") for word in wrong[2].split(",")], help_text)
        raise UsageError("SK601", reason, help_text)

    def _metavar(self, option: str) -> str:
        action = self._option_string_actions[option]  # argparse has no public way to it
        return str(action.metavar or action.dest.upper())

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; an option that is not known is answered with the nearest one of its command.

        Raises:
            UsageError: SK601.
        """
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command: Parser = getattr(found, "parser", self)
            option, reason = unknown[0].partition("=")[0], f"unrecognized arguments: {' '.join(unknown)}"
            remedy = nearest(option, command._option_string_actions, f"See `{command.prog} --help`.")
            raise UsageError("SK601", reason, remedy)
        return found


def sizes(text: str) -> dict[str, int]:
    """``layers=4,width=256`` as a mapping."""
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
    """``2,4,8`` as whole numbers >= 1, each once."""
    for item in text.split(","):
        if not _is_natural(item) or not int(item):
            raise argparse.ArgumentTypeError(f"{item!r} is no whole number >= 1{INSTEAD}numbers of 1 or more: 2,4,8")
    return tuple(dict.fromkeys(map(int, text.split(","))))


def words(text: str) -> tuple[str, ...]:
    """``1f1b,zbv`` as words, each once."""
    return tuple(dict.fromkeys(word.strip() for word in text.split(",")))


def natural(text: str) -> int:
    """A whole number >= 0."""
    if not _is_natural(text):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no whole number >= 0{INSTEAD}0 or more")
    return int(text)


def positive(text: str) -> int:
    """A whole number >= 1."""
    if not _is_natural(text) or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no whole number >= 1{INSTEAD}1 or more, such as 4")
    return int(text)


def above_zero(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value


def _is_natural(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18
